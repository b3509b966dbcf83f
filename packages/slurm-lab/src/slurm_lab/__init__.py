"""A real Slurm cluster on one Linux machine, for tests and for practice.

The names below are the public ones. Each is imported when it is used, so that `import slurm_lab`
costs nothing where no cluster is started, as in pytest, which loads this package's plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_lab.cluster import Cluster, start_cluster
    from slurm_lab.errors import LabError
    from slurm_lab.files import get_lab_folder
    from slurm_lab.lab import Lab
    from slurm_lab.layout import LAB_PARTITION, URGENT_PARTITION, Layout, Node
    from slurm_lab.prepare import LabSize, prepare_lab, validate_system

__version__ = "0.1.0"
__all__ = [
    "LAB_PARTITION",
    "URGENT_PARTITION",
    "Cluster",
    "Lab",
    "LabError",
    "LabSize",
    "Layout",
    "Node",
    "get_lab_folder",
    "prepare_lab",
    "start_cluster",
    "validate_system",
]

_MODULE_OF_NAME = {
    "LAB_PARTITION": "layout",
    "URGENT_PARTITION": "layout",
    "Cluster": "cluster",
    "Lab": "lab",
    "LabError": "errors",
    "LabSize": "prepare",
    "Layout": "layout",
    "Node": "layout",
    "get_lab_folder": "files",
    "prepare_lab": "prepare",
    "start_cluster": "cluster",
    "validate_system": "prepare",
}


def __getattr__(name: str) -> Any:
    """Import and return a public name.

    Args:
        name: The name.

    Returns:
        What it names.

    Raises:
        AttributeError: There is no such name.
    """
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"slurm_lab.{_MODULE_OF_NAME[name]}"), name)
