"""A rank is forked from a process that has imported torch: a script sees a new interpreter."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from processes import SECONDS, run
from stepladder.tools.check.check import Report, Request, check

LIKE_A_NEW_INTERPRETER = """
import inspect, os, sys, threading
from pathlib import Path
import hmac  # the script's own, though the server has imported another
import multiprocessing, torch

def work(rank, folder):
    assert os.getcwd() == folder and Path("train.py").exists()

if __name__ == "__main__":
    assert hmac.OWN == 1
    folder = os.getcwd()
    assert __file__ == os.path.join(folder, "train.py") and __spec__ is None, __file__
    assert sys.argv == ["train.py", "--steps", "2"], sys.argv
    assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path
    assert sys.modules["__main__"].work is work and "def work" in inspect.getsource(work)
    assert os.getsid(0) == os.getpid() and threading.current_thread() is threading.main_thread()
    assert os.environ["RANK"] == str(int(os.environ["PYTHONHASHSEED"]) - 1)
    process = multiprocessing.get_context("spawn").Process(target=work, args=(0, folder))
    process.start()
    process.join()
    assert process.exitcode == 0
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
"""
FAILS = """
import torch

def fail():
    raise KeyError("of the script")

fail()
"""


def check_in(folder: Path, text: str, *args: str) -> Report:
    (folder / "train.py").write_text(text)
    return check(Request(folder / "train.py", args))


@pytest.fixture(autouse=True)
def work_in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("has_own", [True, False])
def test_a_script_finds_what_a_new_interpreter_has(tmp_path: Path, has_own: bool) -> None:
    text = LIKE_A_NEW_INTERPRETER
    if has_own:
        (tmp_path / "hmac.py").write_text("OWN = compare_digest = 1\n")
    else:
        text = text.replace("import hmac", "import json").replace("hmac.OWN", "1")
    report = check_in(tmp_path, text, "--steps", "2")
    assert report.not_checked is None, report.not_checked
    assert report.run_summary == "2 ranks, 2 steps on each, to its end"


@pytest.mark.ranks
def test_the_traceback_of_a_script_has_its_own_frames_alone(tmp_path: Path) -> None:
    report = check_in(tmp_path, FAILS)
    assert report.not_checked
    lines = report.not_checked.output.splitlines()
    assert [line.split(", ")[1] for line in lines if "File" in line] == ["line 7", "line 5"]
    assert lines[-1] == "KeyError: 'of the script'"


@pytest.mark.slow
@pytest.mark.ranks
def test_what_a_script_starts_in_a_session_of_its_own_is_ended_with_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = (
            f"import socket; connection = socket.create_connection({server.getsockname()}); "
            "print(flush=True); connection.recv(1)"
        )
        (tmp_path / "train.py").write_text(
            "import subprocess, sys, torch\n"
            f"command = [sys.executable, '-c', {child!r}]\n"
            "child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)\n"
            "child.stdout.readline()\n"
            "torch.distributed.init_process_group('gloo')\n"
            "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
            "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
            "while True:\n"
            "    optimizer.zero_grad()\n"
            "    model(torch.ones(4, 2)).sum().backward()\n"
            "    optimizer.step()\n"
        )
        done = run("check", "--steps", 2, "train.py", cwd=tmp_path)
        server.settimeout(SECONDS)
        for _ in range(2):  # one child of each rank has connected: what is left is its end
            connection, _ = server.accept()
            with connection:
                connection.settimeout(SECONDS)
                assert connection.recv(1) == b"", done.stdout
