"""The run directory: one writer at a time, attempts that are told apart, metrics cut to where a run
goes on.
"""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepladder.core.errors import InputError
from stepladder.rank import fd_store
from stepladder.storage.lock import LOCK_FILE, is_locked
from stepladder.storage.run_config import find_shuffle
from stepladder.storage.run_dir import RunDir, move_run_dir_aside
from stepladder.storage.run_dir_access import translate_storage_errors
from stepladder.storage.run_files import (
    CONFIG_FILE,
    METRICS_FILE,
    RESULT_FILE,
    finite_or_none,
    list_attempts,
    list_snapshots,
)

HOLDER = """
import sys
from pathlib import Path
from stepladder.storage.run_dir import RunDir
print(RunDir(Path(sys.argv[1]), 30).attempt, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


@contextmanager
def opened(path: Path, lock_wait: float = 0.0) -> Iterator[RunDir]:
    run_dir = RunDir(path, lock_wait)
    try:
        yield run_dir
    finally:
        run_dir.close()


@contextmanager
def held_by_another(path: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A live process that holds the directory until its stdin closes, or it is killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    with holder:
        assert holder.stdout and holder.stdout.readline(), "the holder did not get the directory"
        try:
            yield holder
        finally:
            if holder.poll() is None:
                holder.kill()


@pytest.mark.parametrize("lock_wait", [0.0, 0.3])
def test_a_directory_in_use_is_refused_naming_process_host_and_job(
    path: Path, lock_wait: float
) -> None:
    with held_by_another(path, SLURM_JOB_ID="4711") as holder, pytest.raises(InputError) as caught:
        RunDir(path, lock_wait)
    assert (
        f"in use by process {holder.pid} on {socket.gethostname()}, job 4711"
        in caught.value.problem
    )
    assert "--run-dir" in caught.value.hint


def test_a_directory_is_free_after_its_writer_was_killed(path: Path) -> None:
    with held_by_another(path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with opened(path) as run_dir:
            assert run_dir.attempt == 2


def test_a_second_run_waits_for_the_first_ones_end(path: Path) -> None:
    with held_by_another(path) as holder:
        assert holder.stdin
        holder.stdin.close()
        with opened(path, lock_wait=60) as run_dir:
            assert run_dir.attempt == 2


def test_a_run_that_was_refused_leaves_the_owner_untouched(path: Path) -> None:
    with opened(path) as owner:
        with pytest.raises(InputError, match=f"process {os.getpid()} "):
            RunDir(path, lock_wait=0)
        owner.validate_ownership()


@pytest.mark.parametrize("failed", [False, True])
def test_a_closed_directory_is_free_though_a_forked_child_lives_on(
    path: Path, failed: bool
) -> None:
    """DataLoader workers inherit the open lock file."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    run_dir = RunDir(path, 0)
    child = fork.Process(target=theirs.recv)
    child.start()
    run_dir.close(failed)
    try:
        with opened(path) as second:
            assert second.attempt == 2
    finally:
        ours.send("end")
        child.join()


@pytest.fixture
def launcher() -> Iterator[None]:
    """This process is one that a launcher has started."""
    mailbox = fd_store.make_fd_store()
    fd_store.set_fd_store(mailbox)
    yield
    fd_store.set_fd_store(None)
    for end in mailbox:
        end.close()


@pytest.mark.usefixtures("launcher")
def test_a_failed_attempt_keeps_its_directory_for_the_next_one_of_its_launcher(path: Path) -> None:
    RunDir(path, 0).close(failed=True)
    assert is_locked(path)
    with opened(path) as run_dir:
        assert run_dir.attempt == 2
    assert not is_locked(path)


def test_attempt_numbers_grow_with_each_opening(path: Path) -> None:
    attempts = []
    for _ in range(3):
        with opened(path) as run_dir:
            attempts.append(run_dir.attempt)
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize("lock_text", [None, "", '{"attempt": 3', '{"attempt": 3}'])
def test_an_attempt_comes_after_those_in_the_ledger_whatever_became_of_the_lock_file(
    path: Path, lock_text: str | None
) -> None:
    ledger = path / "ledger"
    ledger.mkdir(parents=True)
    for name in ("attempt-0002.rank-0.jsonl", "attempt-0007.rank-1.jsonl"):
        (ledger / name).touch()
    if lock_text is not None:
        (path / LOCK_FILE).write_text(lock_text)
    with opened(path) as run_dir:
        assert run_dir.attempt == 8


def test_attempts_of_more_than_four_digits_count_and_other_files_do_not(path: Path) -> None:
    assert list_attempts(path) == set()
    (path / "ledger").mkdir(parents=True)
    for name in (
        "attempt-9999.rank-0.jsonl",
        "attempt-10000.rank-12.jsonl",
        "attempt-copy.jsonl",
        "notes",
    ):
        (path / "ledger" / name).touch()
    assert list_attempts(path) == {9999, 10000}


def test_a_heartbeat_says_who_writes_here_and_when(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as run_dir:
        monkeypatch.setattr("time.time", lambda: 1790000000.26)
        run_dir.heartbeat()
        owner = json.loads((path / LOCK_FILE).read_text())
    assert (owner["host"], owner["pid"], owner["attempt"]) == (socket.gethostname(), os.getpid(), 1)
    assert owner["heartbeat"] == 1790000000.3


WRITES = [
    RunDir.validate_ownership, RunDir.heartbeat,
    lambda run: run.write_json(RESULT_FILE, {"steps": 1}),
    lambda run: run.truncate_metrics(0, 4),
    lambda run: run.truncate_recent_metrics(0, 4),
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_replaced_after_a_take_over(path: Path, write: Callable[[RunDir], None]) -> None:
    with opened(path) as run_dir:
        (path / METRICS_FILE).write_text(step_line(1))
        write(run_dir)
        (path / METRICS_FILE).write_text(step_line(1))
        (path / LOCK_FILE).write_text(
            '{"attempt": 1, "pid": 7, "host": "other", "token": "another"}'
        )
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        with pytest.raises(
            InputError, match=r"lost run directory .* to process 7 on other; nothing was written"
        ):
            write(run_dir)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize(
    "owner", ["[]", "3", "null", '{"attempt": "x"}', '{"attempt": null}', '{"pid": {}}']
)
def test_a_lock_file_that_says_nonsense_is_an_ended_runs(path: Path, owner: str) -> None:
    path.mkdir()
    (path / LOCK_FILE).write_text(owner)
    with opened(path) as run_dir:
        assert run_dir.attempt == 1


def test_a_run_directory_is_made_with_all_above_it(tmp_path: Path) -> None:
    with opened(tmp_path / "runs" / "of today" / "first") as run_dir:
        assert run_dir.path.is_dir()


def test_a_group_that_shares_its_runs_may_take_turns(path: Path) -> None:
    """The umask decides who may write, because the next writer may be another user."""
    before = os.umask(0o002)
    try:
        with opened(path) as run_dir:
            run_dir.write_json(RESULT_FILE, {"steps": 1})
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {
        LOCK_FILE: "0o664", RESULT_FILE: "0o664",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_place_that_cannot_be_a_directory_is_an_input_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file.* cannot be written"):
        RunDir(tmp_path / name, 0)


# -- stored values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CONFIG_FILE, RESULT_FILE])
def test_what_is_stored_comes_back_and_what_is_not_is_none(path: Path, name: str) -> None:
    with opened(path) as run_dir:
        assert run_dir.read_json(name) is None
        for value in (1, 2):
            run_dir.write_json(name, {"steps": value, "definition": {}})
        assert run_dir.read_json(name) == {"steps": 2, "definition": {}}
    assert {file.name for file in path.iterdir()} == {LOCK_FILE, name}


@pytest.mark.parametrize("name", [CONFIG_FILE, RESULT_FILE])
def test_what_an_earlier_version_stored_is_read_and_of_a_later_one_refused(
    path: Path, name: str
) -> None:
    with opened(path) as run_dir:
        for schema in (0, 1):
            run_dir.write_json(name, {"schema": schema, "steps": 3, "definition": {}})
            assert run_dir.read_json(name) == {"schema": schema, "steps": 3, "definition": {}}
        run_dir.write_json(name, {"schema": 2})
        with pytest.raises(
            InputError, match=rf"{name} was written by a newer .* is 2, this one knows 1\. HINT"
        ):
            run_dir.read_json(name)


@pytest.mark.parametrize("name", [CONFIG_FILE, RESULT_FILE, METRICS_FILE])
def test_what_a_killed_run_was_writing_goes_when_the_next_one_comes(path: Path, name: str) -> None:
    path.mkdir()
    (path / name).write_text("whole")
    (path / f"{name}.0123abcd.tmp").write_text("ha")
    (path / "a person's.tmp").touch()
    with opened(path):
        assert {file.name for file in path.iterdir()} == {LOCK_FILE, name, "a person's.tmp"}


@pytest.mark.parametrize(
    ("value", "stored"),
    [(0.5, 0.5), (-1e308, -1e308), (math.inf, None), (-math.inf, None), (math.nan, None)],
)
def test_what_json_has_no_word_for_is_stored_as_null(value: float, stored: float | None) -> None:
    assert finite_or_none(value) == stored


def test_snapshots_are_whole_folders_and_come_by_their_step(tmp_path: Path) -> None:
    for name in (
        "step_100000000",
        "step_00000009",
        "step_00000010",
        "step_00000011.damaged",
        "notes",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000012").write_text("a file")
    assert [path.name for path in list_snapshots(tmp_path)] == [
        "step_00000009",
        "step_00000010",
        "step_100000000",
    ]
    assert list_snapshots(tmp_path / "not there") == []


@pytest.mark.parametrize("text", ['{"steps": ', "", "{}", "[]", "3"])
@pytest.mark.parametrize("name", [CONFIG_FILE, RESULT_FILE])
def test_what_is_stored_and_damaged_is_named(path: Path, name: str, text: str) -> None:
    with opened(path) as run_dir:
        (path / name).write_text(text)
        with pytest.raises(InputError, match=rf"{name} is damaged"):
            run_dir.read_json(name)


def test_a_full_disk_is_an_input_error_that_names_the_place(path: Path) -> None:
    with (
        pytest.raises(InputError, match=rf"{path} cannot be written: No space left"),
        translate_storage_errors(path),
    ):
        Path("/dev/full").write_text("more than fits")
    with pytest.raises(PermissionError), translate_storage_errors(path):
        raise PermissionError(errno.EACCES, "a bug is not a full disk")


# -- metrics ---------------------------------------------------------------------------------------


def step_line(step: int) -> str:
    return f'{{"step": {step}, "epoch": 0, "loss": 0.5, "lr": 0.1}}\n'


def evaluation_line(step: int) -> str:
    return f'{{"step": {step}, "epoch": 0, "test_accuracy": 0.5}}\n'


FIVE_STEPS = [*map(step_line, range(1, 5)), evaluation_line(4), step_line(5)]


def cut(path: Path, text: str, step: int) -> list[str]:
    """Lines that are left of a metrics.jsonl of epochs of four steps."""
    with opened(path) as run_dir:
        (path / METRICS_FILE).write_text(text)
        run_dir.truncate_metrics(step, steps_per_epoch=4)
    assert {file.name for file in path.iterdir()} == {LOCK_FILE, METRICS_FILE}
    return (path / METRICS_FILE).read_text().splitlines(keepends=True)


@pytest.mark.parametrize(("step", "lines"), [(0, 0), (1, 1), (3, 3), (4, 5), (5, 6), (9, 6)])
def test_metrics_are_cut_after_the_step_where_the_run_goes_on(
    path: Path, step: int, lines: int
) -> None:
    assert cut(path, "".join(FIVE_STEPS), step) == FIVE_STEPS[:lines]


def test_what_follows_a_later_line_is_forgotten_whatever_step_it_says(path: Path) -> None:
    """What is left is a beginning of what was written, or a line might stand there twice."""
    assert (
        cut(path, "".join([*FIVE_STEPS[:3], step_line(2), step_line(3)]), step=2) == FIVE_STEPS[:2]
    )


@pytest.mark.parametrize("garbage", [b"\xff\xfe", b"\0\0\0", b"5\n", b'{"loss": 1}\n'])
def test_what_is_no_line_is_forgotten_at_the_end(path: Path, garbage: bytes) -> None:
    with opened(path) as run_dir:
        (path / METRICS_FILE).write_bytes("".join(FIVE_STEPS[:3]).encode() + garbage)
        run_dir.truncate_metrics(5, steps_per_epoch=4)
    assert (path / METRICS_FILE).read_text() == "".join(FIVE_STEPS[:3])


@pytest.mark.parametrize("garbage", [b"5\n", b'{"loss": 1}\n'])
def test_what_is_no_line_before_a_line_that_remains_is_refused(path: Path, garbage: bytes) -> None:
    with opened(path) as run_dir:
        (path / METRICS_FILE).write_bytes(
            "".join(FIVE_STEPS[:3]).encode() + garbage + step_line(4).encode()
        )
        with pytest.raises(InputError, match=r"line 4 of .*metrics.jsonl is damaged"):
            run_dir.truncate_metrics(5, steps_per_epoch=4)


@pytest.mark.parametrize("torn", [1, 10, -2, -1])
def test_a_torn_last_line_is_forgotten_wherever_it_was_torn(path: Path, torn: int) -> None:
    """A line may be torn just before its end; the next line would be appended to it."""
    assert cut(path, "".join(FIVE_STEPS[:5]) + step_line(5)[:torn], step=5) == FIVE_STEPS[:5]


def test_an_evaluation_in_mid_epoch_is_forgotten_with_the_end_that_it_was_made_for(
    path: Path,
) -> None:
    lines = [step_line(1), step_line(2), evaluation_line(2)]
    assert cut(path, "".join(lines), step=2) == lines[:2]


@pytest.mark.parametrize("step", range(7))
@pytest.mark.parametrize("torn", ["", evaluation_line(5), step_line(6)[:12], step_line(6)[:-1]])
def test_where_a_run_goes_on_in_place_its_last_metrics_are_cut_as_at_a_start(
    path: Path, step: int, torn: str
) -> None:
    """torn: also an evaluation in mid-epoch, which is made again."""
    text = "".join(FIVE_STEPS) + torn
    at_start = cut(path, text, step)
    with opened(path) as run_dir:
        (path / METRICS_FILE).write_text(text)
        run_dir.truncate_recent_metrics(step, steps_per_epoch=4)
    assert (path / METRICS_FILE).read_text() == "".join(at_start)


def test_in_place_only_the_end_of_long_metrics_is_read(path: Path) -> None:
    text = "".join(map(step_line, range(1, 30_001)))
    with opened(path) as run_dir:
        (path / METRICS_FILE).write_text(text)
        before = (path / METRICS_FILE).stat().st_ino
        run_dir.truncate_recent_metrics(29_000, steps_per_epoch=4)
    assert (path / METRICS_FILE).read_text() == "".join(map(step_line, range(1, 29_001)))
    assert (path / METRICS_FILE).stat().st_ino == before  # not written anew


def test_a_run_without_metrics_has_nothing_to_cut(path: Path) -> None:
    with opened(path) as run_dir:
        run_dir.truncate_metrics(3, steps_per_epoch=4)
        run_dir.truncate_recent_metrics(3, steps_per_epoch=4)
    assert not (path / METRICS_FILE).exists()


# -- moving aside ----------------------------------------------------------------------------------


def test_moving_aside_takes_the_first_free_number_and_deletes_nothing(path: Path) -> None:
    for number in (1, 2):
        path.mkdir()
        (path / "from").write_text(f"run {number}")
        (path / RESULT_FILE).touch()
        assert move_run_dir_aside(path) == path.with_name(f"run.old-{number}")
    assert not path.exists()
    assert [(path.with_name(f"run.old-{n}") / "from").read_text() for n in (1, 2)] == [
        "run 1",
        "run 2",
    ]


def test_what_holds_no_run_is_not_moved(path: Path) -> None:
    path.mkdir()
    (path / "notes").touch()
    with pytest.raises(InputError, match="it holds no run"):
        move_run_dir_aside(path)
    assert [inside.name for inside in path.iterdir()] == ["notes"]


def test_there_is_nothing_to_move_before_the_first_run(path: Path) -> None:
    assert move_run_dir_aside(path) is None


@pytest.mark.parametrize("plan", [{"shuffle": []}, {"shuffle": 1}, [], None])
def test_an_order_that_is_none_is_a_damaged_config(plan: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json is damaged"):
        find_shuffle({"plan": plan}, tmp_path)
