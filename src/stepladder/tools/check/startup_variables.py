"""Environment variables with which an interpreter simulates GPUs."""

from __future__ import annotations

import os

from stepladder.tools.check.probe_settings import SIMULATED_GPUS
from stepladder.tools.probe.attach import prepend_startup_folder


def simulated_gpu_variables(gpus: int) -> dict[str, str]:
    """Return the variables of a process that simulates this number of GPUs."""
    return {
        "PYTHONPATH": prepend_startup_folder(os.environ.get("PYTHONPATH", "")),
        SIMULATED_GPUS: str(gpus),
    }
