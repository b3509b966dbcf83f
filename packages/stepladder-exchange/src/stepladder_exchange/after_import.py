"""Calls a function after the import of a module that this process may import later."""

from __future__ import annotations

import sys
from importlib.util import find_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


class AfterImport:
    """A finder of modules that calls a function with a module after its import.

    Other finders find the module. Python may ask for it more than once before it is loaded, as a
    library does that asks whether another one is installed.
    """

    def __init__(self, callbacks: dict[str, Callable[[Any], None]]) -> None:
        self.callbacks = callbacks
        self.searched = ""  # the module that other finders are asked for

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.callbacks or name == self.searched:
            return None
        self.searched = name
        try:
            spec: Any = find_spec(name)
        finally:
            self.searched = ""
        if spec is None or spec.loader is None:
            return spec
        original_exec = spec.loader.exec_module

        def exec_and_call(module: ModuleType) -> None:
            original_exec(module)
            if callback := self.callbacks.pop(name, None):
                callback(module)

        spec.loader.exec_module = exec_and_call
        return spec


def call_after_import(name: str, callback: Callable[[Any], None]) -> None:
    """Call a function with a module: now if it is imported, else after its import."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport({name: callback}))
