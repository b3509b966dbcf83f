"""Mixed precision on simulated GPUs: the CPU's autocast with bfloat16, and losses not scaled.

Each function is called with the one that it replaces, and the arguments of a call.
"""

from __future__ import annotations

from typing import Any

import torch

from stepladder.tools.check.simulated_gpu.devices import map_device_type


def autocast_on_cpu(
    original: Any,
    autocast: Any,
    device_type: str = "cuda",
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Make an `autocast` for which CUDA is the CPU, and float16 is bfloat16."""
    if dtype == torch.float16:
        dtype = torch.bfloat16
    original(autocast, map_device_type(device_type), dtype, *args, **kwargs)


def scale_by_one(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
    """Make a `GradScaler` that does nothing: bfloat16 needs none."""
    original(scaler, "cpu", enabled=False)


def ask_for_cpu(original: Any, device_type: str = "cuda") -> Any:
    """Ask for the CPU in place of CUDA, which is meant if no type is given."""
    return original(map_device_type(device_type))
