"""torch's libraries are loaded beside the imports that need none of them."""

import subprocess
import sys
from pathlib import Path

import torch

from stepladder.launcher.local.group_spec import LIBRARIES, GroupSpec
from stepladder.launcher.run import OF_SCRIPTS

LOADED = f"""
import sys, threading
from pathlib import Path
import {LIBRARIES}
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print("torch" in sys.modules, "libtorch_cpu.so" in Path("/proc/self/maps").read_text())
import torch
print(torch.ones(2).sum().item(), threading.active_count())
"""


def test_a_thread_loads_them_before_torch_is_imported_and_has_then_ended() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    of_the_cpu = not list(Path(torch.__file__).with_name("lib").glob("libc10_*.so"))
    assert done.stdout.splitlines() == [f"False {of_the_cpu}", "2.0 1"]


def test_they_come_first_so_that_the_other_imports_cost_no_time() -> None:
    assert GroupSpec().preloaded[0] == OF_SCRIPTS[0] == LIBRARIES
