"""A command forked from the warm process is what a new interpreter would be, as far as tests can
see.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
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
FEW = ("an error",)  # a new interpreter imports torch anew: a second each
PYTHON = (sys.executable,)
NEW = (sys.executable, "-W", "default")  # no file or module comes first, so it is a new interpreter


@pytest.mark.parametrize(
    "end", [end if end in FEW else pytest.param(end, marks=pytest.mark.slow) for end in ENDS]
)
def test_it_is_as_in_a_new_interpreter_and_ends_so(end: str, tmp_path: Path) -> None:
    (tmp_path / "about.py").write_text(ABOUT + ENDS[end])
    arguments = "about.py", "an argument"
    forked, new = (
        run(*arguments, cwd=tmp_path, env={"ASKED": "1"}, command=command)
        for command in (PYTHON, NEW)
    )
    assert forked.returncode == new.returncode
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]
    (ours, *our_others), (theirs, *same) = (
        forked.stdout.splitlines() or ["{}"],
        new.stdout.splitlines() or ["{}"],
    )
    assert json.loads(ours) == json.loads(theirs)
    assert our_others == same


def test_what_is_read_at_the_start_of_python_needs_a_new_interpreter(tmp_path: Path) -> None:
    module = (sys.executable, "-m", "stepladder")
    assert SERVER.can_run(module, os.environ)
    assert SERVER.can_run(module, {**os.environ, "OMP_NUM_THREADS": "2"}), (
        "torch is told in the fork"
    )
    for name in (
        "PYTHONPATH",
        "OMP_NUM_THREADS",
        "TORCH_LOGS",
        "CUDA_VISIBLE_DEVICES",
        "LD_PRELOAD",
    ):
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


SHELL = {  # what a shell may ask of a command, and what it says then
    "input and end": ("echo word | python reads.py || echo $?", "word\n3\n"),
    "its own interpreter": ("python -c 'print(1)'", "1\n"),
    "a module": ("stepladder --version | cut -d, -f1", "stepladder\n"),
    "end by a signal": ("python ends.py; echo $?", f"{128 + signal.SIGTERM}\n"),
    "a signal": (
        "python waits.py > pid & until [ -s pid ] || ! kill -0 $!; do sleep 0.01; done; kill $!; wait $!; echo $?",
        "7\n",
    ),
}
SCRIPTS = {
    "reads": "import sys\nprint(input())\nsys.exit(3)\n",
    "ends": "import os\nos.kill(os.getpid(), 15)\n",
    "waits": "import os, signal, sys\nsignal.signal(15, lambda *_: sys.exit(7))\n"
    "print(os.getpid(), flush=True)\nsignal.pause()\n",
}


@pytest.fixture
def in_a_shell(tmp_path: Path) -> dict[str, Any]:
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(SERVER.commands()), os.environ["PATH"]])
    return {"cwd": tmp_path, "env": {"PATH": path}, "command": ("bash", "-c")}


@pytest.mark.parametrize("shell_command", SHELL.values(), ids=SHELL)
def test_a_shell_s_command_is_as_any(
    shell_command: tuple[str, str], in_a_shell: dict[str, Any]
) -> None:
    done = run(shell_command[0], **in_a_shell)
    assert done.stdout == shell_command[1], done.stderr


def test_a_shell_s_command_that_is_killed_is_gone(in_a_shell: dict[str, Any]) -> None:
    done = run(
        "python waits.py > pid & until [ -s pid ] || ! kill -0 $!; do sleep 0.01; done; kill -9 $!; cat pid",
        **in_a_shell,
    )
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)))


@pytest.mark.slow
def test_a_process_that_another_spawns_is_new(tmp_path: Path) -> None:
    """Its random numbers, threads and signals are not those of the one that has started it."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    texts = [run("spawns.py", cwd=tmp_path, command=command).stdout for command in (PYTHON, NEW)]
    assert texts[0] == texts[1] != ""


SPAWNS = """
import multiprocessing, os, signal, sys, torch

def about(things):
    print(torch.rand(1).item() == things["random"], os.getppid() == things["parent"], sys.argv)
    print(__name__, signal.getsignal(signal.SIGTERM), len(os.listdir("/proc/self/fd")), things["a list"])

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)
    torch.manual_seed(5)
    number = torch.rand(1).item()
    torch.manual_seed(5)
    with multiprocessing.get_context("spawn").Manager() as manager:
        shared = {"a list": list(manager.list([1, 2])), "parent": os.getpid(), "random": number}
        process = multiprocessing.get_context("spawn").Process(target=about, args=(shared,))
        process.start()
        process.join()
    print(process.exitcode)
"""
