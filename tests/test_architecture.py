"""The architecture: every import goes to a lower layer, start-up imports no torch, few modules read
the variables of a rank, and no file or function grows big.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import slurm_lab
import stepladder
import stepladder_exchange

ROOT = Path(stepladder.__file__).parent
SLURM_LAB = Path(slurm_lab.__file__).parent
EXCHANGE = Path(stepladder_exchange.__file__).parent

# A package imports itself and packages of lower layers, and none of its own layer.
LAYERS = {
    0: ["core"],
    1: ["rank"],
    2: ["exchange", "storage", "data", "slurm"],
    3: ["train", "launcher"],
    4: ["recipes"],
    5: ["tools"],
    6: ["cli"],
}
MAX_PACKAGES = 11

# Imports that these layers forbid, each with its reason.
EXCEPTIONS = {
    (
        "launcher.entry",
        "train.job_runner",
    ): "late, in the process of a rank, where the training begins"
}

WITHOUT_TORCH = [
    "core",
    "rank",
    "slurm",
    "launcher",
    "train.job",
    "train.job_file",
    "train.job_source",
    "tools.learn",
    "tools.doctor",
    "cli",
]
ON_TORCHELASTIC = ["launcher.nodes"]  # its engine is torch, imported late

READ_RANK_VARIABLES = [
    "core.world",
    "launcher",
    "slurm",
    "rank",
    "tools.doctor",
    "tools.check",
]  # check starts ranks
ALSO_READ = {
    (
        "train.script_world",
        "LOCAL_RANK",
    ): "a group that the caller's own script made has no local rank of its own",
    ("train.script_world", "LOCAL_WORLD_SIZE"): "the same",
    ("storage.run_dir", "SLURM_JOB_ID"): "the lock names the job that holds it",
    ("tools.explain.running_job", "SLURM_JOB_ID"): "the processes of a job that it did not start",
}
RANK_VARIABLE = re.compile(r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|SLURM_\w+|(PMI|OMPI|MV2)_\w+")


MAX_FILE_LINES = 600
MAX_LOADER_MODULES = 50


@dataclass(frozen=True)
class Import:
    """One import, also one that only a type checker follows.

    Args:
        late: True inside a function: it happens at a call.
    """

    source: str
    target: str
    line: int
    late: bool

    def __str__(self) -> str:
        return f"{self.source} (line {self.line}) imports {self.target}"

    @property
    def allowed(self) -> bool:
        packages = package_of(self.source), package_of(self.target)
        return packages[0] == packages[1] or layer_of(packages[0]) > layer_of(packages[1])


@cache
def modules() -> dict[str, ast.Module]:
    """Parsed modules by name without `stepladder.`; without the package itself and `__main__`."""
    paths = [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    ]
    return {
        name: ast.parse(path.read_text(), str(path))
        for name, path in zip(names, paths, strict=True)
    }


@cache
def exchange_modules() -> dict[str, ast.Module]:
    """Parsed modules of stepladder_exchange by full name."""
    return {
        f"stepladder_exchange.{path.stem}".removesuffix(".__init__"): ast.parse(
            path.read_text(), str(path)
        )
        for path in sorted(EXCHANGE.glob("*.py"))
    }


@cache
def find_imports() -> list[Import]:
    return [
        entry for name, tree in modules().items() for entry in imports_of(name, tree, late=False)
    ]


def imports_of(source: str, node: ast.AST, late: bool) -> Iterator[Import]:
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
        if module == "stepladder" and name in stepladder._MODULE_OF_NAME:
            yield stepladder._MODULE_OF_NAME[name]
        elif module.split(".")[0] == "stepladder":
            module = module.removeprefix("stepladder").removeprefix(".")
            full = f"{module}.{name}".strip(".")
            yield full if full in modules() else module


def list_imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield the full name of everything that a module imports, at its top or in a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(module: str) -> str:
    return module.split(".")[0]


def layer_of(package: str) -> int:
    return next(layer for layer, packages in LAYERS.items() if package in packages)


def describe_layers() -> str:
    return "\n".join(
        f"  layer {layer}: {', '.join(packages)}"
        for layer, packages in sorted(LAYERS.items(), reverse=True)
    )


def test_the_top_holds_the_packages_and_nothing_else() -> None:
    packages = {package for packages in LAYERS.values() for package in packages}
    entries = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert entries == packages | {
        "__init__.py",
        "__main__.py",
        "py.typed",
        "pytest_plugin.py",
        "testing.py",
    }, f"the layers:\n{describe_layers()}"
    assert len(packages) <= MAX_PACKAGES


def test_imports_go_down() -> None:
    upward = {(a.source, a.target): a for a in find_imports() if not a.allowed}
    assert not upward.keys() - EXCEPTIONS.keys(), "\n  ".join(
        [
            "",
            *(str(a) for key, a in upward.items() if key not in EXCEPTIONS),
            "with these layers:",
            describe_layers(),
        ]
    )
    assert not EXCEPTIONS.keys() - upward.keys(), "no longer there: take it off the list"
    assert all(upward[key].late for key in EXCEPTIONS)


@pytest.mark.parametrize(
    ("below", "above"), [("train", "launcher"), ("storage", "train"), ("core", "rank")]
)
def test_imports_that_were_hard_to_remove_stay_away(below: str, above: str) -> None:
    assert not [
        str(a)
        for a in find_imports()
        if (package_of(a.source), package_of(a.target)) == (below, above)
    ]


def test_stepladder_imports_public_names_of_slurm_lab() -> None:
    public = {f"slurm_lab.{name}" for name in slurm_lab.__all__}
    used = {
        module: {name for name in list_imported_names(tree) if name.startswith("slurm_lab")}
        for module, tree in modules().items()
    }
    assert used["cli.lab"] and used["slurm.own_lab"]
    beyond = {module: names - public for module, names in used.items() if names - public}
    assert beyond == {}


def test_slurm_lab_imports_nothing_but_psutil_and_pytest() -> None:
    """So that other projects can adopt it without stepladder and without torch."""
    allowed = {"slurm_lab", "psutil", *sys.stdlib_module_names}
    files = sorted(SLURM_LAB.glob("*.py"))
    assert len(files) > 10
    for file in files:
        names = list_imported_names(ast.parse(file.read_text(encoding="utf-8"), str(file)))
        roots = {name.split(".")[0] for name in names}
        plugin = {"pytest"} if file.name == "pytest_plugin.py" else set()
        assert roots <= allowed | plugin, f"{file.name} imports {roots - allowed - plugin}"


def test_stepladder_imports_public_names_of_stepladder_exchange() -> None:
    public = set(exchange_modules()) | {
        f"{name}.{definition}"
        for name, tree in exchange_modules().items()
        for definition in names_defined_in(tree)
        if not definition.startswith("_")
    }
    used = {
        module: {
            name
            for name in list_imported_names(tree)
            if name.split(".")[0] == "stepladder_exchange"
        }
        for module, tree in modules().items()
    }
    assert used["train.comm"] and used["launcher.script"]
    beyond = {module: names - public for module, names in used.items() if names - public}
    assert beyond == {}


def names_defined_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module gives at its top; what it imports is another module's."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name))


def test_stepladder_exchange_imports_nothing_but_torch() -> None:
    """So that other projects can adopt it without stepladder; numpy is no requirement of torch."""
    allowed = {"stepladder_exchange", "torch", *sys.stdlib_module_names}
    assert len(exchange_modules()) > 20
    for module, tree in exchange_modules().items():
        roots = {name.split(".")[0] for name in list_imported_names(tree)}
        assert roots <= allowed, f"{module} imports {roots - allowed}"


def test_no_module_of_stepladder_exchange_imports_itself_in_a_circle() -> None:
    """Late imports, and those for a type checker, included."""
    graph = {
        module: {name.rpartition(".")[0] for name in list_imported_names(tree)}
        for module, tree in exchange_modules().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports in a circle: " + " <- ".join(error.args[1]))


def test_no_module_imports_itself_in_a_circle() -> None:
    """Late imports, and those for a type checker, included."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for entry in find_imports():
        if entry.target in graph and (entry.source, entry.target) not in EXCEPTIONS:
            graph[entry.source].add(entry.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports in a circle: " + " <- ".join(error.args[1]))


def test_known_imports_are_in_the_list() -> None:
    """So that the tests above cannot pass on an empty list."""
    known_imports = {(entry.source, entry.target, entry.late) for entry in find_imports()}
    assert ("train.session", "storage.run_dir", False) in known_imports
    assert ("launcher.entry", "train.job_runner", True) in known_imports
    assert ("recipes.mlp", "train.job", False) in known_imports, "a public name counts as its home"


def test_nothing_that_starts_up_imports_torch() -> None:
    """For real, in a fresh interpreter, module by module: what each import drags in counts too."""
    below = [
        m for m in modules() if any(m == name or m.startswith(f"{name}.") for name in WITHOUT_TORCH)
    ]
    imported = [m for m in below if not any(m.startswith(name) for name in ON_TORCHELASTIC)]
    code = (
        "import importlib, json, sys\n"
        f"for name in {imported!r}:\n"
        "    importlib.import_module('stepladder.' + name)\n"
        "    if 'torch' in sys.modules: break\n"
        "else: name = None\n"
        "print(json.dumps(name))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(imported) > len(WITHOUT_TORCH)
    assert json.loads(ran.stdout) is None, (
        f"importing stepladder.{json.loads(ran.stdout)} imports torch"
    )


def test_the_loader_brings_little_with_it() -> None:
    """A script that takes it alone needs no exchange between ranks and no run directory."""
    code = "import sys; from stepladder import Loader; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name for name in ran.stdout.split() if name.startswith("stepladder.")]
    assert "stepladder.train.loader" in loaded
    assert len(loaded) <= MAX_LOADER_MODULES
    assert "stepladder_exchange.process_group" not in ran.stdout.split()
    assert "stepladder_exchange.shared_memory" not in ran.stdout.split()


def rank_variables_in(tree: ast.Module) -> set[str]:
    """Names of rank variables that stand in the code as strings of their own."""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {
        value for value in constants if isinstance(value, str) and RANK_VARIABLE.fullmatch(value)
    }


def test_few_modules_read_the_variables_of_a_rank() -> None:
    entries = {
        (name, variable)
        for name, tree in modules().items()
        if not any(
            name == package or name.startswith(f"{package}.") for package in READ_RANK_VARIABLES
        )
        for variable in rank_variables_in(tree)
    }
    assert entries <= ALSO_READ.keys(), f"ask World instead: {sorted(entries - ALSO_READ.keys())}"
    assert entries >= ALSO_READ.keys(), (
        f"no longer read, take them off the list: {sorted(ALSO_READ.keys() - entries)}"
    )


def test_rank_variables_are_recognised() -> None:
    assert {"RANK", "SLURM_PROCID"} <= rank_variables_in(modules()["core.world"])


def private_names_of_torch(tree: ast.Module) -> Iterator[str]:
    """Yield what a module imports or uses of torch that begins with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            root, *parts = name.split(".")
            if root in ("torch", "dist", "c10d") and any(is_private(part) for part in parts):
                yield name


def is_private(part: str) -> bool:
    """torch documents its functions for lists of tensors, although their names are private."""
    return part.startswith("_") and not part.startswith(("__", "_foreach_", "_local_scalar_dense"))


def test_private_names_of_torch_are_used_in_one_file() -> None:
    """And in the tools, whose patches (the probe, simulated CUDA) no training needs."""
    allowed = ("rank.torch_fixes", "stepladder_exchange.torch_fixes", "tools.")
    files = modules() | exchange_modules()
    used = {name: sorted(private_names_of_torch(tree)) for name, tree in files.items()}
    assert used["rank.torch_fixes"]
    assert not {name: uses for name, uses in used.items() if uses and not name.startswith(allowed)}


def test_no_file_is_too_long_to_be_read_in_one_go() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in ROOT.rglob("*.py")
    } | {path.name: len(path.read_text().splitlines()) for path in EXCHANGE.glob("*.py")}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_a_class_name_means_one_thing() -> None:
    """Except `Config`, which every job file has."""
    names = Counter(
        node.name
        for tree in (modules() | exchange_modules()).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1 and name != "Config"] == []


def test_a_module_beside_the_tests_is_called_like_no_benchmark() -> None:
    """Some tests import from both folders: the first one on the path would stand for the other."""
    folders = [Path(__file__).parent, Path(__file__).parents[1] / "benchmarks"]
    tests, benchmarks = ({file.name for file in folder.glob("*.py")} for folder in folders)
    assert tests & benchmarks == set()


def test_private_names_are_imported_by_no_other_module() -> None:
    imported = [
        f"{name} imports {alias.name} of {node.module}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stepladder")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert imported == []
