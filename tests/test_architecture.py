"""The house: imports go down only, torch stays off the doorstep, one file knows who we are, nothing grows big."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import stepladder

ROOT = Path(stepladder.__file__).parent

# A module stands on the floor of its longest prefix here. An import goes to the same floor or further down.
FLOORS = {
    0: ["errors", "world", "order", "plan", "settings"],
    1: [
        "job", "comm", "ledger", "rundir", "hostcopy", "batchnorm", "stop", "fault", "guard",
        "data", "launch", "observe", "learn", "doctor", "ranking",
    ],
    2: ["snapshot", "sync", "exact", "modes", "exactness", "definition", "evaluate", "audit"],
    3: ["run", "trainer"],
    4: ["train", "recipes", "recommend", "verify", "see"],
    5: ["cli", "__main__"],
}  # fmt: skip

WITHOUT_TORCH = [
    "errors", "world", "order", "plan", "settings", "job", "stop", "fault", "launch", "learn", "doctor", "cli",
]  # fmt: skip
ON_TORCHELASTIC = ["launch.agent", "launch.elastic", "launch.nodes"]  # its engine is torch, imported late

KNOW_WHO_WE_ARE = ["world", "launch", "doctor"]
ALSO_READ = {
    ("comm", "LOCAL_RANK"): "a group that the caller's own script made has no local rank of its own",
    ("comm", "LOCAL_WORLD_SIZE"): "the same",
    ("rundir", "SLURM_JOB_ID"): "the lock names the job that holds it",
}
RANK_VARIABLE = re.compile(r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|SLURM_\w+|(PMI|OMPI|MV2)_\w+")

FILE_LINES, FUNCTION_LINES, MOST_FUNCTION_LINES = 320, 60, 30


@dataclass(frozen=True)
class Import:
    """One arrow. late: inside a function, so at call time only."""

    source: str
    target: str
    line: int
    late: bool

    def __str__(self) -> str:
        return f"{self.source} (line {self.line}) imports {self.target}"


@cache
def modules() -> dict[str, ast.Module]:
    """Parsed modules by name without `stepladder.`; the package itself, which imports lazily, is left out."""
    paths = {path: path.relative_to(ROOT).with_suffix("") for path in ROOT.rglob("*.py") if path.parent != ROOT}
    paths |= {path: Path(path.stem) for path in ROOT.glob("*.py") if path.stem != "__init__"}
    names = {path: ".".join(name.parts).removesuffix(".__init__") for path, name in paths.items()}
    return {name: ast.parse(path.read_text(), str(path)) for path, name in sorted(names.items())}


def arrows() -> list[Import]:
    """All imports of the package's own modules, but for those that only a type checker follows."""
    return [arrow for name, tree in modules().items() for arrow in imports_of(name, tree, late=False)]


def imports_of(source: str, node: ast.AST, late: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for target in targets_of(node):
            yield Import(source, target, node.lineno, late)
    inside = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from imports_of(source, child, inside)


def targets_of(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [(alias.name, "") for alias in node.names]
    else:
        assert node.level == 0, f"a relative import in line {node.lineno}"
        names = [(node.module or "", alias.name) for alias in node.names]
    for module, name in names:
        if module == "stepladder" and name in stepladder._HOMES:
            yield stepladder._HOMES[name]
        elif module.split(".")[0] == "stepladder":
            module = module.removeprefix("stepladder").removeprefix(".")
            full = f"{module}.{name}".strip(".")
            yield full if full in modules() else module


def floor_of(module: str) -> int | None:
    """None for a module that has no place yet."""
    places = {name: floor for floor, names in FLOORS.items() for name in names}
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((places[prefix] for prefix in prefixes if prefix in places), None)


def house() -> str:
    return "\n".join(
        f"  floor {floor}: {', '.join(names)}" for floor, names in sorted(FLOORS.items(), reverse=True)
    )


def test_every_module_has_its_floor() -> None:
    homeless = [name for name in modules() if floor_of(name) is None]
    assert not homeless, f"give {homeless} a floor in FLOORS:\n{house()}"


def test_every_name_in_the_tables_is_a_module() -> None:
    named = {name for names in FLOORS.values() for name in names} | {
        *WITHOUT_TORCH,
        *ON_TORCHELASTIC,
        *KNOW_WHO_WE_ARE,
    }
    assert not named - modules().keys(), "these are gone: take them out of the tables"


def test_imports_go_down_or_stay_on_their_floor() -> None:
    upward = [str(a) for a in arrows() if (floor_of(a.source) or 0) < (floor_of(a.target) or 0)]
    assert not upward, "upward imports:\n  " + "\n  ".join(upward) + "\nin this house:\n" + house()


def test_no_imports_go_in_a_circle() -> None:
    """At import, that is: a late import, inside a function, may go back along its own floor."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for arrow in arrows():
        if not arrow.late:
            graph[arrow.source].add(arrow.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports in a circle: " + " <- ".join(error.args[1]))


def test_the_arrows_of_this_house_are_seen_at_all() -> None:
    """So that the tests above cannot pass on an empty list."""
    seen = {(arrow.source, arrow.target, arrow.late) for arrow in arrows()}
    assert {("trainer", "run", False), ("run", "rundir", False), ("cli.train", "train", True)} <= seen
    assert ("recipes.mlp", "job", False) in seen, "a public name counts as its home"
    assert not any(target == "run" for source, target, _ in seen if source == "observe.startup"), "for types only"


def test_nothing_that_starts_up_imports_torch() -> None:
    """For real, in a fresh interpreter, module by module: what each import drags in counts too."""
    below = [m for m in modules() if any(m == name or m.startswith(f"{name}.") for name in WITHOUT_TORCH)]
    wanted = [m for m in below if m not in ON_TORCHELASTIC]
    code = (
        "import importlib, json, sys\n"
        f"for name in {wanted!r}:\n"
        "    importlib.import_module('stepladder.' + name)\n"
        "    if 'torch' in sys.modules: break\n"
        "else: name = None\n"
        "print(json.dumps(name))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(wanted) > len(WITHOUT_TORCH)
    assert json.loads(ran.stdout) is None, f"importing stepladder.{json.loads(ran.stdout)} imports torch"


def rank_variables_in(tree: ast.Module) -> set[str]:
    """Names of rank variables that stand in the code as strings of their own."""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and RANK_VARIABLE.fullmatch(value)}


def test_only_world_and_launch_know_the_variables_that_say_who_we_are() -> None:
    found = {
        (name, variable)
        for name, tree in modules().items()
        if name.split(".")[0] not in KNOW_WHO_WE_ARE
        for variable in rank_variables_in(tree)
    }
    assert found <= ALSO_READ.keys(), f"ask World instead: {sorted(found - ALSO_READ.keys())}"
    assert found >= ALSO_READ.keys(), f"no longer read, take them off the list: {sorted(ALSO_READ.keys() - found)}"


def test_rank_variables_are_recognised() -> None:
    assert {"RANK", "SLURM_PROCID"} <= rank_variables_in(modules()["world"])


def function_lengths() -> dict[str, int]:
    """Lines of every function, decorators left out."""
    return {
        f"{name}.{node.name} (line {node.lineno})": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def test_no_file_is_too_long_to_be_read_in_one_go() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > FILE_LINES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    assert {name: length for name, length in function_lengths().items() if length > FUNCTION_LINES} == {}


def test_nine_functions_in_ten_are_short() -> None:
    lengths = sorted(function_lengths().values())
    assert lengths[len(lengths) * 9 // 10] <= MOST_FUNCTION_LINES
