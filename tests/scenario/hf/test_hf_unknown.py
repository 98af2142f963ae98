"""A config of a family that is not read is answered with the nearest that can be asked, and that can be asked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from sim.errors import UserError
from sim.model import build
from sim.scenario import resolve
from sim.software.choice import stack_of

VIT = {"model_type": "vit", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
       "num_hidden_layers": 24, "image_size": 224, "patch_size": 16}
WHISPER = {"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
           "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
           "decoder_ffn_dim": 5120, "vocab_size": 51865, "max_source_positions": 1500}


def refused(tmp_path: Path, config: dict[str, object]) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        resolve({"name": "x", "cluster": {"topology": "single-h100-80g-sxm"}, "model": {"hf": str(path)},
                 "training": {"micro_batch": 1, "global_batch": 1, "sequence": 64}}, str(tmp_path / "x.yaml"))
    return error.value.faults[0].hint


@pytest.mark.parametrize(("config", "sequence", "parameters"), [
    (VIT, 197, 304.3e6),  # ViT-L/16 (Dosovitskiy et al. 2020: 307M with 21k classes' head left out of it)
    (WHISPER, 1500, 1.54e9),  # Whisper large (Radford et al. 2022: 1550M)
], ids=["vit", "whisper"])
def test_the_nearest_that_is_simulated_is_told_in_the_configs_sizes(
    tmp_path: Path, config: dict[str, object], sequence: int, parameters: float,
) -> None:
    hint = refused(tmp_path, config)
    model = yaml.safe_load(re.findall(r"\{.*?\}", hint)[0])
    assert f"training.sequence: {sequence}," in hint
    s = resolve({"name": "x", "cluster": {"topology": "single-h100-80g-sxm"}, "model": model,
                 "training": {"micro_batch": 1, "global_batch": 1, "sequence": sequence, "decoder_sequence": 448
                              if model["kind"] == "encoder-decoder" else None}})
    assert build(s, stack_of(s.software), 1).parameters == pytest.approx(parameters, rel=0.02)


def test_what_is_no_attention_is_said_so(tmp_path: Path) -> None:
    assert refused(tmp_path, {"model_type": "mamba2"}) == "state spaces and linear attention are not simulated"
    assert refused(tmp_path, {"model_type": "vit"}).startswith("known: llama, ")  # sizes are left to its class


def test_a_slip_in_the_name_of_a_family_is_answered_with_the_nearest(tmp_path: Path) -> None:
    assert refused(tmp_path, {"model_type": "mixtrl"}).startswith("did you mean 'mixtral'?; known: llama, ")
