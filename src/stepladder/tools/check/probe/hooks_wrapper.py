"""Hooks that record a model which changes its device or its type after it was wrapped."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import nn

from stepladder.tools.check.events import ModelMoved
from stepladder.tools.check.probe.patching import default_on_error, wrap
from stepladder.tools.check.probe.probe_log import record

MOVING_METHODS = ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type")


class WrappedModels:
    """The parameters of wrapped models, and the devices that the script asks for.

    Simulated GPUs are the CPU: only the script's own calls say where a parameter should be.
    """

    def __init__(self) -> None:
        self.wrapped: set[int] = set()  # ids of parameters
        self.devices: dict[int, str] = {}  # by the id of a parameter

    def add_wrapped(self, module: Any) -> None:
        self.wrapped.update(id(parameter) for parameter in module.parameters())

    def is_wrapped(self, parameter: Any) -> bool:
        return id(parameter) in self.wrapped

    def device_of(self, parameter: Any) -> str:
        return self.devices.get(id(parameter), str(parameter.device.type))

    def set_device(self, module: Any, device: str) -> None:
        for parameter in module.parameters():
            self.devices[id(parameter)] = device


wrapped_models = WrappedModels()


def gpu_of(parameters: list[Any]) -> str:
    """Return the GPU on which a model is; empty where it is on none."""
    device = wrapped_models.device_of(parameters[0]) if parameters else ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{device} {visible}".strip() if device.startswith("cuda") else ""


def attach() -> None:
    for name in MOVING_METHODS:
        wrap(nn.Module, name, partial(record_move, name))


def record_move(name: str, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    before = describe_place(module)
    result = original(module, *args, **kwargs)
    device = requested_device(name, (*args, *kwargs.values()))
    if device:
        wrapped_models.set_device(module, device)
    after = describe_place(module)
    if before and after and before != after:
        record(ModelMoved(before=before, after=after))
    return result


@default_on_error(str)
def describe_place(module: Any) -> str:
    """Return the device and the type of a wrapped model; an empty text of any other."""
    parameter = next(module.parameters(), None)
    if parameter is None or not wrapped_models.is_wrapped(parameter):
        return ""
    dtype = str(parameter.dtype).removeprefix("torch.")
    device = wrapped_models.device_of(parameter).partition(":")[0]
    return f"{device} in {dtype}"


@default_on_error(str)
def requested_device(name: str, arguments: tuple[Any, ...]) -> str:
    """Return the device that a call asks for; an empty text where it asks for none."""
    device = name if name in ("cuda", "cpu") else ""
    for argument in arguments if name in ("to", "cuda") else ():
        if isinstance(argument, str | torch.device):
            device = str(argument)
        elif isinstance(argument, int) and not isinstance(argument, bool):
            device = f"cuda:{argument}"
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
