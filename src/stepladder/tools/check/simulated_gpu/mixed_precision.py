"""Mixed precision on simulated GPUs: the CPU's autocast with bfloat16, and losses not scaled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stepladder.tools.check.simulated_gpu.devices import map_device_type


def autocast_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `autocast.__init__` for which CUDA is the CPU, and float16 is bfloat16."""

    @functools.wraps(original)
    def init(
        self: Any,
        device_type: str = "cuda",
        dtype: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if dtype == torch.float16:
            dtype = torch.bfloat16
        original(self, map_device_type(device_type), dtype, *args, **kwargs)

    return init


def scale_by_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `GradScaler.__init__` of a scaler that does nothing: bfloat16 needs none."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu", enabled=False)

    return init


def ask_for_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a device type, CUDA if none is given, that is asked for the CPU."""

    @functools.wraps(original)
    def ask(device_type: str = "cuda") -> Any:
        return original(map_device_type(device_type))

    return ask
