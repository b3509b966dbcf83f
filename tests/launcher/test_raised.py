"""An exception of the job's, in any place and however it was started, ends the command with its
exit code.

A run that hangs fails by its time-out. Whose exception it was is shown: "planted" is its text.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import COMMAND, JOBS, refused, run
from stepladder.core.errors import InputError, get_text
from stepladder.data.workers import PackedError, call_in_rank, call_in_worker
from stepladder.rank.error_record import ErrorKind, RankError, record_step

RAISES = JOBS / "raises.py"
SECONDS_AT_MOST = 60  # on a machine with other work; ten on one without
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "alone": (COMMAND, ()),
    "2 ranks": (COMMAND, ("--nproc", "2")),
    "--nodes 1": (COMMAND, ("--nodes", "1")),
    "torchrun": ((*TORCHRUN, "-m", "stepladder"), ()),
}
# Python prints what __del__, a thread or a function of atexit has raised, and goes on. So does the
# run.
ENDS_ALL = "build", "dataset", "collate", "loss", "metrics", "derived", "schedule"
GOES_ON = "thread", "del", "atexit"
QUICK = {
    ("alone", raised_in) for raised_in in ("build", "dataset", "loss", "metrics", "atexit")
} | {("2 ranks", "dataset"), ("--nodes 1", "dataset")}


def table() -> list[Any]:
    return [
        pytest.param(
            way,
            raised_in,
            marks=() if (way, raised_in) in QUICK else pytest.mark.slow,
            id=f"{raised_in}, {way}",
        )
        for way in WAYS
        for raised_in in (*ENDS_ALL, *GOES_ON)
    ]


def raises(way: str, raised_in: str, folder: Path, how: str = "error", **more: Any) -> Any:
    command, flags = WAYS[way]
    env = {"PLACE": raised_in, "HOW": how}
    return run(
        "train",
        RAISES,
        *flags,
        cwd=folder,
        env=env,
        command=command,
        timeout=SECONDS_AT_MOST,
        **more,
    )


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "raised_in"), table())
def test_an_exception_ends_the_command_and_is_shown(
    way: str, raised_in: str, tmp_path: Path
) -> None:
    done = raises(way, raised_in, tmp_path)
    assert done.returncode == (1 if raised_in in ENDS_ALL else 0), done.stderr
    # Ranks of several processes call no function of atexit. Python prints an exception of a thread
    # in pieces, between which those of another rank may stand.
    assert ("planted" in done.stderr) is (raised_in != "atexit" or way in ("alone", "--nodes 1")), (
        done.stderr
    )
    if raised_in in ENDS_ALL and way == "2 ranks":
        assert "not restarted" in done.stderr or "a bug, not a fault" in done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "alone" else pytest.mark.slow) for way in WAYS]
)
@pytest.mark.parametrize("how", ["kill", "leave"])
def test_a_worker_that_ends_is_named(way: str, how: str, tmp_path: Path) -> None:
    done = raises(way, "dataset", tmp_path, how)
    assert done.returncode == 1, done.stderr
    # torch knows no exit code of a worker that ends before torch waits for signals of it.
    ends = "exited unexpectedly|with exit code 5|killed by signal"
    assert re.search(rf"DataLoader worker \(pid.*({ends})", done.stderr), done.stderr


# -- one process -----------------------------------------------------------------------------------

QUICK_ALONE = (
    "sys.exit(0) is not the end of a run",
    "a reader that has gone",
    "a thread that waits for ever",
)
ALONE: dict[str, tuple[str, str, int, str]] = {  # place, how, exit code, what is shown
    "a worker's sys.exit(0) is not the end of a run": (
        "dataset",
        "exit 0",
        1,
        "called sys.exit(0) in its training",
    ),
    "sys.exit(0) is not the end of a run": ("loss", "exit 0", 1, "called sys.exit(0)"),
    "sys.exit(75) has saved nothing": ("loss", "exit 75", 1, "called sys.exit(75)"),
    "sys.exit(3)": ("loss", "exit 3", 1, "stepladder: the job has ended itself, by sys.exit(3)"),
    "a reader that has gone": ("loss", "pipe", 1, "the job has raised BrokenPipeError: planted"),
    "an exception of no Exception": ("loss", "bare", 1, "Bare: planted"),
    "a worker's class that cannot travel": ("dataset", "local", 1, "Local: planted"),
    "a thread that waits for ever": (
        "waits",
        "error",
        1,
        "still waits for the thread of-the-job: it is ended",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK_ALONE else pytest.mark.slow) for case in ALONE],
)
def test_it_is_a_failure(case: str, tmp_path: Path) -> None:
    raised_in, how, code, shown = ALONE[case]
    done = raises("alone", raised_in, tmp_path, how)
    assert done.returncode == code, done.stderr
    assert shown in done.stderr


@pytest.mark.ranks
def test_bad_input_that_a_worker_finds_is_one_line(tmp_path: Path) -> None:
    refused(raises("alone", "dataset", tmp_path, "input"), "planted")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("how", ["mute", "frozen", "step", "wants", "exit 0", "stop"])
def test_a_rank_says_what_it_has_raised(how: str, tmp_path: Path) -> None:
    done = raises("2 ranks", "loss", tmp_path, how)
    assert done.returncode == 1, done.stderr
    assert "Traceback" in done.stderr and "raises.py" in done.stderr


# -- without a process -----------------------------------------------------------------------------


class Wants(Exception):
    """pickle calls the class with its one argument, which is too few."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def local() -> BaseException:
    class Local(Exception):
        pass

    return Local("planted")


def raising(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (KeyError("planted"), KeyError, "'planted'"),
        (MemoryError("planted"), MemoryError, "planted"),
        (SystemExit(3), SystemExit, "3"),
        (InputError("planted", "type it"), InputError, "planted. HINT: type it"),
        (Mute(), Mute, "<exception str() failed>"),
        (Wants(1, 2), RuntimeError, "Wants: 1 and 2"),
        (local(), RuntimeError, "Local: planted"),
        (KeyboardInterrupt("planted"), RuntimeError, "KeyboardInterrupt: planted"),
        (StopIteration("planted"), RuntimeError, "StopIteration: planted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_worker_raises_is_raised_in_its_rank(
    error: BaseException, kind: type, text: str
) -> None:
    failure = pickle.loads(pickle.dumps(call_in_worker(raising(error))))
    assert isinstance(failure, PackedError)
    with pytest.raises(kind) as raised:
        failure.reraise()
    assert get_text(raised.value) == text
    if kind is not InputError:  # which is one line
        assert "in call\n    raise error" in str(raised.value.__cause__)


def test_a_dataset_without_workers_cannot_end_the_data() -> None:
    with pytest.raises(RuntimeError, match="has raised StopIteration"):
        call_in_rank(raising(StopIteration()))


def test_a_rank_can_tell_of_every_exception(tmp_path: Path) -> None:
    """With a text that raises, that cannot be changed, or with an attribute `step` of its own."""
    odd = RuntimeError("planted")
    odd.step = object()  # type: ignore[attr-defined]
    cases = [
        (Mute(), "<exception str() failed>", 4),
        (Frozen("planted"), "planted", None),
        (odd, "planted", None),
    ]
    for error, text, step in cases:
        record_step(error, 4)
        record = tmp_path / f"{type(error).__name__}.json"
        record.touch()
        RankError.from_error(1, error).write(record)
        read = RankError.read(record, 1)
        assert read is not None
        assert (read.text, read.step, read.kind) == (text, step, ErrorKind.OTHER)
