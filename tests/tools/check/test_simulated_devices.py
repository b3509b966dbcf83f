"""Simulated GPUs in the process of a script."""

from __future__ import annotations

import os
import subprocess
import sys

from stepladder.tools.check.startup_variables import simulated_gpu_variables

LOOKS_FIRST = """
import importlib.util
assert importlib.util.find_spec("torch") and importlib.util.find_spec("torch")
import torch
print(torch.cuda.device_count(), torch.zeros(2, device="cuda").device)
"""


def test_a_library_may_look_for_torch_before_it_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOKS_FIRST],
        env=os.environ | simulated_gpu_variables(3),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "3 cpu\n", done.stderr
