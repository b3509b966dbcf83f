"""What the environment of ranks must say so that they pretend, or are watched."""

from __future__ import annotations

import os
from pathlib import Path

from stepladder.tools.check.settings import PRETEND

STARTUP = Path(__file__).parent / "startup"


def with_startup(path: str) -> str:
    """PYTHONPATH with the folder of our `sitecustomize` first."""
    return os.pathsep.join(filter(None, [str(STARTUP), path]))


def pretending(gpus: int) -> dict[str, str]:
    return {"PYTHONPATH": with_startup(os.environ.get("PYTHONPATH", "")), PRETEND: str(gpus)}
