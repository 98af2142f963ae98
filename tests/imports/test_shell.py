"""Arguments out of launch scripts, without a shell."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import UserError
from sim.imports.draft import Draft
from sim.imports.megatron.arguments import Args, read_arguments
from sim.imports.megatron.launches import read_script


def args(tmp_path: Path, text: str, name: str = "run.sh") -> Args:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_arguments([str(path)], Draft())


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
    ("A=1; if (( 2 > 1 )); then A=2; fi", "$A", "2"),
    ("N=2; A=1; if ((N > 1 && $N < 4)); then A=2; fi", "$A", "2"),
    ("N=2; A=1; if [[ \"$N\" == \"2\" && $N -ge 2 ]]; then A=2; fi", "$A", "2"),
    ("N=2; A=1; if [ $N -gt 1 -a $N -gt 5 ]; then A=2; fi", "$A", "1"),
    ("N=2; A=1; if [ $N -gt 5 -o $N = 2 ]; then A=2; fi", "$A", "2"),
    ("N=2; A=1; if [[ ! ( $N -gt 5 || $N == 3 ) ]]; then A=2; fi", "$A", "2"),
    ("N=2; A=1; if ! [ $N -gt 5 ]; then A=2; fi", "$A", "2"),
    ("N=ab; A=1; if [[ $N == a* ]]; then A=2; fi", "$A", "2"),
    ("A=1; test 2 -gt 1 && A=2", "$A", "2"),
    ("A=1; (( 2 > 3 )) || A=2", "$A", "2"),
    ("A=1; if [ -f x ] && [ 1 = 2 ]; then A=2; else A=3; fi", "$A", "3"),
    ("if [[ -z ${A+x} ]]; then A=2; fi", "$A", "2"),
    ("((A = 2 * 3)); ((A++)); ((A -= 2))", "$A", "5"),
    ("N=(a b c); A=${#N[@]}", "$A", "3"),
    ("for A in 1 2 3; do :; done", "$A", "3"),
    ("for i in {1..3}; do A+=$i; done", "$A", "123"),
    ("for ((i = 0; i < 3; i++)); do A+=$i; done", "$A", "012"),
    ("A=1; while [ $A -lt 5 ]; do A=$((A * 2)); done", "$A", "8"),
    ("A=1; while true; do A=2; break; A=3; done", "$A", "2"),
    ("for i in 1 2; do [ $i = 1 ] && continue; A=$i; done", "$A", "2"),
    ("f() { A=$1; local B=$2; }; B=1; f 2 3", "$A$B", "21"),
    ("function f {\n  A=${2:-7}$#\n}\nf 2", "$A", "71"),
    ("f() { shift; A=$1; return; A=9; }; f 2 3", "$A", "3"),
    ("f() { A=2; }", "$A", "$A"),
    ("A=$(scontrol show --hosts x | head -n 1)", "$A", "$(scontrol...)"),
    ("A=`date +%s now`", "$A", "`date...`"),
    ("while getopts 's:' o; do case $o in s) A=1 ;; esac; done; A=2", "$A", "2"),
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
    "run() {\n python x.py --num-layers $1 ${@:2}\n}\nrun 4\npython x.py --num-layers 4 --bf16",
    "run() {\n python x.py --num-layers \"$@\"\n}\nrun 4 --bf16",
    "N=4\nsrun bash -c 'python x.py --num-layers $N --bf16'",
    "N=4\nsrun bash -c \"python x.py --num-layers '$N' --bf16\"",
    "echo python x.py --num-layers 2 --bf16 --more\npython x.py --num-layers 4 --bf16",
    "python serve.py --num-layers 2 --bf16 --more\npython pretrain_gpt.py --num-layers 4 --bf16",
    "for N in 4 8; do python x.py --num-layers $N --bf16; done",
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
    ("go() {\n python x.py --num-layers 4\n}\n", "calls none of its functions with arguments \\(go\\)"),
    ("go() { go; }\ngo\n", "calls itself without end"),
    ("(" * 100 + "a --b", "nested too deep"),
    ("while true; do while true; do while true; do :; done; done; done", "too many commands"),
    ("A=xxxxxxxxxx\n" + "A=$A$A$A$A\n" * 12 + "x --num-layers $A", "grow too long"),
])
def test_what_is_no_script(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        args(tmp_path, text)


RUN = "\npython train.py --one 1 $B\n"


@pytest.mark.parametrize(("text", "told"), [
    ("if [ -f x ]; then B='--two'; fi", {"if [ -f x ]": "not known here: taken as false"}),
    ("[ -d x ] && B=--two", {"[ -d x ]": "not known here: taken as false"}),
    ("if grep -q a b; then B=--two; fi", {"if grep -q a b": "not known here: taken as false"}),
    ("if [ \"$X\" = 1 ]; then B=--two; fi", {'if [ "$X" = 1 ]': "X has no value here: taken as false"}),
    ("if [ $X != 1 ]; then B=--two; fi", {"if [ $X != 1 ]": "X has no value here: taken as true"}),
    ("if (( X > 1 )); then B=--two; fi", {"if (( X > 1 ))": "X has no value here: taken as false"}),
    ("if [ $(nproc) -gt 1 ]; then B=--two; fi", {"if [ $(nproc) -gt 1 ]": "not known here: taken as false"}),
    ("if [ -f x ]; then :; else B=--two; fi", {"if [ -f x ]": "not known here: taken as false"}),
    ("case $X in a) B=--two ;; esac", {"case $X": "X has no value here: taken as empty"}),
    ("while read -r line; do B=--two; done < x", {"while read -r line": "not known here: taken as false"}),
    ("f() { B=--two; }; if [ -f x ]; then f; fi", {"if [ -f x ]": "not known here: taken as false"}),
    ("if [ -f x ]; then export CUDA_DEVICE_MAX_CONNECTIONS=1; fi", {"if [ -f x ]": "not known here: taken as false"}),
    # nothing hangs on these
    ("if [ ! -d x ]; then mkdir --parents x; fi", {}),
    ("if [ -f x ]; then export UNUSED=1; fi", {}),
    ("if [ -n \"$X\" ]; then B=--two; fi", {}),
    ("if [ \"${X:-0}\" = 1 ]; then B=--two; fi", {}),
    ("if [ 1 = 2 ] && [ -f x ]; then B=--two; fi", {}),
])
def test_what_a_script_leaves_open_is_told(tmp_path: Path, text: str, told: dict[str, str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text + RUN, encoding="utf-8")
    remarks = {re.sub(r"\s+", " ", said.name): why for said, why in read_script(path.read_text(), str(path)).remarks}
    assert remarks == {re.sub(r"\s+", " ", name): why for name, why in told.items()}


def test_several_trainings_and_rounds_are_told(tmp_path: Path) -> None:
    text = ("python train_a.py --num-layers 2 --lr 1\npython train_b.py --num-layers 4 --bf16 --lr 1\n"
            "python train_b.py --num-layers 4 --bf16 --lr 2\n")
    (said, why), = read_script(text, "run.sh").remarks
    assert (said.name, said.line, why) == ("train_b.py", 2, "the command that was taken; skipped: train_a.py of line 1")
    (said, why), = read_script("N=1\nfor N in 1 2 4\ndo\npython x.py --n $N\ndone\n", "run.sh").remarks
    assert (said.name, said.line, why) == ("for N in 1 2 4", 2, "the first of 3 rounds is taken")


@given(st.lists(st.sampled_from([
    *"ab1 \n\t\\'\"`$(){}[]=+-*/;&|<>#:@!~.,\ue000é", "--", "if ", "then\n", "fi\n", "else\n", "case ", " in ",
    "esac\n", ";;", "$((", "${", "[[ ", "]]", "<<E\n", "A=(", "\"${A[@]}\"", "elif ", "for ", "do\n", "done\n",
    "((", "))", "while ", " && ", " || ", "f() {\n", "}\n", "f ", "break\n", "-a ", "-o ", "-f ", "local ", "shift\n",
    "true "]),
    max_size=60).map("".join))
def test_any_text_ends_well(text: str) -> None:
    with TemporaryDirectory() as folder:
        for one in (text, f"{text}\n--num-layers 4"):
            with contextlib.suppress(UserError):
                args(Path(folder), one)
