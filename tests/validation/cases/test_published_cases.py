"""The shipped published cases are the measurements as they were published: none added, lost or retouched.

A setting that a source did not state may be corrected (`sim/validation/corrections.yaml`); a measurement never.
"""

from __future__ import annotations

import hashlib
import json

import pytest
import yaml

from sim.catalog import folder
from sim.validation.cases.files import expand, read

PUBLISHED = folder("scenarios") / "published"
DIGESTS = {
    "answer_ai_fsdp_qlora.yaml": "31fdd4c87150f3bc",
    "bigscience_a100.yaml": "ebc5c4ea80e40398",
    "bigscience_v100.yaml": "7a6536afef566422",
    "deepspeed_azure.yaml": "40751eec4ede63db",
    "dle_bert.yaml": "6ed137e1f16df445",
    "fms_fsdp_a100.yaml": "9900ac8fb3056e5c",
    "fsdp_aws.yaml": "b85180f6254ad2bc",
    "fsdp_paper.yaml": "78a93ffe43e380f4",
    "korthikanti.yaml": "f796208331da2cd2",
    "litgpt.yaml": "81cf1b3630f0f0d2",
    "llm_foundry_v1_a100_40g.yaml": "d732eb067fdd3dff",
    "llm_foundry_v1_a100_80g.yaml": "9e0eb41b277a4784",
    "llm_foundry_v2_a100_40g.yaml": "70a9767b668acaed",
    "llm_foundry_v2_a100_80g.yaml": "7d8bc62286df46b1",
    "llm_foundry_v3_a100_80g.yaml": "3d7f64d10bce84e9",
    "llm_foundry_v5_a100_40g.yaml": "2a8d406c9ee79fb3",
    "llm_foundry_v5_a100_80g.yaml": "547e2e577f23f23f",
    "llm_foundry_v5_h100.yaml": "b446e6849119b82b",
    "megatron_2019.yaml": "f37bbba3a0738c76",
    "megatron_2020.yaml": "51b3653c4e2d9e5e",
    "megatron_bridge.yaml": "c1f3f2c048599656",
    "megatron_ddp.yaml": "a5856e8590e0d275",
    "megatron_golden.yaml": "742b08240b9394bc",
    "megatron_readme_gpt3.yaml": "64cccbe18d4030f8",
    "megatron_sc21.yaml": "80bdc6c0a330b0ec",
    "megatron_sc21_paper.yaml": "5a459e3d38ea33d4",
    "nanotron.yaml": "1561e5630aa992a5",
    "nemo.yaml": "11186fcfe8dd751f",
    "neusight.yaml": "3565b86c4fa42da1",
    "resnet50.yaml": "bd33f3c3fd045347",
    "simumax_a100_pcie.yaml": "44861f7469c56c25",
    "simumax_b200.yaml": "effdb97f224e06de",
    "zero_bubble.yaml": "848a2fceda630ea5",
}


def digest(name: str) -> str:
    """SHA-256 over (id, set, measured, quality) of a file's cases and its defaults."""
    text = (PUBLISHED / name).read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    rows = [[c["id"], c["set"], c["measured"], c.get("quality")] for c in data["cases"]]
    plain = json.dumps([data["defaults"], rows], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", DIGESTS)
def test_measurements_are_as_published(name: str) -> None:
    assert digest(name) == DIGESTS[name]


def test_no_source_is_missing_or_unlisted() -> None:
    assert {p.name for p in PUBLISHED.glob("*.yaml")} == set(DIGESTS)


def test_every_file_reads_and_every_case_is_kept() -> None:
    files = [read(PUBLISHED / name) for name in DIGESTS]
    assert sum(len(f.cases) for f in files) == 1314
    assert all(f.kind == "training" for f in files)
    marked = [c for f in files for c in f.cases if c.quality is not None]
    assert len(marked) == 185


def test_a_source_is_found_by_its_name_alone() -> None:
    assert expand(["fsdp_paper"]) == [PUBLISHED / "fsdp_paper.yaml"]
