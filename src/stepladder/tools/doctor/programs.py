"""What other programs say: nvidia-smi and nvcc of GPUs, a new Python of torch and of what a script
imports.

Each runs as a process of its own: it may be missing, broken, slow or hang.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.numbers import parse_whole_number
from stepladder.core.python_file import parse_source

SECONDS_OF_TOOL, SECONDS_OF_IMPORT = 20.0, 120.0
QUERY = ("index", "name", "driver_version", "mig.mode.current", "compute_cap")
OLD_QUERY = QUERY[:-1]  # for drivers before 510
NVIDIA, DISPLAY = "0x10de", "0x03"
SLOWEST = 5
# Microseconds of its own, and its name.
IMPORT_LINE = re.compile(r"^import time:\s*(\d+) \|\s*\d+ \| +(\S+)$", re.MULTILINE)
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
class Gpu:
    """One line of `nvidia-smi --query-gpu`. mig: whether it is divided.  capability: as in 9.0, ""
    if not said.
    """

    index: int
    name: str
    driver: str
    mig: bool = False
    capability: str = ""


@dataclass(frozen=True)
class Gpus:
    """on_bus: NVIDIA devices on the PCI bus.  smi_error: what nvidia-smi said instead; "missing"
    without one.

    nvcc: version of the CUDA compiler, or "".
    """

    found: tuple[Gpu, ...] = ()
    on_bus: int = 0
    smi_error: str = ""
    nvcc: str = ""

    @property
    def driver(self) -> str:
        return self.found[0].driver if self.found else ""


@dataclass(frozen=True)
class Imports:
    """seconds: of all imports together.  slowest: (package, seconds in its own modules), the
    largest first.

    error: the last line of what went wrong, or "".  name: the script's, or "" where nobody has
    asked for one."""

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


def ask(command: list[str], seconds: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command's end; where it has none, or no beginning, stderr says why. variables: of its
    environment.
    """
    env = os.environ | variables
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {seconds:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def find_gpus() -> Gpus:
    """NVIDIA's GPUs as the system shows them, without torch."""
    found, error = _ask_smi()
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    version = parse_nvcc(ask([nvcc, "--version"], SECONDS_OF_TOOL).stdout) if nvcc else ""
    return Gpus(found, _on_bus(), error, version)


def _ask_smi() -> tuple[tuple[Gpu, ...], str]:
    if shutil.which("nvidia-smi") is None:
        return (), "missing"
    for query in (QUERY, OLD_QUERY):
        command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
        done = ask(command, SECONDS_OF_TOOL)
        if done.returncode == 0:
            return parse_smi(done.stdout, query), ""
        said = (done.stdout + done.stderr).strip()
        if "compute_cap" not in said:
            break
    return (), said.partition("\n")[0] or "no answer"


def parse_smi(text: str, query: tuple[str, ...] = QUERY) -> tuple[Gpu, ...]:
    """`--format=csv,noheader,nounits`. A value that a device does not have is [N/A] or [Not
    Supported].
    """
    gpus = []
    for line in csv.DictReader(text.splitlines(), query, restval="", skipinitialspace=True):
        capability = line.get("compute_cap", "")
        if parse_whole_number(line["index"]) is not None:
            gpu = Gpu(
                int(line["index"]),
                line["name"],
                line["driver_version"],
                line["mig.mode.current"] == "Enabled",
                capability if re.fullmatch(r"\d+\.\d+", capability) else "",
            )
            gpus.append(gpu)
    return tuple(gpus)


def _on_bus() -> int:
    """Display devices (class 0x03....) of NVIDIA, which are there even without a driver."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = (
                (device / name).read_text(encoding="utf-8").strip() for name in ("vendor", "class")
            )
            count += vendor == NVIDIA and kind.startswith(DISPLAY)
    return count


def parse_nvcc(text: str) -> str:
    """`Cuda compilation tools, release 12.4, V12.4.131` as 12.4."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else ""


def look_at_torch() -> Torch:
    done = _timing_imports(ASK_TORCH)
    said = re.search(r"^stepladder:(.*)", done.stdout, re.MULTILINE)
    if said is None:
        return Torch(error=last_error(done.stderr))
    facts: dict[str, Any] = json.loads(said[1])
    facts["architectures"] = tuple(facts["architectures"])
    return Torch(**facts, slowest=slowest(seconds_by_package(done.stderr)))


def look_at_script(path: Path) -> Imports:
    """Import what the script imports at its top, without running it. Raises InputError for no
    Python file.
    """
    lines = imports_of(parse_source(path))
    places = [str(path.absolute().parent), os.environ.get("PYTHONPATH", "")]
    done = _timing_imports("\n".join(lines), PYTHONPATH=os.pathsep.join(places))
    seconds = seconds_by_package(done.stderr)
    wrong = last_error(done.stderr) if done.returncode else ""
    return Imports(sum(seconds.values()), slowest(seconds), wrong, path.name)


def imports_of(tree: ast.Module) -> list[str]:
    """The imports at the top level of a module, as lines of code, relative ones left out."""
    found = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [
        ast.unparse(node)
        for node in found
        if isinstance(node, ast.Import) or (node.level == 0 and node.module != "__future__")
    ]


def _timing_imports(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it in a new Python, which writes import times to stderr."""
    return ask([sys.executable, "-X", "importtime", "-c", code], SECONDS_OF_IMPORT, **variables)


def last_error(text: str) -> str:
    lines = [
        line for line in text.splitlines() if line.strip() and not line.startswith("import time:")
    ]
    return lines[-1] if lines else "ended without output"


def seconds_by_package(text: str) -> dict[str, float]:
    """The own time of all modules of each package, from `-X importtime`."""
    own: dict[str, float] = {}
    for microseconds, name in IMPORT_LINE.findall(text):
        package = name.partition(".")[0]
        own[package] = own.get(package, 0.0) + int(microseconds) / 1e6
    return own


def slowest(seconds: dict[str, float]) -> tuple[tuple[str, float], ...]:
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return tuple((name, round(value, 3)) for name, value in ranked[:SLOWEST])
