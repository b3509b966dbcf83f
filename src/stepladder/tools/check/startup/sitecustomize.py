"""Run by each interpreter of a checked or pretending script at its start: waits until torch is
imported.

Python imports one `sitecustomize`, the first on its path, so the user's own is run from here.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType

TYPE_CHECKING = False  # typing would slow down every start
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100,PTH120  # pathlib would slow down every start


class TorchFinder:
    """Lets the others find torch, which they may do more than once, and patches it once it is
    loaded.
    """

    looks = False

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or cls.looks:
            return None
        cls.looks = True
        try:
            spec: Any = find_spec(name)
        finally:
            cls.looks = False
        if spec is None or spec.loader is None:
            return spec
        original_exec = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            sys.meta_path.remove(cls)
            original_exec(module)
            attach()

        spec.loader.exec_module = load_and_patch
        return spec


def attach() -> None:
    if "STEPLADDER_PRETEND_GPUS" in os.environ:
        ours("stepladder.tools.check.pretend").attach()
    if "STEPLADDER_CHECK" in os.environ:
        ours("stepladder.tools.check.probe.attach").attach()


def ours(name: str) -> Any:
    """Another interpreter than the launcher's may not have the package installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        root = HERE
        for _ in range(4):
            root = os.path.dirname(root)  # noqa: PTH120
        sys.path.append(root)
        return import_module(name)


def run_the_users() -> None:
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder != HERE])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if "STEPLADDER_CHECK" in os.environ:
    ours("stepladder.tools.check.probe.recorder").begin()
    ours("stepladder.tools.check.isolation.guard").attach()
sys.meta_path.insert(0, TorchFinder)
run_the_users()
