"""Facts from other programs: nvidia-smi and nvcc about GPUs, a new Python about torch and imports.

Each runs as a process of its own: it may be missing, broken or slow, or it may hang.
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

TOOL_TIMEOUT_S = 20.0
IMPORT_TIMEOUT_S = 120.0
SMI_QUERY = ("index", "name", "driver_version", "mig.mode.current", "compute_cap")
SMI_QUERY_BEFORE_510 = SMI_QUERY[:-1]  # for drivers before version 510
PCI_VENDOR_NVIDIA = "0x10de"
PCI_CLASS_DISPLAY = "0x03"
MAX_SLOW_PACKAGES = 5
# The microseconds of a module without those that it imports, and its name.
IMPORT_TIME_LINE = re.compile(r"^import time:\s*(\d+) \|\s*\d+ \| +(\S+)$", re.MULTILINE)
SHADOWS_MODULE = " comes before the module of that name"
# The ranks need no more of torch than this; each part may be missing from a build.
TORCH_PROGRAM = (
    f"SHADOWS_MODULE = {SHADOWS_MODULE!r}"
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
        if not file.startswith(library) and "-packages" not in file:  # distutils of setuptools
            sys.exit(file + SHADOWS_MODULE)
    if "torch" in sys.modules:
        torch_path = sys.modules["torch"].__file__ or list(sys.modules["torch"].__path__)[0]
        sys.exit(torch_path + SHADOWS_MODULE)
    raise
seconds = time.perf_counter() - began
try:  # a busy processor is no slow file system
    with open("/proc/self/schedstat") as times:
        seconds -= int(times.read().split()[1]) / 1e9
except OSError:
    pass
facts = {"version": torch.__version__, "cuda": torch.version.cuda or "", "seconds": seconds}
facts["rocm"] = getattr(torch.version, "hip", None) or ""
facts["distributed"] = torch.distributed.is_available()
nccl = facts["distributed"] and torch.distributed.is_nccl_available()
facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""
facts["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
facts["architectures"] = torch.cuda.get_arch_list() if facts["devices"] else []
facts["cuda_error"] = ""
if facts["cuda"] and not facts["devices"]:
    try:
        torch.cuda.init()
    except Exception as error:
        facts["cuda_error"] = str(error).partition("\\n")[0]
print("stepladder:" + json.dumps(facts))
"""
)


@dataclass(frozen=True)
class Gpu:
    """One GPU in the output of nvidia-smi.

    Args:
        mig: Whether it is divided into several.
        capability: The compute capability, as 9.0; empty where it is not known.
    """

    index: int
    name: str
    driver: str
    mig: bool = False
    capability: str = ""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a machine.

    Args:
        found: The GPUs that nvidia-smi lists.
        on_bus: The number of NVIDIA devices on the PCI bus.
        smi_error: The error of nvidia-smi; "missing" where it is not installed.
        nvcc: The version of the CUDA compiler; empty without one.
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
    """The imports of a script.

    Args:
        seconds: The time of all imports together.
        slowest: The packages that take longest, with the seconds of their own modules.
        error: The last line of an import that failed; empty without one.
        name: The name of the script; empty where none was asked for.
    """

    seconds: float = 0.0
    slowest: tuple[tuple[str, float], ...] = ()
    error: str = ""
    name: str = ""


@dataclass(frozen=True)
class Torch:
    """The installed torch.

    Args:
        version: Its version; empty where it is not installed or cannot be imported.
        error: Why it cannot be imported.
        cuda: The version of CUDA that it was built with, empty without; `rocm` and `nccl` likewise.
        devices: The number of GPUs that it sees.
        architectures: The GPUs that it has kernels for, as sm_90.
        cuda_error: Why it sees no GPU.
        seconds: The time of its import.
        slowest: The packages that take longest, with the seconds of their own modules.
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


def _run_tool(
    command: list[str], timeout_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with further variables. Its stderr says why it could not start or end."""
    env = os.environ | variables
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {timeout_s:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def find_gpus() -> Gpus:
    """Find NVIDIA's GPUs as the system shows them, without torch."""
    gpus, error = _query_nvidia_smi()
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    version = parse_nvcc(_run_tool([nvcc, "--version"], TOOL_TIMEOUT_S).stdout) if nvcc else ""
    return Gpus(gpus, _count_nvidia_devices(), error, version)


def _query_nvidia_smi() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that nvidia-smi lists, and its error."""
    if shutil.which("nvidia-smi") is None:
        return (), "missing"
    output = ""
    for query in (SMI_QUERY, SMI_QUERY_BEFORE_510):
        command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
        completed = _run_tool(command, TOOL_TIMEOUT_S)
        if completed.returncode == 0:
            return parse_smi(completed.stdout, query), ""
        output = (completed.stdout + completed.stderr).strip()
        if "compute_cap" not in output:
            break
    return (), output.partition("\n")[0] or "no answer"


def parse_smi(text: str, query: tuple[str, ...] = SMI_QUERY) -> tuple[Gpu, ...]:
    """Parse the output of nvidia-smi in the format csv,noheader,nounits.

    A value that a device does not have is [N/A] or [Not Supported].
    """
    gpus = []
    for row in csv.DictReader(text.splitlines(), query, restval="", skipinitialspace=True):
        index = parse_whole_number(row["index"])
        if index is not None:
            capability = row.get("compute_cap", "")
            is_known = re.fullmatch(r"\d+\.\d+", capability) is not None
            gpu = Gpu(
                index,
                row["name"],
                row["driver_version"],
                mig=row["mig.mode.current"] == "Enabled",
                capability=capability if is_known else "",
            )
            gpus.append(gpu)
    return tuple(gpus)


def _count_nvidia_devices() -> int:
    """Count the display devices of NVIDIA on the PCI bus, which lists them without a driver too."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor = (device / "vendor").read_text(encoding="utf-8").strip()
            kind = (device / "class").read_text(encoding="utf-8").strip()
            count += vendor == PCI_VENDOR_NVIDIA and kind.startswith(PCI_CLASS_DISPLAY)
    return count


def parse_nvcc(text: str) -> str:
    """Return 12.4 of `Cuda compilation tools, release 12.4, V12.4.131`."""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else ""


def inspect_torch() -> Torch:
    completed = _run_with_import_times(TORCH_PROGRAM)
    match = re.search(r"^stepladder:(.*)", completed.stdout, re.MULTILINE)
    if match is None:
        return Torch(error=find_last_error(completed.stderr))
    facts: dict[str, Any] = json.loads(match[1])
    facts["architectures"] = tuple(facts["architectures"])
    return Torch(**facts, slowest=find_slowest_packages(sum_import_times(completed.stderr)))


def inspect_script_imports(path: Path | None) -> Imports:
    """Import what a script imports at its top, without running the script.

    Raises InputError where the file is no Python.
    """
    if path is None:
        return Imports()
    lines = list_imports(parse_source(path))
    python_path = [str(path.absolute().parent), os.environ.get("PYTHONPATH", "")]
    completed = _run_with_import_times("\n".join(lines), PYTHONPATH=os.pathsep.join(python_path))
    seconds = sum_import_times(completed.stderr)
    error = find_last_error(completed.stderr) if completed.returncode else ""
    return Imports(sum(seconds.values()), find_slowest_packages(seconds), error, path.name)


def list_imports(tree: ast.Module) -> list[str]:
    """Return the imports at the top level of a module as lines of code, without relative ones."""
    lines = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            is_importable = node.level == 0 and node.module != "__future__"
        else:
            is_importable = isinstance(node, ast.Import)
        if is_importable:
            lines.append(ast.unparse(node))
    return lines


def _run_with_import_times(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python that writes the times of imports to stderr."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    return _run_tool(command, IMPORT_TIMEOUT_S, **variables)


def find_last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("import time:")]
    return lines[-1] if lines else "ended without output"


def sum_import_times(text: str) -> dict[str, float]:
    """Return the time of all modules of each package, from the output of `-X importtime`."""
    seconds: dict[str, float] = {}
    for microseconds, name in IMPORT_TIME_LINE.findall(text):
        package = name.partition(".")[0]
        seconds[package] = seconds.get(package, 0.0) + int(microseconds) / 1e6
    return seconds


def find_slowest_packages(seconds: dict[str, float]) -> tuple[tuple[str, float], ...]:
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return tuple((name, round(value, 3)) for name, value in ranked[:MAX_SLOW_PACKAGES])
