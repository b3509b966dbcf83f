"""Python and torch: versions, builds, and how long they take to import."""

from __future__ import annotations

import re
from pathlib import Path

from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.finding import Finding, Findings, error, error_if, warning
from stepladder.tools.doctor.imports import BEFORE, Imports, Torch

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
NO_MEMORY = re.compile(r"failed to map segment|allocate memory|memory allocation|MemoryError", re.IGNORECASE)
SLOW_TORCH, SLOW_SCRIPT = 10.0, 15.0  # seconds; from a local disk torch takes 1 to 3


def torch_missing(facts: Facts) -> Findings:
    torch = facts.torch
    if torch.version:
        return
    found = f"torch cannot be imported: {torch.error}"
    if re.search(r"No module named '?torch'?$", torch.error):
        found = f"torch is not installed for {facts.executable}"
        cause = "often another Python's environment is active than the one that was installed into"
        fix = f"{facts.executable} -m pip install torch, or activate the right environment"
    elif torch.error.endswith(BEFORE):
        path = Path(torch.error.removesuffix(BEFORE))
        cause = "Python takes modules from the folder that it is called in first, and from that of the script"
        fix = f"mv {path} {path.with_name('my_' + path.name)}"
    elif torch.error.startswith("no answer"):
        found = f"import torch: {torch.error}"
        cause = "a file system that does not answer, or a GPU driver that hangs"
        fix = 'CUDA_VISIBLE_DEVICES= python -X importtime -c "import torch", and look at dmesg for NVRM lines'
    elif NO_MEMORY.search(torch.error):
        cause = "a limit on memory, of the shell or the batch job, or a file system mounted without `exec`"
        fix = f"ulimit -v unlimited, or more memory for the job; findmnt -T {facts.executable} shows noexec"
    else:
        cause = "a build that does not fit this system, files of two versions, or a library path that comes first"
        fix = "pip install --force-reinstall torch; with LD_LIBRARY_PATH unset"
    yield error(found, cause, fix)


def torch_import_time(facts: Facts) -> Findings:
    if facts.torch.seconds > SLOW_TORCH:
        yield slow("import torch", facts.torch, SLOW_TORCH)


def script_imports(facts: Facts) -> Findings:
    script = facts.script
    if script is not None and script.error:
        yield error(
            f"what {script.name} imports fails: {script.error}",
            "a package that is not installed in this environment, or a module beside the script that fails",
            f"{facts.executable} -m pip install what is missing",
        )
    elif script is not None and script.seconds > SLOW_SCRIPT:
        yield slow(f"importing what {script.name} imports", script, SLOW_SCRIPT)


def slow(what: str, seen: Torch | Imports, limit: float) -> Finding:
    slowest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in seen.slowest if seconds >= 0.05)
    return warning(
        f"{what} takes {seen.seconds:.0f} s (more than {limit:.0f}); slowest: {slowest}",
        "packages are many small files: on a network file system each rank of each node waits for all of them",
        "put the environment on a local disk, or in one file (a container image); import late what few runs need",
    )


def gpus_unused(facts: Facts) -> str:
    """The GPUs that a CPU build of torch will not use."""
    torch, count = facts.torch, len(facts.gpus.found) or facts.gpus.on_bus
    unused = torch.version and not torch.cuda and not torch.rocm and facts.gpus.exist
    return f"{count} NVIDIA GPU{'s' * (count > 1)}" if unused else ""


RULES = {
    "python-version": error_if(
        lambda f: tuple(map(int, re.findall(r"\d+", f.python)[:2])) < LEAST_PYTHON,
        "Python {f.python} ({f.executable})",
        "Stepladder needs 3.11 or newer; so do current wheels of torch",
        "python3.11 -m venv .venv && . .venv/bin/activate",
    ),
    "torch-missing": torch_missing,
    "torch-version": error_if(
        lambda f: f.torch.version and f.torch.release < LEAST_TORCH and ".".join(map(str, LEAST_TORCH)),
        "torch {f.torch.version}",
        "Stepladder needs {0} or newer",
        "pip install 'torch>={0}'",
    ),
    "torch-without-distributed": error_if(
        lambda f: f.torch.version and not f.torch.distributed,
        "torch {f.torch.version} was built without torch.distributed",
        "a build of one's own with USE_DISTRIBUTED=0, or for a system without it",
        "pip install --force-reinstall torch",
    ),
    "torch-cpu-only": error_if(
        gpus_unused,
        "torch {f.torch.version} is a CPU build, on a machine with {0}",
        "it was installed from an index of CPU wheels, or on another machine: training will not use the GPUs",
        "pip uninstall -y torch && pip install torch, from an index with CUDA wheels",
    ),
    "torch-import-time": torch_import_time,
    "script-imports": script_imports,
}
