"""The house rules, held by looking at the code: floors, rooms, names, sizes, and what the wheel carries."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parent.parent
SIM = ROOT / "sim"

#: Room (or module) of `sim` to floor, as in sim/README.md. `sim` itself only re-exports the API.
FLOORS = {
    "work": 0, "catalog": 0, "errors": 0, "garbage": 0, "beside": 0,
    "tensor_trace": 0, "program": 1, "scenario": 1, "software": 1, "hardware": 1, "network": 1,
    "engine": 2, "model": 2,
    "parallel": 3, "memory": 3,
    "report": 4, "measured": 3,
    "api": 5, "": 5,
    "validation": 6, "sizing": 6, "calibration": 6, "imports": 6, "traces": 6,
    "web": 7, "commands": 8, "cli": 9, "__main__": 10,
}
#: Names of training stacks: facts about them live in sim/software, what a user may say in sim/scenario.
FRAMEWORKS = {"pytorch", "megatron", "deepspeed", "composer", "torchtitan", "nanotron", "ideal"}
#: The engine's actors and those who watch them call each other back: the one circle of files there is.
ACTORS = frozenset(f"sim.engine.{name}" for name in ("communicators", "engine", "host", "repeats", "steady", "streams"))
LINES_OF_A_FILE = 430
LINES_OF_A_FUNCTION = 70


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def sources() -> list[Path]:
    return sorted(SIM.rglob("*.py"))


def room(path: Path) -> str:
    first = path.relative_to(SIM).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of every import from `sim`, wherever it stands in the file."""
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            module = node.module or ""
            names = [f"sim.{alias.name}" for alias in node.names] if module == "sim" else [module]
        for name in names:
            if name == "sim" or name.startswith("sim."):
                yield node.lineno, name.removeprefix("sim").lstrip(".").split(".")[0]


def modules() -> dict[str, Path]:
    """Files by the name they are imported by. The face of `sim` is left out: it only re-exports the API."""
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
            for path in sources() if path != SIM / "__init__.py"}


def imported_modules(name: str, code: ast.AST, known: Collection[str]) -> set[str]:
    """What a file imports among those known, wherever in the file and if only for types."""
    reached: set[str] = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            reached |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            reached |= (whole & set(known)) | ({node.module} if whole - set(known) else set())
    return (reached & set(known)) - {name}


def circles(arrows: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Files that import each other in a loop, every loop with all that is tied to it."""
    graph = nx.DiGraph((name, other) for name, others in arrows.items() for other in others)
    return [frozenset(tied) for tied in nx.strongly_connected_components(graph) if len(tied) > 1]


def found(lines: list[str]) -> str:
    return "\n".join(["", *lines])


def test_every_room_has_a_floor() -> None:
    assert {room(p) for p in sources()} <= set(FLOORS)


def test_imports_point_down_and_not_sideways() -> None:
    wrong = []
    for path in sources():
        own = room(path)
        for line, other in imported_rooms(path):
            if other in FLOORS and other != own and own != "" and FLOORS[other] >= FLOORS[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} (floor {FLOORS[own]}) imports sim.{other} "
                             f"(floor {FLOORS[other]})")
    assert not wrong, found(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Inside a room too imports point down, `TYPE_CHECKING` or not: what two files need of each other stands below."""
    known = modules()
    tied = circles({name: imported_modules(name, tree(path), known) for name, path in known.items()})
    assert [sorted(one) for one in tied if one != ACTORS] == []


def test_no_rooms_within_a_room_import_each_other_in_a_circle() -> None:
    """A folder inside a room is one thing to the files beside it: it stands above them or below, never both."""
    known = modules()
    arrows: dict[str, set[str]] = {}
    for name, path in known.items():
        if name not in ACTORS and path.name != "__init__.py":
            arrows.setdefault(place(name), set()).update(
                place(other) for other in imported_modules(name, tree(path), known)
                if known[other].name != "__init__.py" and room(known[other]) == room(path))
    assert [sorted(one) for one in circles({here: others - {here} for here, others in arrows.items()})] == []


def place(name: str) -> str:
    """`sim.room.folder` of a file within a folder of a room, else the file's own name."""
    return ".".join(name.split(".")[:3])


@pytest.mark.parametrize(("files", "tied"), [
    ({"sim.a": "from sim.b import x", "sim.b": "import sim.c", "sim.c": ""}, []),
    ({"sim.a": "from sim.b import x", "sim.b": "def f():\n    from sim import a"}, [{"sim.a", "sim.b"}]),
    ({"sim.a": "import sim.b", "sim.b": "if TYPE_CHECKING:\n    from sim.a import T"}, [{"sim.a", "sim.b"}]),
    ({"sim.p": "from sim.p.a import x", "sim.p.a": "from sim.p import b", "sim.p.b": ""}, []),
    ({"sim.p": "from sim.p.a import x", "sim.p.a": "from sim.p import y"}, [{"sim.p", "sim.p.a"}]),
])
def test_the_search_for_circles_finds_them(files: dict[str, str], tied: list[set[str]]) -> None:
    assert circles({name: imported_modules(name, ast.parse(code), files) for name, code in files.items()}) == tied


def test_only_software_and_scenario_ask_for_a_framework_or_a_year() -> None:
    wrong = []
    for path in sources():
        if room(path) in ("software", "scenario"):
            continue
        for node in ast.walk(tree(path)):
            if asks_for_framework(node):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    assert not wrong, found(wrong)


def asks_for_framework(node: ast.AST) -> bool:
    """A comparison or match with a framework's name, or of anything called framework or year."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        names = {side.attr if isinstance(side, ast.Attribute) else side.id for side in sides
                 if isinstance(side, ast.Attribute | ast.Name)}
        if names & {"framework", "year"}:
            return True
        literals = {inner.value for side in sides for inner in ast.walk(side) if isinstance(inner, ast.Constant)}
        return bool(literals & FRAMEWORKS) and "modules" not in names
    if isinstance(node, ast.MatchValue):
        return isinstance(node.value, ast.Constant) and node.value.value in FRAMEWORKS
    return False


@pytest.mark.parametrize(("code", "asks"), [
    ("if software.framework == name: pass", True),
    ("if kind == 'deepspeed': pass", True),
    ("if year >= limit: pass", True),
    ("if kind in ('pytorch', 'x'): pass", True),
    ("if stack.clip_gradients: pass", False),
    ("if software.modules == 'megatron': pass", False),
])
def test_the_search_for_frameworks_finds_them(code: str, asks: bool) -> None:
    assert any(asks_for_framework(node) for node in ast.walk(ast.parse(code))) is asks


def test_nothing_reads_the_reference_material() -> None:
    """The folder beside the checkout exists on no user's machine: no string of code or data may lead there."""
    wrong = []
    for path in [*sources(), *(ROOT / "tests").rglob("*.py")]:
        if path == Path(__file__):
            continue
        strings = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        documentation = {id(n.value) for n in ast.walk(tree(path)) if isinstance(n, ast.Expr)}
        wrong += [f"{path.relative_to(ROOT)}:{s.lineno}" for s in strings
                  if ("../shared" in str(s.value) or "/work/" in str(s.value)) and id(s) not in documentation]
    data = [p for folder in ("sim", "topologies", "scenarios") for p in (ROOT / folder).rglob("*.yaml")]
    wrong += [str(p.relative_to(ROOT)) for p in data if "../shared" in p.read_text(encoding="utf-8")]
    assert not wrong, found(wrong)


def test_files_and_functions_are_of_a_size_a_person_reads() -> None:
    wrong = []
    for path in sources():
        lines = path.read_text(encoding="utf-8").count("\n") + 1
        if lines > LINES_OF_A_FILE:
            wrong.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LINES_OF_A_FUNCTION:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} is too long")
    assert not wrong, found(wrong)


def public(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes, and the public methods of public classes."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and not inner.name.startswith("_"):
            yield inner
            if isinstance(inner, ast.ClassDef):
                yield from public(inner)


def test_public_functions_and_modules_say_what_they_do() -> None:
    """Short methods whose name says all (eight lines or fewer) may go without."""
    wrong = [str(p.relative_to(ROOT)) for p in sources() if tree(p).body and not ast.get_docstring(tree(p))]
    for path in sources():
        for node in public(tree(path)):
            long = (node.end_lineno or 0) - node.lineno + 1 > 8
            if long and not ast.get_docstring(node):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert not wrong, found(wrong)


def test_the_files_that_notes_name_are_there() -> None:
    """Paths are from `sim/` or from the note's room, as each note says; a name alone stands somewhere in it."""
    wrong = []
    for note in sorted(SIM.rglob("README.md")):
        for number, line in enumerate(note.read_text(encoding="utf-8").splitlines(), 1):
            for name in re.findall(r"`([\w./-]+(?:\.py|\.yaml|/))`", line):
                here = (home / name for home in (SIM, note.parent, ROOT))
                if not any(path.exists() for path in here) and not any(note.parent.rglob(name.rstrip("/"))):
                    wrong.append(f"{note.relative_to(ROOT)}:{number}: {name}")
    assert not wrong, found(wrong)


def test_no_unfinished_business() -> None:
    words = ("TODO", "FIXME", "XXX")
    wrong = [f"{p.relative_to(ROOT)}:{i}" for p in sources()
             for i, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1) if any(w in line for w in words)]
    assert not wrong, found(wrong)


def test_starting_up_imports_nothing_heavy() -> None:
    """`import sim` and its command line load no plotting, terminal, graph or solver library."""
    code = ("import sys; import sim, sim.cli; "
            "print(sorted({m.split('.')[0] for m in sys.modules} & {'matplotlib', 'rich', 'scipy', 'networkx'}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_wheel_carries_code_types_and_data(tmp_path: Path) -> None:
    """Built by hatchling where the environment has it, else by pip, which fetches it."""
    hatchling = ["-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    pip = ["-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."]
    chosen = hatchling if importlib.util.find_spec("hatchling") else pip
    subprocess.run([sys.executable, *chosen], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in ("topologies", "scenarios"):
        expected = {f"sim/_data/{folder}/{p.relative_to(ROOT / folder)}" for p in (ROOT / folder).rglob("*.yaml")}
        assert expected
        assert expected <= names
    carried = {str(p.relative_to(ROOT)) for p in SIM.rglob("*") if p.suffix in (".py", ".yaml", ".csv")}
    assert carried - names == set()
    assert "sim/py.typed" in names
