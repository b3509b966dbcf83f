"""Why torch sees no GPU: its build, the driver, or a variable that hides the GPUs."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

HIDING_VALUES = ("", "-1", "NoDevFiles")  # the last: Slurm's, for a job that asked for no GPU
USE_CPU_HINT = "--device cpu"


@dataclass(frozen=True)
class GpuSetup:
    """What decides whether torch sees GPUs.

    version: of torch.  cuda: the CUDA that torch is built for, or None for a build without.
    visible: CUDA_VISIBLE_DEVICES, or None where it is not set. driver: the newest CUDA that the
    NVIDIA driver supports, as 12040 for 12.4; 0 where there is no driver."""

    version: str
    cuda: str | None
    visible: str | None
    driver: int

    @staticmethod
    def detect() -> GpuSetup:
        return GpuSetup(
            torch.__version__,
            torch.version.cuda,
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            read_driver_version(),
        )

    def explain_absence(self) -> tuple[str, str]:
        """Return why torch sees no GPU, and what to type."""
        if self.cuda is None:
            return (
                f"torch {self.version} is a build without CUDA",
                f"{USE_CPU_HINT}, or install a CUDA build of torch",
            )
        built = f"torch {self.version} is built for CUDA {self.cuda}"
        if not self.driver:
            install = "install the driver (in a container: docker run --gpus all)"
            return f"{built}, but there is no NVIDIA driver here", f"{USE_CPU_HINT}, or {install}"
        if self.visible is not None and self.visible.strip() in HIDING_VALUES:
            unset = "unset CUDA_VISIBLE_DEVICES; in a Slurm job, ask for GPUs with --gpus-per-node"
            return f"CUDA_VISIBLE_DEVICES={self.visible!r} hides all GPUs", unset
        major = int(self.cuda.partition(".")[0])
        if self.driver // 1000 < major:
            newest = f"{self.driver // 1000}.{self.driver % 1000 // 10}"
            found = f"{built}, but the NVIDIA driver is too old: it supports CUDA up to {newest}"
            return found, f"update the driver, or install a build of torch for CUDA {newest}"
        if self.visible is not None:
            found = f"CUDA_VISIBLE_DEVICES={self.visible!r} names no GPU of this machine"
            return found, "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi -L lists"
        return f"{built}, and sees no GPU", f"nvidia-smi, then stepladder doctor; or {USE_CPU_HINT}"


def read_driver_version() -> int:
    """Return the newest CUDA that the NVIDIA driver supports, as 12040 for 12.4; 0 where there is
    no driver.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value
