"""Environment variables with which an interpreter loads the probe, or simulates GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from stepladder.tools.check.probe_settings import SIMULATED_GPUS

STARTUP_FOLDER = Path(__file__).parent / "startup"


def prepend_startup_folder(python_path: str) -> str:
    """Return a PYTHONPATH on which the folder of our `sitecustomize` comes first."""
    if not python_path:
        return str(STARTUP_FOLDER)
    return f"{STARTUP_FOLDER}{os.pathsep}{python_path}"


def simulated_gpu_variables(gpus: int) -> dict[str, str]:
    """Return the variables of a process that simulates this number of GPUs."""
    return {
        "PYTHONPATH": prepend_startup_folder(os.environ.get("PYTHONPATH", "")),
        SIMULATED_GPUS: str(gpus),
    }
