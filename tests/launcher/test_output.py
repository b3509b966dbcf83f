"""What ranks print: lines after their rank, and progress bars, in the bytes that tqdm writes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from processes import COMMAND, SECONDS, run, wait_until
from stepladder.launcher.local.output import LogFiles
from stepladder.launcher.local.screen import BAR_INTERVAL_S, CURSOR_UP, MAX_LINE_BYTES, Screen

BARS = """
import os, sys
for n in range(101):
    sys.stderr.write(f"\\r {n:3}%|{'#' * (n // 10):10}| {n}/100")
    sys.stderr.flush()
sys.stderr.write("\\n")
print("done", file=sys.stderr)
"""
PAD = b" " * 20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.ranks
def test_a_bar_is_one_line_of_a_log_after_its_rank(tmp_path: Path) -> None:
    (tmp_path / "bars.py").write_text(BARS)
    done = run("run", "--nproc", 2, "--log-dir", "logs", "bars.py", cwd=tmp_path)
    last = "100%|##########| 100/100"
    lines = [f"[rank {rank}] {text}" for rank in (0, 1) for text in (f" {last}", "done")]
    assert sorted(done.stderr.splitlines()) == lines
    assert (tmp_path / "logs" / "attempt-0.rank-1.log").read_text() == f" {last}\ndone\n"


@pytest.mark.ranks
def test_a_bar_rewrites_its_line_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "bars.py").write_text(
        BARS.replace("    sys.stderr.flush()", "    import time; time.sleep(0.01)")
    )
    ours, theirs = os.openpty()
    command = [*COMMAND, "run", "--nproc", "2", "bars.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while part := read(ours):
            shown += part
    os.close(ours)
    assert process.returncode == 0, shown
    drawn = [text.partition(b"\n")[0] for text in shown.split(b"\r")]
    assert len({text for text in drawn if text.startswith(b"[rank 0]") and b"/100" in text}) > 5, (
        shown
    )
    assert shown.count(b"\n") == 4, shown  # the last of each bar, and a line of each rank
    assert b"] [" not in shown


WRITES = """
import os, sys
for number in range(200):
    print("line", number)
    print("line", number, file=sys.stderr)
open("done-" + os.environ["RANK"], "w").close()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "streams", ["> /dev/full 2>&1", pytest.param("2> /dev/full", marks=pytest.mark.slow)]
)
def test_a_full_log_ends_no_script(streams: str, tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(WRITES)
    into = ("bash", "-c", f'exec "$@" {streams}', "bash", *COMMAND)
    done = run("run", "--nproc", 2, "writes.py", cwd=tmp_path, command=into)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]


@pytest.mark.ranks
def test_a_closed_terminal_ends_no_script_where_its_signal_is_ignored(tmp_path: Path) -> None:
    waits = (
        "open('begun-' + os.environ['RANK'], 'w').close()\nwhile not "
        "os.path.exists('closed'): pass\n"
    )
    (tmp_path / "writes.py").write_text(WRITES.replace("for number", f"{waits}for number"))
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        os.login_tty(theirs)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does

    command = [*COMMAND, "run", "--nproc", "2", "writes.py"]
    with subprocess.Popen(command, cwd=tmp_path, preexec_fn=take_terminal) as process:
        os.close(theirs)
        wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
        os.close(ours)
        (tmp_path / "closed").touch()
        assert process.wait(SECONDS) == 0
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux's word for a terminal that nobody has open any more
        return b""


def test_a_bar_is_shown_once_in_a_while_and_when_it_has_ended(clock: Clock) -> None:
    lines = Screen(clock)
    assert lines.feed(b"\r  0%|    |") == lines.take_due_bars(True) == []
    clock.now = BAR_INTERVAL_S
    assert lines.feed(b"\r 50%|##  |") == []
    assert (lines.take_due_bars(False), lines.live) == ([], b" 50%|##  |")
    clock.now *= 2
    assert lines.take_due_bars(True) == [b" 50%|##  |\n"]
    assert lines.feed(b"\r100%|####|\n") == []
    assert lines.feed(b"epoch 1\n") == [b"100%|####|\n", b"epoch 1\n"]


def test_an_inner_bar_that_is_cleared_leaves_nothing(clock: Clock) -> None:
    lines = Screen(clock)
    for part in (
        b"\r  0%|outer",
        b"\n",
        b"\r  0%|inner",
        CURSOR_UP,
        b"\n",
        b"\r 50%|inner",
        CURSOR_UP,
        b"\n\r" + PAD + b"\r" + CURSOR_UP,
    ):
        assert lines.feed(part) == []
    assert lines.feed(b"\r100%|outer\n") == []
    assert lines.end() == [b"100%|outer\n"]


def test_a_line_above_bars_is_shown_at_once(clock: Clock) -> None:
    """`tqdm.write` clears the bar, writes, and draws it again."""
    lines = Screen(clock)
    lines.feed(b"\r 10%|#")
    assert lines.feed(b"\r" + PAD + b"\rloss 0.5\n\r 10%|#") == [b"loss 0.5\n"]


def test_plain_lines_are_as_they_were(clock: Clock) -> None:
    lines = Screen(clock)
    assert lines.feed(b"half a") == []
    assert lines.feed(b" line\r\n\nnext") == [b"half a line\n", b"\n"]
    assert lines.feed(b"\x1b[31mred\x1b[0m\n") == [b"next\x1b[31mred\x1b[0m\n"]
    assert lines.feed(b"x" * MAX_LINE_BYTES + b"\n") == [b"x" * MAX_LINE_BYTES + b"\n"]
    assert lines.feed(b"y" * MAX_LINE_BYTES) == []
    assert lines.feed(b"z") == [b"y" * MAX_LINE_BYTES + b"z\n"]
    assert lines.feed(b"no end") == []
    assert lines.end() == [b"no end\n"] and lines.end() == []


def printed(output: LogFiles, text: bytes) -> None:
    """Print it as the second rank, and read it."""
    with output.open_pipes("attempt-0.rank-1", 1, 1) as (pipe, _):
        os.write(pipe.number, text)
    output.drain()


def test_what_ranks_print_waits_until_the_run_directory_is_theirs(tmp_path: Path) -> None:
    output = LogFiles(tmp_path / "run" / "log")
    log = tmp_path / "run/log/attempt-0.rank-1.log"
    (tmp_path / "run").mkdir()
    printed(output, b"early\r\n")
    assert not log.parent.exists()  # it may be another run's until then
    output.begin()
    assert log.read_bytes() == b"early\r\n"
    printed(output, b"half a li")
    assert log.read_bytes() == b"early\r\nhalf a li"
    output.close()


@pytest.mark.parametrize("refused", [False, True])
def test_what_ranks_print_is_kept_where_they_fail_and_not_where_they_are_refused(
    tmp_path: Path, refused: bool
) -> None:
    output = LogFiles(tmp_path / "log")
    printed(output, b"early")
    if refused:
        output.discard()
    output.close()
    assert [path.name for path in tmp_path.rglob("*.log")] == (
        [] if refused else ["attempt-0.rank-1.log"]
    )


def test_a_log_that_cannot_be_written_ends_no_rank_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = LogFiles(tmp_path / "log")
    output.begin()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (0, before[1])
    )  # a write fails then, as on a full disk
    try:
        for _ in range(2):
            printed(output, b"line\n")
        output.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    expected = (
        f"stepladder: the ranks' output is no longer logged: {tmp_path / 'log'}: File too large\n"
    )
    assert capsys.readouterr().err == expected
