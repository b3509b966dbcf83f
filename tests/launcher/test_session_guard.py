"""The guard of ranks' sessions: what a rank has started ends with the launcher."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys

from processes import SECONDS
from stepladder.launcher.local.session_guard import _guard_sessions


def test_a_launcher_that_ends_before_its_guard_begins_leaves_nothing() -> None:
    """On a busy machine the guard may begin late."""
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait(SECONDS)
    started = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    context = multiprocessing.get_context("spawn")
    guard_end, pipe = context.Pipe(duplex=False)
    pipe.send_bytes(str(started.pid).encode())
    guard = context.Process(target=_guard_sessions, args=(guard_end, launcher.pid))
    try:
        guard.start()
        assert started.wait(SECONDS) == -signal.SIGKILL
        guard.join(SECONDS)
    finally:
        pipe.close()
        started.kill()
        guard.kill()
