"""Arguments out of launch scripts, without a shell."""

from __future__ import annotations

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import UserError
from sim.imports.arguments import Args, read_arguments


def args(tmp_path: Path, text: str, name: str = "run.sh") -> Args:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_arguments([str(path)])


def values(tmp_path: Path, text: str) -> dict[str, Any]:
    return dict(args(tmp_path, text).settings[0].data)


@pytest.mark.parametrize(("before", "written", "value"), [
    ("A=8", "$A", "8"),
    ("A=8", "${A}", "8"),
    ("A='8'", '"$A"', "8"),
    ("", "${A:-16}", "16"),
    ("A=", "${A:-16}", "16"),
    ("A=4", "${A:-16}", "4"),
    (": ${A:=3}", "$A", "3"),
    ("A=8; B=16", "$((A*B))", "128"),
    ("A=8; B=16", "$(($A * ${B} + 2))", "130"),
    ("A=8", "$((A/3))", "2"),
    ("A=8", "x${A}y", "x8y"),
    ("export A=8", "$A", "8"),
    ("declare -i A=8", "$A", "8"),
    ("A=1; A+=2", "$A", "12"),
    ("A=\"a  b\"", '"$A"', "a  b"),
    ("", "'$A'", "$A"),
    ("", "$A", "$A"),
    ("", "$(nproc)", "$(nproc)"),
    ("A=$(nproc)", "$A", "$(nproc)"),
    ("if [ 1 -eq 1 ]; then A=2; else A=3; fi", "$A", "2"),
    ("S=7B\nif [[ $S == \"13B\" ]]\nthen\nA=2\nelif [ \"$S\" = 7B ]; then\nA=3\nelse\nA=4\nfi", "$A", "3"),
    ("if [ -z \"$1\" ]; then A=2; else A=$1; fi", "$A", "2"),
    ("if which nvcc; then A=2; else A=3; fi", "$A", "3"),
    ("if [ 1 = 1 ] && [ 2 = 3 ]; then A=2; else A=3; fi", "$A", "3"),
    ("if [ 1 = 2 ]; then if [ 1 = 1 ]; then A=1; else A=2; fi; else A=3; fi", "$A", "3"),
    ("S=b\ncase $S in\n  a) A=1 ;;\n  b|c)\n A=2\n ;;\n *) A=3 ;;\nesac", "$A", "2"),
    ("S=z\ncase \"$S\" in\n  a) A=1 ;;\n *) A=3 ;;\nesac", "$A", "3"),
    ("A=1; [ -z \"$X\" ] && A=2", "$A", "2"),
    ("A=1; [ -n \"$X\" ] && A=2", "$A", "1"),
    ("cat <<EOF\nA=5\n--not-this 1\nEOF\nA=6", "$A", "6"),
])
def test_a_value(tmp_path: Path, before: str, written: str, value: str) -> None:
    found = values(tmp_path, f"{before}\npython train.py --one {written} --two 2\n")
    assert found["--one"] == value
    assert found["--two"] == "2"


def test_arrays_strings_comments_and_lines(tmp_path: Path) -> None:
    text = '''#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node 8
export CUDA_DEVICE_MAX_CONNECTIONS=1
OLD="
    --seq-length 2048 \\
    --bf16
"
NEW=(
    --num-layers 12 # a comment
    --hidden-size 768

    --words "a b" c
)
NEW+=(--fp16-lm-cross-entropy)
if [ -n "${WANDB_API_KEY}" ]; then
    NEW+=(--wandb-project x)
fi
torchrun --nproc_per_node=8 pretrain_gpt.py "${NEW[@]}" \\
    $OLD --lr 1e-4 -x 2>&1 | tee log.txt
'''
    one = args(tmp_path, text)
    data, lines = one.settings[0].data, one.settings[0].lines
    assert data == {"--nproc-per-node": "8", "--num-layers": "12", "--hidden-size": "768", "--words": ["a b", "c"],
                    "--fp16-lm-cross-entropy": True, "--seq-length": "2048", "--bf16": True, "--lr": "1e-4",
                    "#SBATCH --nodes": "4", "#SBATCH --gpus-per-node": "8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert {name: lines[name] for name in ("--num-layers", "--hidden-size", "--seq-length", "--bf16", "--lr",
                                           "#SBATCH --nodes")} == {
        "--num-layers": 10, "--hidden-size": 11, "--seq-length": 6, "--bf16": 7, "--lr": 20, "#SBATCH --nodes": 2}
    assert one.programs == ["pretrain_gpt.py"]


@pytest.mark.parametrize("text", [
    "--num-layers 4 --bf16",
    "--num-layers=4\n--bf16\n",
    "--num_layers 4 \\\n --bf16",
    "ARGS=(--num-layers 4 --bf16)",
    "ARGS='--num-layers 4 --bf16'\n",
    "CMD=\"python x.py --num-layers 4 --bf16\"\neval $CMD",
    "CMD=\"python x.py --num-layers 4 --bf16\"\nsrun -l bash -c \"$CMD\"",
    "run() {\n python x.py --num-layers 4 --bf16\n}\nrun",
    "--num-layers 4 --bf16 $MORE",
    "python a.py --help x\npython x.py --num-layers 4 --bf16",
    "--num-layers 2 --num-layers 4 --bf16",
])
def test_however_they_are_written(tmp_path: Path, text: str) -> None:
    one = args(tmp_path, text)
    layers, half = one.get("num_layers"), one.on("bf16")
    assert layers is not None
    assert layers.whole() == 4
    assert half is not None


def test_files_with_names_of_their_own(tmp_path: Path) -> None:
    yaml = args(tmp_path, "language_model:\n  num_layers: 24\n  bias: false\nmodel_parallel: {bf16: true}\n", "a.yaml")
    said = yaml.get("num_layers")
    assert said is not None
    assert (said.name, said.line, said.whole()) == ("language_model.num_layers", 2, 24)
    assert yaml.on("bf16")
    log = args(tmp_path, "0: ---- arguments ----\n" + "".join(
        f"0:   {name} {'.' * 20} {value}\n" for name, value in
        (("num_layers", 24), ("bf16", True), ("fp8", None), ("add_bias_linear", False), ("lr", 0.1))), "log.txt")
    assert log.settings[0].data == {"num_layers": "24", "bf16": True, "add_bias_linear": False, "lr": "0.1"}
    assert log.off("add_bias_linear", "disable_bias_linear")
    assert args(tmp_path, '{"num_layers": 4}', "args").get("num_layers")


@pytest.mark.parametrize(("text", "words"), [
    ("echo hello", "holds no arguments"),
    ("", "holds no arguments"),
    ("A=xxxxxxxxxx\n" + "A=$A$A$A$A\n" * 12 + "x --num-layers $A", "grow too long"),
])
def test_what_is_no_script(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        args(tmp_path, text)


@given(st.lists(st.sampled_from([
    *"ab1 \n\t\\'\"`$(){}[]=+-*/;&|<>#:@!~.,\ue000é", "--", "if ", "then\n", "fi\n", "else\n", "case ", " in ",
    "esac\n", ";;", "$((", "${", "[[ ", "]]", "<<E\n", "A=(", "\"${A[@]}\"", "elif ", "for ", "do\n", "done\n"]),
    max_size=60).map("".join))
def test_any_text_ends_well(text: str) -> None:
    with TemporaryDirectory() as folder:
        for one in (text, f"{text}\n--num-layers 4"):
            with contextlib.suppress(UserError):
                args(Path(folder), one)
