"""Strange values in files of the tools that stand on others: whatever stands where, a message is all that is raised."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.imports.draft import Draft
from sim.imports.hugging.facts import Job, renamed, set_apart
from sim.imports.read import import_files
from sim.imports.settings import Settings, read_settings, resolved

FILES = Path(__file__).parent / "files"
KINDS = {"axolotl": ("axolotl_qlora_fsdp_70b", "axolotl_llama_8b_hsdp_tp", "axolotl_3b_fp8_fsdp2"),
         "llamafactory": ("llamafactory_qwen3_qlora", "llamafactory_fsdp_qlora"),
         "torchtune": ("torchtune_llama3_1_70b_lora", "torchtune_llama3_1_8b_full_single_device"),
         "llm-foundry": ("foundry_mpt_7b",), "nemo": ("nemo_gpt_5b",), "litgpt": ("litgpt_llama2_7b_lora",)}
ALL = [(kind, name) for kind, names in KINDS.items() for name in names]
TEXTS = {name: (FILES / f"{name}.yaml").read_text(encoding="utf-8") for _, name in ALL}
STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.floats(), st.text(max_size=3), st.just([]), st.just({}),
    st.sampled_from(["auto", "full", "true", "-1", "${a.b}", "${.x}", "${multiply:2,${.hidden_size}}", "bf16", "\0",
                     "Llama-2-7b", "9" * 40, ["x", 3], {"name": "x"}, {"_component_": "torch.optim.AdamW"}, [[1]]]))
ON = ("cluster.topology=dgx-a100-80g", "training.sequence=512", "training.micro_batch=1")


def leaves(data: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all settings, mappings too."""
    found = []
    for key, value in data.items():
        found.append((*above, key))
        if isinstance(value, dict):
            found += leaves(value, (*above, key))
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.sampled_from(ALL), data=st.data())
def test_one_strange_value_among_right_ones(which: tuple[str, str], data: st.DataObject, tmp_path: Path) -> None:
    kind, name = which
    text = TEXTS[name]
    changed: dict[str, Any] = copy.deepcopy(yaml.safe_load(text))
    *above, last = data.draw(st.sampled_from(leaves(changed)))
    here = changed
    for part in above:
        here = here[part]
    here[last] = data.draw(STRANGE)
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    path = tmp_path / "job.yaml"
    path.write_text(head + yaml.safe_dump(changed, allow_unicode=True), encoding="utf-8")
    try:
        import_files(kind, [str(path)], ON)
    except UserError as error:
        assert all(fault.message for fault in error.faults)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_whole_file_is_told_in_full(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting with a value stands in some list, under the name that the file has."""
    monkeypatch.chdir(FILES)
    data = yaml.safe_load(TEXTS[name])
    found = import_files(kind, [f"{name}.yaml"], ON[:2] if kind == "torchtune" else ON[:1])
    told = {note.said.rpartition(": ")[2] for note in found.notes}
    for path in leaves(data):
        value: Any = data
        for part in path:
            value = value[part]
        above = {".".join(path[:length]) for length in range(1, len(path))}
        if value is not None and not (isinstance(value, dict) and value):
            assert ".".join(path) in told or above & told, path


# --------------------------------------------------------------------------------------------------- names of settings
def test_names_of_other_settings_are_what_they_lead_to() -> None:
    found = resolved(Settings("f", {"a": {"b": 3, "c": "${.b}", "d": "${..e}", "no": "${gone}", "env": "${oc.env:X}"},
                                    "e": "${a.b}", "f": {"g": "${a.c}"}, "text": "x ${a.b}"}))
    assert found.data == {"a": {"b": 3, "c": 3, "d": 3, "no": "${gone}", "env": "${oc.env:X}"}, "e": 3, "f": {"g": 3},
                          "text": "x ${a.b}"}
    with pytest.raises(UserError, match=r"f: a: expected a name that leads to a value, found '\$\{b\}'"):
        resolved(Settings("f", {"a": "${b}", "b": "${a}"}))


def test_a_file_under_other_names_tells_its_own(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("optimizer: adamw\nmore: {deep: 1, deeper: 2}\noptim: other\n", encoding="utf-8")
    view = renamed(read_settings(str(tmp_path / "f.yaml")), {"optimizer": "optim", "optim": "old", "more": "rest"})
    said = view.get("optim")
    assert said is not None and (said.name, said.value, said.line) == ("optimizer", "adamw", 1)
    deep = view.get("rest.deep")
    assert deep is not None and (deep.name, deep.line) == ("more.deep", 2)
    assert [(one.name, idle) for one, idle in view.rest()] == [("more.deeper", False), ("optim", False)]
    assert view.get("more.deep") is None


def test_what_one_reader_keeps_another_does_not_see() -> None:
    job = Job(Draft())
    whole = Settings("f", {"mine": 1, "yours": 2, "nobody": 3})
    whole.get("mine")
    rest = set_apart(whole, job, ["mine"])
    assert rest.get("mine") is None and rest.get("yours") is not None
    assert (list(whole.data), list(rest.data), job.files) == (["mine"], ["yours", "nobody"], [rest])
    assert [one.name for part in (whole, rest) for one, _ in part.rest()] == ["nobody"]
