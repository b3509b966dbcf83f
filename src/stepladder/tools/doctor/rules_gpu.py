"""Drivers, CUDA, and what a process sees of the GPUs."""

from __future__ import annotations

import re

from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.finding import (
    Findings,
    error,
    error_if,
    nproc_wanted,
    tasks_here,
    warning,
    warning_if,
)

# Least driver for the CUDA that torch was built with: NVIDIA, CUDA Compatibility, "Minor Version Compatibility".
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}


def number(version: str) -> int:
    """The first part: 12 of 12.4, 535 of 535.104.05."""
    found = re.match(r"\d+", version)
    return int(found.group()) if found else 0


def least_driver(facts: Facts) -> int:
    return LEAST_DRIVER.get(number(facts.torch.cuda), 0)


def driver_missing(facts: Facts) -> Findings:
    gpus = facts.gpus
    if gpus.found or not (gpus.on_bus or gpus.smi_error not in ("missing", "")):
        return
    if "version mismatch" in gpus.smi_error:
        fix = "reboot, or without: rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia"
        cause = "the driver was updated while its kernel module stayed loaded"
    elif gpus.smi_error == "missing":
        fix = "install the driver (Debian: apt-get install nvidia-driver); in Docker: docker run --gpus all"
        cause = "no driver, or a container that was started without the GPUs"
    else:
        fix = "nvidia-smi, then dmesg | grep NVRM; in Docker: docker run --gpus all"
        cause = "the kernel module is not loaded (often after a kernel update), or the GPU fell off the bus"
    there = f"{gpus.on_bus} NVIDIA GPU{'s' * (gpus.on_bus > 1)}, but " if gpus.on_bus else ""
    yield error(f"{there}nvidia-smi: {gpus.smi_error}", cause, fix)


def driver_too_old(facts: Facts) -> Findings:
    cuda, driver, least = facts.torch.cuda, facts.gpus.driver, least_driver(facts)
    if cuda and driver and number(driver) < least:
        yield error(
            f"driver {driver} with torch {facts.torch.version}, which is built for CUDA {cuda}",
            f"CUDA {number(cuda)}.x needs driver {least} or newer",
            f"update the driver to {least} or newer, or install a torch built for an older CUDA",
        )


def cuda_unavailable(facts: Facts) -> Findings:
    torch, gpus = facts.torch, facts.gpus
    if not (torch.cuda and gpus.found) or torch.devices or number(gpus.driver) < least_driver(facts):
        return
    visible = facts.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        cause, fix = "CUDA_VISIBLE_DEVICES hides all of them", "unset CUDA_VISIBLE_DEVICES"
    else:
        cause = torch.cuda_error or "CUDA could not be initialised"
        fix = "nvidia-smi; look whether another process holds the GPUs exclusively, and at dmesg | grep NVRM"
    yield error(f"{len(gpus.found)} GPUs, but torch {torch.version} sees none", cause, fix)


def gpu_too_new_or_old(facts: Facts) -> Findings:
    """A binary runs on GPUs of its major version from its minor one on; PTX (compute_NN) on all later ones."""
    known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name) for name in facts.torch.architectures]
    built = [(m[1], int(m[2]), int(m[3])) for m in known if m]
    for gpu in facts.gpus.found:
        if not built or not gpu.capability:
            continue
        major, minor = map(int, gpu.capability.split("."))
        fits = [
            (kind == "compute" and (a, b) <= (major, minor)) or (a == major and b <= minor) for kind, a, b in built
        ]
        if not any(fits):
            names = " ".join(facts.torch.architectures)
            yield error(
                f"GPU {gpu.index} ({gpu.name}) has compute capability {gpu.capability}; torch has {names}",
                "this build has no kernels for it",
                "install a torch of another version, or built for another CUDA, that lists this GPU's generation",
            )


def visible_devices(facts: Facts) -> Findings:
    visible, last = facts.env.get("CUDA_VISIBLE_DEVICES", ""), len(facts.gpus.found) - 1
    names = [name.strip() for name in visible.split(",")]
    absent = [name for name in names if name.isdigit() and int(name) > last >= 0]
    if absent:
        yield error(
            f"CUDA_VISIBLE_DEVICES={visible}, but this machine has GPUs 0 to {last}",
            f"CUDA stops at the first that is not there ({absent[0]}), and hides those after it",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi -L lists",
        )


def more_ranks_than_gpus(facts: Facts) -> Findings:
    seen, tasks = facts.torch.devices, tasks_here(facts)
    ranks = facts.nproc or tasks or nproc_wanted(facts)
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


RULES = {
    "driver-missing": driver_missing,
    "driver-too-old": driver_too_old,
    "cuda-unavailable": cuda_unavailable,
    "gpu-too-new-or-old": gpu_too_new_or_old,
    "nvcc-differs": warning_if(
        lambda f: f.gpus.nvcc and f.torch.cuda and number(f.gpus.nvcc) != number(f.torch.cuda),
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
    "visible-devices": visible_devices,
    "more-ranks-than-gpus": more_ranks_than_gpus,
    "nccl-missing": error_if(
        lambda f: f.torch.cuda and f.torch.distributed and not f.torch.nccl and f.gpus.exist,
        "torch {f.torch.version} has CUDA {f.torch.cuda}, but no NCCL",
        "several GPUs can then only meet through gloo and the host",
        "pip install --force-reinstall torch (the Linux wheels have NCCL)",
    ),
}
