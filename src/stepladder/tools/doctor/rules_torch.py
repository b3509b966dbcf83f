"""Python and torch: versions, builds, and how long they take to import."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.imports import BEFORE, Imports, Torch
from stepladder.tools.doctor.rules import Finding, rule

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
NO_MEMORY = re.compile(r"failed to map segment|allocate memory|memory allocation|MemoryError", re.IGNORECASE)
SLOW_TORCH, SLOW_SCRIPT = 10.0, 15.0  # seconds; from a local disk torch takes 1 to 3


@rule
def python_version(facts: Facts) -> Iterator[Finding]:
    version = tuple(int(number) for number in re.findall(r"\d+", facts.python)[:2])
    if version < LEAST_PYTHON:
        yield Finding(
            "error",
            f"Python {facts.python} ({facts.executable})",
            "Stepladder needs 3.11 or newer; so do current wheels of torch",
            "python3.11 -m venv .venv && . .venv/bin/activate",
        )


@rule
def torch_missing(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if torch.version:
        return
    if re.search(r"No module named '?torch'?$", torch.error):
        yield Finding(
            "error",
            f"torch is not installed for {facts.executable}",
            "often another Python's environment is active than the one that was installed into",
            f"{facts.executable} -m pip install torch, or activate the right environment",
        )
    elif torch.error.endswith(BEFORE):
        path = Path(torch.error.removesuffix(BEFORE))
        yield Finding(
            "error",
            f"torch cannot be imported: {torch.error}",
            "Python takes modules from the folder that it is called in first, and from that of the script",
            f"mv {path} {path.with_name('my_' + path.name)}",
        )
    elif torch.error.startswith("no answer"):
        yield Finding(
            "error",
            f"import torch: {torch.error}",
            "a file system that does not answer, or a GPU driver that hangs",
            'CUDA_VISIBLE_DEVICES= python -X importtime -c "import torch", and look at dmesg for NVRM lines',
        )
    elif NO_MEMORY.search(torch.error):
        yield Finding(
            "error",
            f"torch cannot be imported: {torch.error}",
            "a limit on memory, of the shell or the batch job, or a file system mounted without `exec`",
            f"ulimit -v unlimited, or more memory for the job; findmnt -T {facts.executable} shows noexec",
        )
    else:
        yield Finding(
            "error",
            f"torch cannot be imported: {torch.error}",
            "a build that does not fit this system, files of two versions, or a library path that comes first",
            "pip install --force-reinstall torch; with LD_LIBRARY_PATH unset",
        )


@rule
def torch_version(facts: Facts) -> Iterator[Finding]:
    if facts.torch.version and facts.torch.release < LEAST_TORCH:
        yield Finding(
            "error",
            f"torch {facts.torch.version}",
            f"Stepladder needs {'.'.join(map(str, LEAST_TORCH))} or newer",
            f"pip install 'torch>={'.'.join(map(str, LEAST_TORCH))}'",
        )


@rule
def torch_without_distributed(facts: Facts) -> Iterator[Finding]:
    if facts.torch.version and not facts.torch.distributed:
        yield Finding(
            "error",
            f"torch {facts.torch.version} was built without torch.distributed",
            "a build of one's own with USE_DISTRIBUTED=0, or for a system without it",
            "pip install --force-reinstall torch",
        )


@rule
def torch_cpu_only(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if torch.version and not torch.cuda and not torch.rocm and facts.gpus.exist:
        count = len(facts.gpus.found) or facts.gpus.on_bus
        yield Finding(
            "error",
            f"torch {torch.version} is a CPU build, on a machine with {count} NVIDIA GPU{'s' * (count > 1)}",
            "it was installed from an index of CPU wheels, or on another machine: training will not use the GPUs",
            "pip uninstall -y torch && pip install torch, from an index with CUDA wheels",
        )


@rule
def torch_import_time(facts: Facts) -> Iterator[Finding]:
    if facts.torch.seconds > SLOW_TORCH:
        yield slow("import torch", facts.torch, SLOW_TORCH)


@rule
def script_imports(facts: Facts) -> Iterator[Finding]:
    script = facts.script
    if script is None:
        return
    if script.error:
        yield Finding(
            "error",
            f"what {script.name} imports fails: {script.error}",
            "a package that is not installed in this environment, or a module beside the script that fails",
            f"{facts.executable} -m pip install what is missing",
        )
    elif script.seconds > SLOW_SCRIPT:
        yield slow(f"importing what {script.name} imports", script, SLOW_SCRIPT)


def slow(what: str, seen: Torch | Imports, limit: float) -> Finding:
    slowest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in seen.slowest if seconds >= 0.05)
    return Finding(
        "warning",
        f"{what} takes {seen.seconds:.0f} s (more than {limit:.0f}); slowest: {slowest}",
        "packages are many small files: on a network file system each rank of each node waits for all of them",
        "put the environment on a local disk, or in one file (a container image); import late what few runs need",
    )
