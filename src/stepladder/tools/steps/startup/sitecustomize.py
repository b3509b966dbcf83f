"""Wait until torch's optimizers are imported, then attach the observer of their steps.

Each interpreter of a script's ranks runs this at its start. Python imports only one
`sitecustomize`, the first on its path, so this one runs the user's own.
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
MODULE = "torch.optim.optimizer"


class OptimizerFinder:
    """Attaches the observer to torch's optimizers once the other finders have loaded them."""

    @classmethod
    def find_spec(
        cls,
        name: str,
        path: Any = None,
        target: Any = None,
    ) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(cls)
        spec: Any = find_spec(name)
        load = spec.loader.exec_module

        def load_and_attach(module: ModuleType) -> None:
            load(module)
            import_hook().attach(module)

        spec.loader.exec_module = load_and_attach
        return spec


def import_hook() -> Any:
    """Import the hook; an interpreter other than the launcher's may lack the package."""
    try:
        return import_module("stepladder.tools.steps.hook")
    except ModuleNotFoundError:
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(HERE)))))  # noqa: PTH120
        return import_module("stepladder.tools.steps.hook")


def run_user_sitecustomize() -> None:
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder != HERE])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, OptimizerFinder)
run_user_sitecustomize()
