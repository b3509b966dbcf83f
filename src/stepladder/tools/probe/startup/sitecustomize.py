"""The start of each interpreter of an observed script: attach what the environment asks for.

Python imports only one `sitecustomize`, the first on its path, so the user's own is run from here.
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
# Where a checkout has stepladder_exchange, seen from the root; installed, it is in the root.
EXCHANGE_IN_CHECKOUT = ("..", "packages", "stepladder-exchange", "src")
# The module whose `attach` is called, by the environment variable that asks for it.
ATTACHED_AT_START = {"STEPLADDER_CHECK": "stepladder.tools.check.probe.at_start"}
ATTACHED_AFTER_TORCH = {
    "STEPLADDER_PRETEND_GPUS": "stepladder.tools.check.simulated_gpu.patches",
    "STEPLADDER_CHECK": "stepladder.tools.check.probe.attach",
    "STEPLADDER_PARITY": "stepladder.tools.parity.value_probe",
    "STEPLADDER_OBSERVER": "stepladder.tools.probe.attach",
}


class _TorchFinder:
    """A finder of modules that attaches the listeners after the import of torch.

    Other finders find torch. Python may ask for it more than once before it is loaded.
    """

    def __init__(self) -> None:
        self.is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
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

        def exec_and_attach(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            original_exec(module)
            attach(ATTACHED_AFTER_TORCH)

        spec.loader.exec_module = exec_and_attach
        return spec


def attach(modules: dict[str, str]) -> None:
    """Call `attach` of each module that a variable of the environment asks for."""
    for variable, name in modules.items():
        if variable in os.environ:
            _import_own(name).attach()


def _import_own(name: str) -> Any:
    """Import a module of Stepladder, which need not be installed for this interpreter."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        root = SITECUSTOMIZE_FOLDER
        for _ in range(FOLDERS_TO_PACKAGE_ROOT):
            root = os.path.dirname(root)  # noqa: PTH120
        sys.path += [root, os.path.join(root, *EXCHANGE_IN_CHECKOUT)]  # noqa: PTH118
        return import_module(name)


def _run_sitecustomize_of_user() -> None:
    folders = [folder for folder in sys.path if folder != SITECUSTOMIZE_FOLDER]
    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    attach(ATTACHED_AT_START)
    sys.meta_path.insert(0, _TorchFinder())
    _run_sitecustomize_of_user()
