"""Python, torch and how long they take to import; drivers, CUDA, and what a process sees of the
GPUs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stepladder.core.numbers import parse_whole_number
from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.finding import Findings, Rule, error, error_if, warning, warning_if
from stepladder.tools.doctor.programs import BEFORE, Imports, Torch

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
# Least driver for the CUDA that torch was built with: NVIDIA, CUDA Compatibility, "Minor Version
# Compatibility".
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
NO_MEMORY = re.compile(
    r"failed to map segment|allocate memory|memory allocation|MemoryError", re.IGNORECASE
)
SLOW_TORCH, SLOW_SCRIPT = 10.0, 15.0  # seconds; from a local disk torch takes 1 to 3


def release(version: str) -> tuple[int, ...]:
    """(2, 13) of 2.13.0+cu126."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def major(version: str) -> int:
    """12 of 12.4; 0 of nothing."""
    return (*release(version), 0)[0]


def least_driver(facts: Facts) -> int:
    return LEAST_DRIVER.get(major(facts.torch.cuda), 0)


def gpus(count: int) -> str:
    return f"{count} NVIDIA GPU{'s' * (count > 1)}"


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


def script_imports(facts: Facts) -> Findings:
    script = facts.script
    if script.error:
        yield error(
            f"what {script.name} imports fails: {script.error}",
            "a package that is not installed in this environment, or a module beside the script that fails",
            f"{facts.executable} -m pip install what is missing",
        )
    else:
        yield from slow(f"importing what {script.name} imports", script, SLOW_SCRIPT)


def slow(what: str, seen: Torch | Imports, limit: float) -> Findings:
    if seen.seconds > limit:
        slowest = ", ".join(
            f"{name} {seconds:.1f} s" for name, seconds in seen.slowest if seconds >= 0.05
        )
        yield warning(
            f"{what} takes {seen.seconds:.0f} s (more than {limit:.0f}); slowest: {slowest}",
            "packages are many small files: on a network file system each rank of each node waits for all of them",
            "put the environment on a local disk, or in one file (a container image); import late what few runs"
            " need",
        )


def driver_missing(facts: Facts) -> Findings:
    said, on_bus = facts.gpus.smi_error, facts.gpus.on_bus
    if facts.gpus.found or not (on_bus or said not in ("missing", "")):
        return
    if "version mismatch" in said:
        fix = "reboot, or without: rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia"
        cause = "the driver was updated while its kernel module stayed loaded"
    elif said == "missing":
        fix = "install the driver (Debian: apt-get install nvidia-driver); in Docker: docker run --gpus all"
        cause = "no driver, or a container that was started without the GPUs"
    else:
        fix = "nvidia-smi, then dmesg | grep NVRM; in Docker: docker run --gpus all"
        cause = "the kernel module is not loaded (often after a kernel update), or the GPU fell off the bus"
    yield error(
        f"{gpus(on_bus)}, but nvidia-smi: {said}" if on_bus else f"nvidia-smi: {said}", cause, fix
    )


def cuda_unavailable(facts: Facts) -> Findings:
    torch, found = facts.torch, facts.gpus.found
    if (
        not (torch.cuda and found)
        or torch.devices
        or major(facts.gpus.driver) < least_driver(facts)
    ):
        return
    if facts.env.get("CUDA_VISIBLE_DEVICES", "shown").strip() in ("", "-1"):
        cause, fix = "CUDA_VISIBLE_DEVICES hides all of them", "unset CUDA_VISIBLE_DEVICES"
    else:
        cause = torch.cuda_error or "CUDA could not be initialised"
        fix = "nvidia-smi; look whether another process holds the GPUs exclusively, and at dmesg | grep NVRM"
    yield error(f"{len(found)} GPUs, but torch {torch.version} sees none", cause, fix)


def gpu_too_new_or_old(facts: Facts) -> Findings:
    """A binary runs on GPUs of its major version from its minor one on; PTX (compute_NN) on all
    later ones.
    """
    known = [
        re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name) for name in facts.torch.architectures
    ]
    built = [(m[1], int(m[2]), int(m[3])) for m in known if m]
    for gpu in facts.gpus.found:
        has = release(gpu.capability)
        fits = [(a, b) <= has and (kind == "compute" or a == has[0]) for kind, a, b in built]
        if has and fits and not any(fits):
            names = " ".join(facts.torch.architectures)
            yield error(
                f"GPU {gpu.index} ({gpu.name}) has compute capability {gpu.capability}; torch has {names}",
                "this build has no kernels for it",
                "install a torch of another version, or built for another CUDA, that lists this GPU's generation",
            )


def absent_device(facts: Facts) -> tuple[Any, ...]:
    """The first GPU that CUDA_VISIBLE_DEVICES names and that is not there, and the last that is."""
    names = [name.strip() for name in facts.env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    last = len(facts.gpus.found) - 1
    return next(((name, last) for name in names if (parse_whole_number(name) or 0) > last >= 0), ())


def more_ranks_than_gpus(facts: Facts) -> Findings:
    seen, tasks = facts.torch.devices, facts.tasks_here
    ranks = facts.nproc or tasks or facts.ranks_wanted
    if not seen or ranks <= seen:
        return
    found = f"{ranks} processes on this machine, and {seen} GPU{'s' * (seen > 1)} that torch sees"
    cause = "several processes share a GPU: NCCL refuses that, so they use gloo through the host, and wait"
    fix = f"--nproc {seen}, or --nproc gpu"
    if seen == 1 and (tasks > 1 or len(facts.gpus.found) > 1):
        who = "gpus-per-task or CUDA_VISIBLE_DEVICES"
        cause = f"{who} gives each process a GPU of its own, and hides it from the others"
        fix = "#SBATCH --gpus-per-node=N instead of --gpus-per-task"
    yield warning(found, cause, fix)


def gpus_unused(facts: Facts) -> str:
    """The GPUs that a CPU build of torch will not use."""
    torch, count = facts.torch, len(facts.gpus.found) or facts.gpus.on_bus
    return gpus(count) if count and torch.version and not torch.cuda and not torch.rocm else ""


RULES: dict[str, Rule] = {
    "python-version": error_if(
        lambda f: release(f.python) < LEAST_PYTHON,
        "Python {f.python} ({f.executable})",
        "Stepladder needs 3.11 or newer; so do current wheels of torch",
        "python3.11 -m venv .venv && . .venv/bin/activate",
    ),
    "torch-missing": torch_missing,
    "torch-version": error_if(
        lambda f: (
            f.torch.version
            and release(f.torch.version) < LEAST_TORCH
            and ".".join(map(str, LEAST_TORCH))
        ),
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
    "torch-import-time": lambda f: slow("import torch", f.torch, SLOW_TORCH),
    "script-imports": script_imports,
    "driver-missing": driver_missing,
    "driver-too-old": error_if(
        lambda f: (
            0 < major(f.gpus.driver) < least_driver(f) and (major(f.torch.cuda), least_driver(f))
        ),
        "driver {f.gpus.driver} with torch {f.torch.version}, which is built for CUDA {f.torch.cuda}",
        "CUDA {0[0]}.x needs driver {0[1]} or newer",
        "update the driver to {0[1]} or newer, or install a torch built for an older CUDA",
    ),
    "cuda-unavailable": cuda_unavailable,
    "gpu-too-new-or-old": gpu_too_new_or_old,
    "nvcc-differs": warning_if(
        lambda f: f.gpus.nvcc and f.torch.cuda and major(f.gpus.nvcc) != major(f.torch.cuda),
        "nvcc is of CUDA {f.gpus.nvcc}, torch is built for {f.torch.cuda}",
        "wheels bring their own CUDA, so training works; building an extension (flash-attn, apex) will not",
        "before building an extension: put CUDA {f.torch.cuda} first in PATH, and set CUDA_HOME",
    ),
    "mig": warning_if(
        lambda f: ", ".join(str(gpu.index) for gpu in f.gpus.found if gpu.mig),
        "MIG divides GPU {0}",
        "a process sees one part only, and NCCL does not join parts of one GPU: ranks there use gloo",
        "one process per part: CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L); whole again: nvidia-smi -mig 0",
    ),
    "visible-devices": error_if(
        absent_device,
        "CUDA_VISIBLE_DEVICES={f.env[CUDA_VISIBLE_DEVICES]}, but this machine has GPUs 0 to {0[1]}",
        "CUDA stops at the first that is not there ({0[0]}), and hides those after it",
        "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi -L lists",
    ),
    "more-ranks-than-gpus": more_ranks_than_gpus,
    "nccl-missing": error_if(
        lambda f: (
            f.torch.cuda
            and f.torch.distributed
            and not f.torch.nccl
            and (f.gpus.found or f.gpus.on_bus)
        ),
        "torch {f.torch.version} has CUDA {f.torch.cuda}, but no NCCL",
        "several GPUs can then only meet through gloo and the host",
        "pip install --force-reinstall torch (the Linux wheels have NCCL)",
    ),
}
