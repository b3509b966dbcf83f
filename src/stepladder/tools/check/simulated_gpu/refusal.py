"""Refusals by name: what a script uses of CUDA, and the simulation does not have."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class NotSimulated(AttributeError, RuntimeError):
    """Raised where a script uses something that the simulation does not have."""


class SimulatedObject:
    """An object of simulated CUDA. It names the attributes that it does not have."""

    def __getattr__(self, name: str) -> Any:
        raise NotSimulated(f"{type(self).__name__} has no {name}: it is not simulated")


def make_unsupported_function(name: str, original: Function) -> Function:
    """Return a function in place of the one of this name, which says that it is not simulated."""

    @functools.wraps(original)  # torch 2.15 looks for what torch's own function wraps
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSimulated(f"{name} is not simulated")

    return refuse


class UnsupportedClass:
    """A class that is not simulated: making an object raises NotSimulated, `isinstance` works."""

    full_name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotSimulated(f"{cls.full_name} is not simulated")


def make_unsupported_class(name: str, original: type) -> type:
    """Return a class in place of the one of this name, which is not simulated."""
    return type(original.__name__, (UnsupportedClass,), {"full_name": name})


def raise_for_device_in_cpp() -> None:
    """Stand in for `torch.cuda._lazy_init`, which C++ code calls that was given a CUDA device.

    Raises:
        NotSimulated: With the line of the caller.
    """
    caller = sys._getframe(1)
    line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
    raise NotSimulated(f"C++ code that takes a CUDA device is not simulated: {line}")
