"""Memory that a step frees is kept for the next one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = """
import resource
from stepladder.core.heap import keep_freed_memory
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
if {keeps}: keep_freed_memory()
for step in range(20):
    if step == 10: before = faults()
    gradients = [bytearray(b"1") * (3 << 20) for _ in range(8)]
    del gradients
print(faults() - before)
"""


def faults(keeps: bool, **env: str) -> int:
    """Pages that ten steps ask the kernel for."""
    code = STEPS.format(keeps=keeps)
    env = os.environ | env
    return int(
        subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, check=True
        ).stdout
    )


@pytest.mark.skipif(sys.platform != "linux", reason="another malloc")
def test_a_step_takes_its_memory_from_the_one_before() -> None:
    fresh = faults(keeps=False)
    assert fresh > 10 * 8 * 3 * 2**20 // 2**16, "malloc does it by itself now"
    assert faults(keeps=True) < fresh / 10


def test_who_has_set_malloc_keeps_the_setting() -> None:
    assert (
        faults(keeps=True, MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 1000
    )
