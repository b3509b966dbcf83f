"""Drivers, CUDA, and what a process sees of the GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.rules import Finding, nproc_wanted, rule, tasks_here

# Least driver for the CUDA that torch was built with: NVIDIA, CUDA Compatibility, "Minor Version Compatibility".
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}


def number(version: str) -> int:
    """The first part: 12 of 12.4, 535 of 535.104.05."""
    found = re.match(r"\d+", version)
    return int(found.group()) if found else 0


@rule
def driver_missing(facts: Facts) -> Iterator[Finding]:
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
    yield Finding("error", f"{there}nvidia-smi: {gpus.smi_error}", cause, fix)


@rule
def driver_too_old(facts: Facts) -> Iterator[Finding]:
    cuda, driver = facts.torch.cuda, facts.gpus.driver
    least = LEAST_DRIVER.get(number(cuda), 0)
    if cuda and driver and number(driver) < least:
        yield Finding(
            "error",
            f"driver {driver} with torch {facts.torch.version}, which is built for CUDA {cuda}",
            f"CUDA {number(cuda)}.x needs driver {least} or newer",
            f"update the driver to {least} or newer, or install a torch built for an older CUDA",
        )


@rule
def cuda_unavailable(facts: Facts) -> Iterator[Finding]:
    torch, gpus = facts.torch, facts.gpus
    if (
        not (torch.cuda and gpus.found)
        or torch.devices
        or number(gpus.driver) < LEAST_DRIVER.get(number(torch.cuda), 0)
    ):
        return
    visible = facts.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        cause, fix = "CUDA_VISIBLE_DEVICES hides all of them", "unset CUDA_VISIBLE_DEVICES"
    else:
        cause = torch.cuda_error or "CUDA could not be initialised"
        fix = "nvidia-smi; look whether another process holds the GPUs exclusively, and at dmesg | grep NVRM"
    yield Finding("error", f"{len(gpus.found)} GPUs, but torch {torch.version} sees none", cause, fix)


@rule
def gpu_too_new_or_old(facts: Facts) -> Iterator[Finding]:
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
            yield Finding(
                "error",
                f"GPU {gpu.index} ({gpu.name}) has compute capability {gpu.capability}; torch has {names}",
                "this build has no kernels for it",
                "install a torch of another version, or built for another CUDA, that lists this GPU's generation",
            )


@rule
def nvcc_differs(facts: Facts) -> Iterator[Finding]:
    nvcc, cuda = facts.gpus.nvcc, facts.torch.cuda
    if nvcc and cuda and number(nvcc) != number(cuda):
        yield Finding(
            "warning",
            f"nvcc is of CUDA {nvcc}, torch is built for {cuda}",
            "wheels bring their own CUDA, so training works; building an extension (flash-attn, apex) will not",
            f"before building an extension: put CUDA {cuda} first in PATH, and set CUDA_HOME",
        )


@rule
def mig(facts: Facts) -> Iterator[Finding]:
    divided = [str(gpu.index) for gpu in facts.gpus.found if gpu.mig]
    if divided:
        yield Finding(
            "warning",
            f"MIG divides GPU {', '.join(divided)}",
            "a process sees one part only, and NCCL does not join parts of one GPU: ranks there use gloo",
            "one process per part: CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L); whole again: nvidia-smi -mig 0",
        )


@rule
def visible_devices(facts: Facts) -> Iterator[Finding]:
    visible = facts.env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not facts.gpus.found:
        return
    names = [name.strip() for name in visible.split(",")]
    absent = [name for name in names if name.isdigit() and int(name) >= len(facts.gpus.found)]
    if absent:
        yield Finding(
            "error",
            f"CUDA_VISIBLE_DEVICES={visible}, but this machine has GPUs 0 to {len(facts.gpus.found) - 1}",
            f"CUDA stops at the first that is not there ({absent[0]}), and hides those after it",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi -L lists",
        )


@rule
def more_ranks_than_gpus(facts: Facts) -> Iterator[Finding]:
    seen, tasks = facts.torch.devices, tasks_here(facts)
    ranks = facts.nproc or tasks or nproc_wanted(facts)
    if not seen or ranks <= seen:
        return
    per_task = seen == 1 and (tasks > 1 or len(facts.gpus.found) > 1)
    yield Finding(
        "warning",
        f"{ranks} processes on this machine, and {seen} GPU{'s' * (seen > 1)} that torch sees",
        "gpus-per-task or CUDA_VISIBLE_DEVICES gives each process a GPU of its own, and hides it from the others"
        if per_task
        else "several processes share a GPU: NCCL refuses that, so they use gloo through the host, and wait",
        "#SBATCH --gpus-per-node=N instead of --gpus-per-task" if per_task else f"--nproc {seen}, or --nproc gpu",
    )


@rule
def nccl_missing(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if torch.cuda and torch.distributed and not torch.nccl and facts.gpus.exist:
        yield Finding(
            "error",
            f"torch {torch.version} has CUDA {torch.cuda}, but no NCCL",
            "several GPUs can then only meet through gloo and the host",
            "pip install --force-reinstall torch (the Linux wheels have NCCL)",
        )
