"""torch, and what a script imports, seen from a process of their own: it may be missing, broken, slow or hang."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError

SECONDS = 120.0
SLOWEST = 5
IMPORT_LINE = re.compile(r"^import time:\s*(?P<own>\d+) \|\s*(?P<all>\d+) \| (?P<indent> *)(?P<name>\S+)$")
BEFORE = " comes before the module of that name"
# The ranks ask torch for no more than this; each part may be missing from a build.
ASK_TORCH = (
    f"BEFORE = {BEFORE!r}"
    + """
import json, os, sys, time
began = time.perf_counter()
try:
    import torch
    torch.__version__
except Exception:
    library = os.path.dirname(os.__file__)
    for name in sys.stdlib_module_names & sys.modules.keys():
        file = getattr(sys.modules[name], "__file__", None) or library
        if not file.startswith(library) and "-packages" not in file:  # setuptools brings a distutils
            sys.exit(file + BEFORE)
    if "torch" in sys.modules:
        sys.exit((sys.modules["torch"].__file__ or list(sys.modules["torch"].__path__)[0]) + BEFORE)
    raise
seconds = time.perf_counter() - began
said = {"version": torch.__version__, "cuda": torch.version.cuda or "", "seconds": seconds}
said["rocm"] = getattr(torch.version, "hip", None) or ""
said["distributed"] = torch.distributed.is_available()
nccl = said["distributed"] and torch.distributed.is_nccl_available()
said["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""
said["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
said["architectures"] = torch.cuda.get_arch_list() if said["devices"] else []
said["cuda_error"] = ""
if said["cuda"] and not said["devices"]:
    try:
        torch.cuda.init()
    except Exception as error:
        said["cuda_error"] = str(error).partition("\\n")[0]
print("stepladder:" + json.dumps(said))
"""
)


@dataclass(frozen=True)
class Imports:
    """seconds: of all imports together.  slowest: (package, seconds in its own modules), the largest first.

    error: the last line of what went wrong, or "".  name: the script's.
    """

    seconds: float = 0.0
    slowest: tuple[tuple[str, float], ...] = ()
    error: str = ""
    name: str = ""


@dataclass(frozen=True)
class Torch:
    """version: "" where torch is not installed, or cannot be imported: then `error` says why.

    cuda, rocm, nccl: versions that it was built with, or "".  devices: GPUs that it sees.
    architectures: what it has kernels for, as sm_90.  cuda_error: why it sees none.
    """

    version: str = ""
    error: str = ""
    cuda: str = ""
    rocm: str = ""
    nccl: str = ""
    distributed: bool = True
    devices: int = 0
    architectures: tuple[str, ...] = ()
    cuda_error: str = ""
    seconds: float = 0.0
    slowest: tuple[tuple[str, float], ...] = ()

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", self.version.partition("+")[0])[:2])


def look_at_torch() -> Torch:
    done = _python(ASK_TORCH, {})
    if isinstance(done, str):
        return Torch(error=done)
    said = next((line for line in done.stdout.splitlines() if line.startswith("stepladder:")), None)
    if said is None:
        return Torch(error=last_error(done.stderr))
    facts: dict[str, Any] = json.loads(said.removeprefix("stepladder:"))
    facts["architectures"] = tuple(facts["architectures"])
    return Torch(**facts, slowest=slowest_of(done.stderr))


def look_at_script(path: Path) -> Imports:
    """Import what the script imports at its top, without running it. Raises InputError for no Python file."""
    try:
        lines = imports_of(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "stepladder doctor train.py") from error
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{path} is no Python file: {error}", "stepladder doctor train.py") from error
    folder = str(path.absolute().parent)
    done = _python("\n".join(lines), {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])})
    if isinstance(done, str):
        return Imports(error=done, name=path.name)
    slowest = slowest_of(done.stderr)
    seconds = sum(value for _, value in top_level(done.stderr))
    return Imports(seconds, slowest, "" if done.returncode == 0 else last_error(done.stderr), path.name)


def imports_of(text: str) -> list[str]:
    """The imports at the top level of a module, as lines of code, relative ones left out."""
    found = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [
        ast.unparse(node) for node in found
        if isinstance(node, ast.Import) or (node.level == 0 and node.module != "__future__")
    ]  # fmt: skip


def _python(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str] | str:
    """The finished process, which wrote import times to stderr; or why there is none."""
    try:
        return subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code],
            env={**os.environ, **env}, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS:g} s"
    except OSError as error:
        return str(error)


def last_error(text: str) -> str:
    """The last line that is not an import time."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("import time:")]
    return lines[-1] if lines else "ended without a word"


def top_level(text: str) -> list[tuple[str, float]]:
    """(module, seconds) of the imports that no other import made, from `-X importtime`."""
    found = (IMPORT_LINE.match(line) for line in text.splitlines())
    return [(m["name"], int(m["all"]) / 1e6) for m in found if m and not m["indent"]]


def slowest_of(text: str) -> tuple[tuple[str, float], ...]:
    """The slowest packages, each with the own time of all its modules."""
    own: dict[str, float] = {}
    for match in (m for line in text.splitlines() if (m := IMPORT_LINE.match(line))):
        package = match["name"].partition(".")[0]
        own[package] = own.get(package, 0.0) + int(match["own"]) / 1e6
    ranked = sorted(own.items(), key=lambda item: -item[1])
    return tuple((name, round(seconds, 3)) for name, seconds in ranked[:SLOWEST])
