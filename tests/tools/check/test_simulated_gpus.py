"""Simulated GPUs: torch's own idioms run on CPUs, in every thread and process of a script."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from processes import run
from stepladder.tools.check import simulated_gpu
from stepladder.tools.check.startup_variables import simulated_gpu_variables

# The slow ones are run by hand.
pytestmark = pytest.mark.corpus

SCRIPTS = Path(__file__).parent / "scripts"


def names_of_examples(script: str) -> list[str]:
    """Return the functions of a script that are examples: those before its `main`."""
    tree = ast.parse((SCRIPTS / script).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return names[: names.index("main")]


def run_examples(script: str, folder: Path, *args: str) -> dict[str, Any]:
    """Run the examples of a script on two simulated GPUs, and return the traceback of each."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPTS / script), *args],
        env=os.environ | simulated_gpu_variables(2) | {"EXAMPLES": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    failures = dict(json.loads(done.stdout.splitlines()[-1]))
    assert done.returncode == any(failures.values()), done.stderr
    return failures


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_examples("gpu_idioms.py", tmp_path_factory.mktemp("examples"))


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of_examples("gpu_idioms.py"))
def test_an_idiom_of_one_gpu(name: str, on_one_gpu: dict[str, Any]) -> None:
    assert on_one_gpu[name] == ""


@pytest.fixture(scope="module")
def on_several_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_examples("nccl_idioms.py", tmp_path_factory.mktemp("examples"))


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of_examples("nccl_idioms.py")[1:])
def test_an_idiom_of_several_gpus(name: str, on_several_gpus: dict[str, Any]) -> None:
    assert on_several_gpus[name] == ""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("script", ["gpu_idioms.py", "nccl_idioms.py"])
def test_the_probe_of_a_check_changes_no_idiom(script: str, tmp_path: Path) -> None:
    """The script fails if one of its examples does."""
    shutil.copy(SCRIPTS / script, tmp_path)
    done = run("check", "--json", "--gpus", script, cwd=tmp_path)
    assert json.loads(done.stdout)["not_checked"] is None


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_functions_may_name_a_gpu(backend: str, tmp_path: Path) -> None:
    failures = run_examples("compiled_idioms.py", tmp_path, backend)
    assert failures == dict.fromkeys(names_of_examples("compiled_idioms.py")[1:], "")


LOOKS_FIRST = """
import importlib.util
assert importlib.util.find_spec("torch") and importlib.util.find_spec("torch")
import torch
print(torch.cuda.device_count(), torch.zeros(2, device="cuda").device)
"""


@pytest.mark.slow
def test_a_library_may_look_for_torch_before_it_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOKS_FIRST],
        env=os.environ | simulated_gpu_variables(3),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "3 cpu\n", done.stderr


EACH_NAME_OF_CUDA = """
import torch
known = {name: getattr(torch.cuda, name) for name in torch.cuda.__all__ if hasattr(torch.cuda, name)}
places = {name: f"{value.__module__} {getattr(value, '__code__', '')}"
          for name, value in known.items() if callable(value)}
kept = [name for name, place in places.items() if "stepladder" not in place]
print(*sorted(name for name in kept if not name.endswith(("Storage", "Tensor"))))
"""


@pytest.mark.slow
def test_each_function_of_torch_cuda_is_simulated_or_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EACH_NAME_OF_CUDA],
        env=os.environ | simulated_gpu_variables(2),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["CudaError", "DeferredCudaCallError", "cudaStatus"]


def changes_of_others(tree: ast.Module) -> list[str]:
    """Return where a module sets attributes of objects other than `self` and `ctx`."""
    changes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            changes.append(ast.unparse(node))
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            attributes = [target for target in targets if isinstance(target, ast.Attribute)]
            changes += [
                ast.unparse(node)
                for target in attributes
                if ast.unparse(target).split(".")[0] not in ("self", "ctx")
            ]
    return changes


def test_one_file_changes_torch() -> None:
    folder = Path(simulated_gpu.__file__).parent
    changing = {
        path.name for path in folder.glob("*.py") if changes_of_others(ast.parse(path.read_text()))
    }
    assert changing == {"patches.py"}
