"""Notebooks that tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def connect_by_files(folder: Path) -> Any:
    """The configuration of a notebook's client and kernel that meet in a folder.

    They would meet at ports, and one that was free when the client looked may be another test's
    when the kernel takes it.
    """
    traitlets = pytest.importorskip("traitlets.config")
    settings = {"transport": "ipc", "connection_file": str(folder / "kernel.json")}
    return traitlets.Config({"KernelManager": settings})
