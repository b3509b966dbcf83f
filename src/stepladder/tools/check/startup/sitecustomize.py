"""The start of each interpreter of a checked script: patches torch after its import.

The same is done for a script with simulated GPUs. Python imports one `sitecustomize`, the first on
its path, so the user's own is run from here.
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

SITECUSTOMIZE_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100,PTH120  # pathlib would slow down every start
FOLDERS_TO_PACKAGE_ROOT = 4


class TorchFinder:
    """A finder of modules that patches torch after its import.

    Other finders find torch. Python may ask for it more than once before it is loaded.
    """

    def __init__(self) -> None:
        self.is_searching = False

    def find_spec(
        self,
        name: str,
        path: Any = None,
        target: Any = None,
    ) -> Any:
        if name != "torch" or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec: Any = find_spec(name)
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None:
            return spec
        original_exec = spec.loader.exec_module

        def exec_and_patch(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            original_exec(module)
            attach()

        spec.loader.exec_module = exec_and_patch
        return spec


def attach() -> None:
    if "STEPLADDER_PRETEND_GPUS" in os.environ:
        import_own("stepladder.tools.check.simulated_devices").attach()
    if "STEPLADDER_CHECK" in os.environ:
        import_own("stepladder.tools.check.probe.attach").attach()


def import_own(name: str) -> Any:
    """Import a module of Stepladder, which need not be installed for this interpreter."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        root = SITECUSTOMIZE_FOLDER
        for _ in range(FOLDERS_TO_PACKAGE_ROOT):
            root = os.path.dirname(root)  # noqa: PTH120
        sys.path.append(root)
        return import_module(name)


def run_sitecustomize_of_user() -> None:
    folders = [folder for folder in sys.path if folder != SITECUSTOMIZE_FOLDER]
    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "STEPLADDER_CHECK" in os.environ:
    import_own("stepladder.tools.check.probe.probe_log").start_log()
    import_own("stepladder.tools.check.isolation.guard").attach()
sys.meta_path.insert(0, TorchFinder())
run_sitecustomize_of_user()
