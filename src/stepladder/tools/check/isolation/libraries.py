"""Functions of libraries that write files in C or Rust, where no audit event tells of them.

Each is wrapped once its library is imported. torch's own are among the hooks of the probe.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    Refuse = Callable[..., None]


class AfterImport:
    """Finds a module as the others do, and calls a function with it once it is loaded."""

    def __init__(self, callbacks: dict[str, Callable[[Any], None]]) -> None:
        self.callbacks = callbacks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        callback = self.callbacks.pop(name, None)
        if callback is None:
            return None
        spec: Any = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            load(module)
            callback(module)

        spec.loader.exec_module = load_and_call
        return spec


def guard(refuse_outside: Refuse) -> None:
    """Have `refuse_outside` called with the path before one of these functions writes it."""

    def safetensors(module: Any) -> None:
        wrap(module, "serialize_file", 1, lambda path, *_: refuse_outside(path))

    def h5py(module: Any) -> None:
        def judge(path: Any, mode: str = "r", *_: Any) -> None:
            if mode != "r":
                refuse_outside(path)

        wrap(module, "make_fid", 0, judge)

    callbacks: dict[str, Callable[[Any], None]] = {
        "safetensors": safetensors,
        "h5py._hl.files": h5py,
    }
    sys.meta_path.insert(0, AfterImport(callbacks))


def wrap(module: Any, name: str, number: int, judge: Callable[..., Any]) -> None:
    """Have `judge` called with the arguments from this number on before each call of the function."""
    original = getattr(module, name)

    def judged(*args: Any, **kwargs: Any) -> Any:
        judge(*(args + tuple(kwargs.values()))[number:])
        return original(*args, **kwargs)

    setattr(module, name, judged)
