"""Why torch sees no GPU: its build, the driver, or a variable that hides the GPUs."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

HIDING_VALUES = ("", "-1", "NoDevFiles")  # the last is Slurm's, for a job without GPUs
USE_CPU_HINT = "--device cpu"


@dataclass(frozen=True)
class GpuSetup:
    """What decides whether torch sees GPUs.

    Args:
        version: The version of torch.
        cuda: The CUDA version that torch is built for, None for a build without CUDA.
        visible: The value of CUDA_VISIBLE_DEVICES, None if it is not set.
        driver: The newest CUDA version that the NVIDIA driver supports, as 12040 for 12.4; 0 if
            there is no driver.
    """

    version: str
    cuda: str | None
    visible: str | None
    driver: int

    @staticmethod
    def detect() -> GpuSetup:
        """Return the setup of this process."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return GpuSetup(torch.__version__, torch.version.cuda, visible, read_driver_version())

    def explain_absence(self) -> tuple[str, str]:
        """Return why torch sees no GPU, and what to type."""
        if self.cuda is None:
            return (
                f"torch {self.version} is a build without CUDA",
                f"{USE_CPU_HINT}, or install a CUDA build of torch",
            )
        torch_build = f"torch {self.version} is built for CUDA {self.cuda}"
        if not self.driver:
            return (
                f"{torch_build}, but there is no NVIDIA driver here",
                f"{USE_CPU_HINT}, or install the driver (in a container: docker run --gpus all)",
            )
        if self.visible is not None and self.visible.strip() in HIDING_VALUES:
            return (
                f"CUDA_VISIBLE_DEVICES={self.visible!r} hides all GPUs",
                "unset CUDA_VISIBLE_DEVICES; in a Slurm job, ask for GPUs with --gpus-per-node",
            )
        if self.driver // 1000 < int(self.cuda.partition(".")[0]):
            newest = f"{self.driver // 1000}.{self.driver % 1000 // 10}"
            return (
                f"{torch_build}, but the NVIDIA driver is too old: it supports CUDA up to {newest}",
                f"update the driver, or install a build of torch for CUDA {newest}",
            )
        if self.visible is not None:
            return (
                f"CUDA_VISIBLE_DEVICES={self.visible!r} names no GPU of this machine",
                "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi -L lists",
            )
        return (
            f"{torch_build}, and sees no GPU",
            f"nvidia-smi, then stepladder doctor; or {USE_CPU_HINT}",
        )


def read_driver_version() -> int:
    """Return the newest CUDA version that the NVIDIA driver supports, as 12040 for 12.4, or 0."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value
