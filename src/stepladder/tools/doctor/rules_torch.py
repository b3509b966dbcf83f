"""Rules for Python, torch and the time of imports, for drivers, CUDA and visible GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stepladder.core.numbers import parse_whole_number
from stepladder.tools.doctor.finding import Findings, Rule, error, error_if, warning, warning_if
from stepladder.tools.doctor.machine_facts import Facts
from stepladder.tools.doctor.programs import SHADOWS_MODULE, Imports, Torch

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
# The lowest driver for the CUDA that torch was built with: NVIDIA, CUDA Compatibility, "Minor
# Version Compatibility".
MIN_DRIVER = {11: 450, 12: 525, 13: 580}
OUT_OF_MEMORY = re.compile(
    r"failed to map segment|allocate memory|memory allocation|MemoryError", re.IGNORECASE
)
SLOW_TORCH_IMPORT_S = 10.0  # from a local disk it takes 1 to 3
SLOW_SCRIPT_IMPORTS_S = 15.0


def release(version: str) -> tuple[int, ...]:
    """Return (2, 13) of 2.13.0+cu126."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def major(version: str) -> int:
    """Return 12 of 12.4, and 0 of an empty version."""
    return (*release(version), 0)[0]


def min_driver(facts: Facts) -> int:
    return MIN_DRIVER.get(major(facts.torch.cuda), 0)


def count_of_gpus(count: int) -> str:
    if count == 1:
        return "1 NVIDIA GPU"
    return f"{count} NVIDIA GPUs"


def torch_missing(facts: Facts) -> Findings:
    torch = facts.torch
    if torch.version:
        return
    text = f"torch cannot be imported: {torch.error}"
    if re.search(r"No module named '?torch'?$", torch.error):
        text = f"torch is not installed for {facts.executable}"
        cause = "often another Python's environment is active than the one that was installed into"
        fix = f"{facts.executable} -m pip install torch, or activate the right environment"
    elif torch.error.endswith(SHADOWS_MODULE):
        path = Path(torch.error.removesuffix(SHADOWS_MODULE))
        cause = (
            "Python takes modules from the folder that it is called in first, and from that of "
            "the script"
        )
        fix = f"mv {path} {path.with_name('my_' + path.name)}"
    elif torch.error.startswith("no answer"):
        text = f"import torch: {torch.error}"
        cause = "a file system that does not answer, or a GPU driver that hangs"
        fix = (
            'CUDA_VISIBLE_DEVICES= python -X importtime -c "import torch",'
            " and look at dmesg for NVRM lines"
        )
    elif OUT_OF_MEMORY.search(torch.error):
        cause = (
            "a limit on memory, of the shell or the batch job, or a file system mounted without "
            "`exec`"
        )
        fix = (
            f"ulimit -v unlimited, or more memory for the job; findmnt -T {facts.executable} "
            "shows noexec"
        )
    else:
        cause = (
            "a build that does not fit this system, files of two versions, or a library path "
            "that comes first"
        )
        fix = "pip install --force-reinstall torch; with LD_LIBRARY_PATH unset"
    yield error(text, cause, fix)


def script_imports(facts: Facts) -> Findings:
    script = facts.script
    if script.error:
        yield error(
            f"what {script.name} imports fails: {script.error}",
            "a package that is not installed in this environment, or a module beside the script "
            "that fails",
            f"{facts.executable} -m pip install what is missing",
        )
    else:
        yield from slow_imports(
            f"importing what {script.name} imports", script, SLOW_SCRIPT_IMPORTS_S
        )


def slow_imports(
    what: str,
    imports: Torch | Imports,
    limit_s: float,
) -> Findings:
    if imports.seconds > limit_s:
        slowest = ", ".join(
            f"{name} {seconds:.1f} s" for name, seconds in imports.slowest if seconds >= 0.05
        )
        yield warning(
            f"{what} takes {imports.seconds:.0f} s (more than {limit_s:.0f}); slowest: {slowest}",
            "packages are many small files: on a network file system each rank of each node "
            "waits for all of them",
            "put the environment on a local disk, or in one file (a container image); import "
            "late what few runs"
            " need",
        )


def driver_missing(facts: Facts) -> Findings:
    smi_error = facts.gpus.smi_error
    on_bus = facts.gpus.on_bus
    has_problem = on_bus > 0 or smi_error not in ("missing", "")
    if facts.gpus.found or not has_problem:
        return
    if "version mismatch" in smi_error:
        fix = (
            "reboot, or without: rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe "
            "nvidia"
        )
        cause = "the driver was updated while its kernel module stayed loaded"
    elif smi_error == "missing":
        fix = (
            "install the driver (Debian: apt-get install nvidia-driver); in Docker: docker run "
            "--gpus all"
        )
        cause = "no driver, or a container that was started without the GPUs"
    else:
        fix = "nvidia-smi, then dmesg | grep NVRM; in Docker: docker run --gpus all"
        cause = (
            "the kernel module is not loaded (often after a kernel update), or the GPU fell off "
            "the bus"
        )
    text = f"nvidia-smi: {smi_error}"
    if on_bus:
        text = f"{count_of_gpus(on_bus)}, but {text}"
    yield error(text, cause, fix)


def cuda_unavailable(facts: Facts) -> Findings:
    torch = facts.torch
    gpus = facts.gpus.found
    has_old_driver = major(facts.gpus.driver) < min_driver(facts)  # another rule reports that
    if not torch.cuda or not gpus or torch.devices or has_old_driver:
        return
    if facts.env.get("CUDA_VISIBLE_DEVICES", "shown").strip() in ("", "-1"):
        cause = "CUDA_VISIBLE_DEVICES hides all of them"
        fix = "unset CUDA_VISIBLE_DEVICES"
    else:
        cause = torch.cuda_error or "CUDA could not be initialised"
        fix = (
            "nvidia-smi; look whether another process holds the GPUs exclusively, and at dmesg "
            "| grep NVRM"
        )
    yield error(f"{len(gpus)} GPUs, but torch {torch.version} sees none", cause, fix)


def gpu_too_new_or_old(facts: Facts) -> Findings:
    for gpu in facts.gpus.found:
        capability = release(gpu.capability)
        fits = [has_kernels_for(name, capability) for name in facts.torch.architectures]
        is_known = bool(capability) and any(fit is not None for fit in fits)
        if is_known and not any(fits):
            names = " ".join(facts.torch.architectures)
            yield error(
                f"GPU {gpu.index} ({gpu.name}) has compute capability {gpu.capability}; torch "
                f"has {names}",
                "this build has no kernels for it",
                "install a torch of another version, or built for another CUDA, that lists this "
                "GPU's generation",
            )


def has_kernels_for(architecture: str, capability: tuple[int, ...]) -> bool | None:
    """Return whether a build for an architecture runs on a GPU of this compute capability.

    A binary (sm_NN) runs on GPUs of its major version from its minor version on, PTX (compute_NN)
    on all later ones. The result is None for an unknown architecture.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", architecture)
    if match is None:
        return None
    built_for = (int(match[2]), int(match[3]))
    is_new_enough = built_for <= capability
    return is_new_enough and (match[1] == "compute" or built_for[0] == capability[0])


def absent_device(facts: Facts) -> tuple[Any, ...]:
    """Return the first GPU that CUDA_VISIBLE_DEVICES names and that is absent, and the last GPU."""
    names = [name.strip() for name in facts.env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    last = len(facts.gpus.found) - 1
    return next(((name, last) for name in names if (parse_whole_number(name) or 0) > last >= 0), ())


def more_ranks_than_gpus(facts: Facts) -> Findings:
    visible = facts.torch.devices
    tasks = facts.tasks_on_node
    ranks = facts.nproc or tasks or facts.planned_ranks
    if not visible or ranks <= visible:
        return
    devices = "1 GPU" if visible == 1 else f"{visible} GPUs"
    text = f"{ranks} processes on this machine, and {devices} that torch sees"
    cause = (
        "several processes share a GPU: NCCL refuses that, so they use gloo through the host, "
        "and wait"
    )
    fix = f"--nproc {visible}, or --nproc gpu"
    if visible == 1 and (tasks > 1 or len(facts.gpus.found) > 1):
        cause = (
            "gpus-per-task or CUDA_VISIBLE_DEVICES gives each process a GPU of its own, and hides "
            "it from the others"
        )
        fix = "#SBATCH --gpus-per-node=N instead of --gpus-per-task"
    yield warning(text, cause, fix)


def gpus_unused(facts: Facts) -> str:
    """Return the GPUs that a CPU build of torch will not use."""
    torch = facts.torch
    count = len(facts.gpus.found) or facts.gpus.on_bus
    is_cpu_build = bool(torch.version) and not torch.cuda and not torch.rocm
    if count and is_cpu_build:
        return count_of_gpus(count)
    return ""


def old_torch(facts: Facts) -> str:
    """Return the lowest version of torch if the installed one is older."""
    version = facts.torch.version
    is_old = bool(version) and release(version) < MIN_TORCH
    return ".".join(map(str, MIN_TORCH)) if is_old else ""


def old_driver(facts: Facts) -> tuple[int, ...]:
    """Return the major version of torch's CUDA and its lowest driver, if the driver is older."""
    needed = min_driver(facts)
    if 0 < major(facts.gpus.driver) < needed:
        return (major(facts.torch.cuda), needed)
    return ()


def has_other_nvcc(facts: Facts) -> bool:
    nvcc = facts.gpus.nvcc
    cuda = facts.torch.cuda
    return bool(nvcc and cuda) and major(nvcc) != major(cuda)


def lacks_nccl(facts: Facts) -> bool:
    torch = facts.torch
    has_gpus = bool(facts.gpus.found) or facts.gpus.on_bus > 0
    return bool(torch.cuda) and torch.distributed and not torch.nccl and has_gpus


TORCH_RULES: dict[str, Rule] = {
    "python-version": error_if(
        lambda f: release(f.python) < MIN_PYTHON,
        "Python {f.python} ({f.executable})",
        "Stepladder needs 3.11 or newer; so do current wheels of torch",
        "python3.11 -m venv .venv && . .venv/bin/activate",
    ),
    "torch-missing": torch_missing,
    "torch-version": error_if(
        old_torch,
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
        "it was installed from an index of CPU wheels, or on another machine: training will not "
        "use the GPUs",
        "pip uninstall -y torch && pip install torch, from an index with CUDA wheels",
    ),
    "torch-import-time": lambda f: slow_imports("import torch", f.torch, SLOW_TORCH_IMPORT_S),
    "script-imports": script_imports,
    "driver-missing": driver_missing,
    "driver-too-old": error_if(
        old_driver,
        "driver {f.gpus.driver} with torch {f.torch.version}, which is built for CUDA "
        "{f.torch.cuda}",
        "CUDA {0[0]}.x needs driver {0[1]} or newer",
        "update the driver to {0[1]} or newer, or install a torch built for an older CUDA",
    ),
    "cuda-unavailable": cuda_unavailable,
    "gpu-too-new-or-old": gpu_too_new_or_old,
    "nvcc-differs": warning_if(
        has_other_nvcc,
        "nvcc is of CUDA {f.gpus.nvcc}, torch is built for {f.torch.cuda}",
        "wheels bring their own CUDA, so training works; building an extension (flash-attn, "
        "apex) will not",
        "before building an extension: put CUDA {f.torch.cuda} first in PATH, and set CUDA_HOME",
    ),
    "mig": warning_if(
        lambda f: ", ".join(str(gpu.index) for gpu in f.gpus.found if gpu.mig),
        "MIG divides GPU {0}",
        "a process sees one part only, and NCCL does not join parts of one GPU: ranks there use "
        "gloo",
        "one process per part: CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L); whole again: "
        "nvidia-smi -mig 0",
    ),
    "visible-devices": error_if(
        absent_device,
        "CUDA_VISIBLE_DEVICES={f.env[CUDA_VISIBLE_DEVICES]}, but this machine has GPUs 0 to {0[1]}",
        "CUDA stops at the first that is not there ({0[0]}), and hides those after it",
        "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi -L lists",
    ),
    "more-ranks-than-gpus": more_ranks_than_gpus,
    "nccl-missing": error_if(
        lacks_nccl,
        "torch {f.torch.version} has CUDA {f.torch.cuda}, but no NCCL",
        "several GPUs can then communicate only through gloo and the host",
        "pip install --force-reinstall torch (the Linux wheels have NCCL)",
    ),
}
