"""Rules for Python, torch and the time of imports, for drivers, CUDA and visible GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stepladder.core.numbers import parse_whole_number
from stepladder.tools.doctor.finding import Findings, Rule, problem
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


def _release(version: str) -> tuple[int, ...]:
    """Return (2, 13) of 2.13.0+cu126."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _major(version: str) -> int:
    """Return 12 of 12.4, and 0 of an empty version."""
    return (*_release(version), 0)[0]


def _min_driver(facts: Facts) -> int:
    return MIN_DRIVER.get(_major(facts.torch.cuda), 0)


def _count_of_gpus(count: int) -> str:
    if count == 1:
        return "1 NVIDIA GPU"
    return f"{count} NVIDIA GPUs"


def _torch_missing(facts: Facts) -> Findings:
    error = facts.torch.error
    if facts.torch.version:
        return
    if re.search(r"No module named '?torch'?$", error):
        yield problem("torch-missing.not-installed", facts)
    elif error.endswith(SHADOWS_MODULE):
        path = Path(error.removesuffix(SHADOWS_MODULE))
        yield problem("torch-missing.shadowed", facts, path=path)
    elif error.startswith("no answer"):
        yield problem("torch-missing.no-answer", facts)
    elif OUT_OF_MEMORY.search(error):
        yield problem("torch-missing.out-of-memory", facts)
    else:
        yield problem("torch-missing", facts)


def _script_imports(facts: Facts) -> Findings:
    script = facts.script
    if script.error:
        yield problem("script-imports.failed", facts)
    elif slow := _slow_imports(script, SLOW_SCRIPT_IMPORTS_S):
        yield problem("script-imports", facts, value=slow)


def _slow_imports(imports: Torch | Imports, limit_s: float) -> str:
    """Return the time of imports, and the slowest packages, if it is above the limit."""
    if imports.seconds <= limit_s:
        return ""
    slowest = ", ".join(
        f"{name} {seconds:.1f} s" for name, seconds in imports.slowest if seconds >= 0.05
    )
    return f"{imports.seconds:.0f} s (more than {limit_s:.0f}); slowest: {slowest}"


def _driver_missing(facts: Facts) -> Findings:
    smi_error = facts.gpus.smi_error
    on_bus = facts.gpus.on_bus
    has_problem = on_bus > 0 or smi_error not in ("missing", "")
    if facts.gpus.found or not has_problem:
        return
    name = "driver-missing"
    if "version mismatch" in smi_error:
        name = "driver-missing.mismatch"
    elif smi_error == "missing":
        name = "driver-missing.no-program"
    yield problem(name, facts, gpus=f"{_count_of_gpus(on_bus)}, but " if on_bus else "")


def _cuda_unavailable(facts: Facts) -> Findings:
    torch = facts.torch
    gpus = len(facts.gpus.found)
    has_old_driver = _major(facts.gpus.driver) < _min_driver(facts)  # another rule reports that
    if not torch.cuda or not gpus or torch.devices or has_old_driver:
        return
    if facts.env.get("CUDA_VISIBLE_DEVICES", "shown").strip() in ("", "-1"):
        yield problem("cuda-unavailable.hidden", facts, gpus=gpus)
    else:
        error = torch.cuda_error or "CUDA could not be initialised"
        yield problem("cuda-unavailable", facts, gpus=gpus, error=error)


def _gpu_too_new_or_old(facts: Facts) -> Findings:
    for gpu in facts.gpus.found:
        capability = _release(gpu.capability)
        fits = [_has_kernels_for(name, capability) for name in facts.torch.architectures]
        is_known = bool(capability) and any(fit is not None for fit in fits)
        if is_known and not any(fits):
            architectures = " ".join(facts.torch.architectures)
            yield problem("gpu-too-new-or-old", facts, gpu=gpu, architectures=architectures)


def _has_kernels_for(architecture: str, capability: tuple[int, ...]) -> bool | None:
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


def _absent_device(facts: Facts) -> tuple[Any, ...]:
    """Return the first GPU that CUDA_VISIBLE_DEVICES names and that is absent, and the last GPU."""
    visible = facts.env.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")]
    last = len(facts.gpus.found) - 1
    for name in names:
        if (parse_whole_number(name) or 0) > last >= 0:
            return name, last
    return ()


def _more_ranks_than_gpus(facts: Facts) -> Findings:
    visible = facts.torch.devices
    tasks = facts.tasks_on_node
    ranks = facts.nproc or tasks or facts.planned_ranks
    if not visible or ranks <= visible:
        return
    devices = "1 GPU" if visible == 1 else f"{visible} GPUs"
    hides_gpus = visible == 1 and (tasks > 1 or len(facts.gpus.found) > 1)
    name = "more-ranks-than-gpus.hidden" if hides_gpus else "more-ranks-than-gpus"
    yield problem(name, facts, ranks=ranks, devices=devices)


def _gpus_unused(facts: Facts) -> str:
    """Return the GPUs that a CPU build of torch will not use."""
    torch = facts.torch
    count = len(facts.gpus.found) or facts.gpus.on_bus
    is_cpu_build = bool(torch.version) and not torch.cuda and not torch.rocm
    if count and is_cpu_build:
        return _count_of_gpus(count)
    return ""


def _old_torch(facts: Facts) -> str:
    """Return the lowest version of torch if the installed one is older."""
    version = facts.torch.version
    is_old = bool(version) and _release(version) < MIN_TORCH
    return ".".join(map(str, MIN_TORCH)) if is_old else ""


def _old_driver(facts: Facts) -> tuple[int, ...]:
    """Return the major version of torch's CUDA and its lowest driver, if the driver is older."""
    needed = _min_driver(facts)
    if 0 < _major(facts.gpus.driver) < needed:
        return (_major(facts.torch.cuda), needed)
    return ()


def _has_other_nvcc(facts: Facts) -> bool:
    nvcc = facts.gpus.nvcc
    cuda = facts.torch.cuda
    return bool(nvcc and cuda) and _major(nvcc) != _major(cuda)


def _lacks_nccl(facts: Facts) -> bool:
    torch = facts.torch
    has_gpus = bool(facts.gpus.found) or facts.gpus.on_bus > 0
    return bool(torch.cuda) and torch.distributed and not torch.nccl and has_gpus


TORCH_RULES: dict[str, Rule] = {
    "python-version": lambda f: _release(f.python) < MIN_PYTHON,
    "torch-missing": _torch_missing,
    "torch-version": _old_torch,
    "torch-without-distributed": lambda f: f.torch.version and not f.torch.distributed,
    "torch-cpu-only": _gpus_unused,
    "torch-import-time": lambda f: _slow_imports(f.torch, SLOW_TORCH_IMPORT_S),
    "script-imports": _script_imports,
    "driver-missing": _driver_missing,
    "driver-too-old": _old_driver,
    "cuda-unavailable": _cuda_unavailable,
    "gpu-too-new-or-old": _gpu_too_new_or_old,
    "nvcc-differs": _has_other_nvcc,
    "mig": lambda f: ", ".join(str(gpu.index) for gpu in f.gpus.found if gpu.mig),
    "visible-devices": _absent_device,
    "more-ranks-than-gpus": _more_ranks_than_gpus,
    "nccl-missing": _lacks_nccl,
}
