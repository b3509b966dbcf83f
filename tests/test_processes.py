"""A command forked from the warm process is what a new interpreter would be, as far as tests can see."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from processes import run, started, wait_until
from warm import SERVER, Forked

ABOUT = """
import atexit, json, os, signal, sys, threading
import __main__
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "name": __name__, "file": __main__.__file__,
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "session": os.getsid(0) == os.getpid(),
    "environment": dict(os.environ), "open": len(os.listdir("/proc/self/fd")), "input": sys.stdin.read(),
    "streams": [(s.line_buffering, s.encoding, s.errors, s.isatty()) for s in (sys.stdout, sys.stderr)],
    "threads": threading.active_count(), "me": type(__main__).__name__,
}))
atexit.register(print, "at exit")
threading.Timer(0.05, lambda: print("a thread that is waited for")).start()
"""
ENDS = {
    "well": "", "3": "sys.exit(3)", "a word": "sys.exit('a word')", "nothing": "sys.exit()",
    "an error": "raise ValueError('trouble')", "Ctrl-C": "raise KeyboardInterrupt",
    "killed": "os.kill(os.getpid(), 9)", "at once": "os._exit(5)", "terminated": "os.kill(os.getpid(), 15)",
}  # fmt: skip
PYTHON = (sys.executable,)
NEW = (sys.executable, "-W", "default")  # no file or module comes first, so it is a new interpreter


@pytest.mark.parametrize("end", ENDS)
def test_it_is_as_in_a_new_interpreter_and_ends_so(end: str, tmp_path: Path) -> None:
    (tmp_path / "about.py").write_text(ABOUT + ENDS[end])
    words = "about.py", "an argument"
    forked, new = (run(*words, cwd=tmp_path, env={"ASKED": "1"}, command=command) for command in (PYTHON, NEW))
    assert forked.returncode == new.returncode
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]
    (ours, *rest), (theirs, *same) = forked.stdout.splitlines() or ["{}"], new.stdout.splitlines() or ["{}"]
    assert json.loads(ours) == json.loads(theirs)
    assert rest == same


def test_what_is_read_at_the_start_of_python_needs_a_new_interpreter(tmp_path: Path) -> None:
    module = (sys.executable, "-m", "stepladder")
    assert SERVER.can_run(module, os.environ)
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "TORCH_LOGS", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD"):
        assert not SERVER.can_run(module, {**os.environ, name: "other"})
    assert not SERVER.can_run((sys.executable, "-c", "pass"), os.environ)
    assert not SERVER.can_run(("stepladder",), os.environ)


def test_it_is_signalled_and_waited_for_as_any_process(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import signal\nprint('here', flush=True)\nsignal.pause()\n")
    with started("waits.py", cwd=tmp_path, command=PYTHON) as running:
        assert isinstance(running.popen, Forked)
        wait_until(lambda: "here" in running.out.read_text())
        assert running.popen.poll() is None
        running.signal_group(signal.SIGTERM)  # a session of its own
        assert running.end() == -signal.SIGTERM
        assert running.popen.poll() == -signal.SIGTERM
