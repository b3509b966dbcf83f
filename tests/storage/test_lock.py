"""One run writes a directory, whoever waits, moves it aside or is killed, with the kernel's locks
or without.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from stepladder.core.errors import InputError
from stepladder.rank import fd_store
from stepladder.storage.lock import (
    AGENTS_LOCK_FILE,
    LINK_LOCK_FILE,
    LOCK_FILE,
    RENDEZVOUS_LOCK_FILE,
    RunDirLock,
    has_owner_ended,
    is_locked,
    read_owner,
)
from stepladder.storage.run_dir import RunDir, move_run_dir_aside

# A run without torch: takes the directory, writes its name there, says so, and ends well when told
# to.
RUN = """
import sys
import time
from pathlib import Path
from stepladder.core.errors import InputError
from stepladder.storage.run_dir import RunDir

path, name, fresh, wait = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "fresh", float(sys.argv[4])
if "without-locks" in sys.argv:
    sys.path.insert(0, sys.argv[-1])
    from test_lock import forbid_flock
    forbid_flock()
sleep = time.sleep
time.sleep = lambda seconds: (print("waits", flush=True), sleep(seconds))
print("ready", flush=True)
try:
    run_dir = RunDir(path, wait, fresh)
except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
(path / "writer").write_text(name)
print("has it", flush=True)
sys.stdin.read()
run_dir.write_json("result.json", {"steps": 1, "by": name})
run_dir.close()
"""


class Run:
    """A process that opens the directory."""

    def __init__(
        self, path: Path, name: str, fresh: bool = False, wait: float = 0.0, locks: bool = True
    ) -> None:
        flags = [] if locks else ["without-locks", str(Path(__file__).parent)]
        command = [
            sys.executable,
            "-c",
            RUN,
            str(path),
            name,
            "fresh" if fresh else "",
            str(wait),
            *flags,
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout
        assert self.said.readline() == "ready\n"

    def waits(self) -> bool:
        """Whether it waits for another run; known once it has tried."""
        return self.said.readline() == "waits\n"

    def has_it(self) -> bool:
        """Waits for the answer."""
        while (line := self.said.readline()) == "waits\n":
            pass
        return line == "has it\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> tuple[int, str]:
        """Lets it end. Exit code and stderr."""
        _, err = self.process.communicate()
        return self.process.returncode, err


@contextmanager
def runs() -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:

        def start(*args: object, **flags: object) -> Run:
            run = Run(*args, **flags)  # type: ignore[arg-type]
            stack.enter_context(run.process)
            stack.callback(run.process.kill)
            return run

        yield start


@pytest.mark.parametrize("locks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_of_three_fresh_runs_that_wait_for_a_killed_one_one_lives(
    tmp_path: Path, locks: bool
) -> None:
    path = tmp_path / "run"
    with runs() as start:
        first = start(path, "first", locks=locks)
        assert first.has_it()
        waiting = [start(path, f"fresh {n}", fresh=True, wait=60.0, locks=locks) for n in range(3)]
        assert all(run.waits() for run in waiting)
        first.kill()
        winners = [run for run in waiting if run.has_it()]
        ends = {run: run.end() for run in waiting}
    assert len(winners) == 1
    assert ends[winners[0]] == (0, "")
    refused = [ends[run] for run in waiting if run is not winners[0]]
    assert [code for code, _ in refused] == [2, 2]
    # The winner may not have written its number yet: it is "another run" then.
    assert all(
        err.count("\n") == 1 and re.search("is in use by (process|another)", err)
        for _, err in refused
    ), refused
    assert (path.with_name("run.old-1") / "writer").read_text() == "first"
    assert not path.with_name("run.old-2").exists()
    by = json.loads((path / "result.json").read_text())["by"]
    assert (path / "writer").read_text() == by == f"fresh {waiting.index(winners[0])}"


def test_a_fresh_run_never_moves_aside_what_was_finished_while_it_waited(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with runs() as start:
        first = start(path, "first")
        assert first.has_it()
        fresh = start(path, "fresh", fresh=True, wait=60.0)
        assert fresh.waits()
        assert first.end() == (0, "")
        code, err = fresh.end()
    assert code == 2
    assert "is in use by process" in err
    assert (path / "writer").read_text() == "first"
    assert not path.with_name("run.old-1").exists()


def test_a_run_that_waits_ends_at_once_when_another_one_comes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    with runs() as start:
        lock = RunDirLock(path, 0)
        lock.write_owner({"attempt": 1})
        waiting = start(path, "waiting", wait=600.0)
        attempt = 1
        while is_running(waiting.process.pid):
            attempt += 1
            lock.write_owner(
                {"attempt": attempt}
            )  # as by other ones, each of which had it for a moment
        code, err = waiting.end()
        lock.release()
    assert code == 2
    assert "is in use by process" in err


def is_running(pid: int) -> bool:
    time.sleep(0.01)
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_agents_of_several_nodes_that_live_keep_a_run_on_one_out(tmp_path: Path) -> None:
    """Their ranks, which they have not started yet, hold no lock."""
    for name in (RENDEZVOUS_LOCK_FILE, AGENTS_LOCK_FILE):
        (tmp_path / name).touch()
    RunDirLock(tmp_path, 0.0).release()
    with (tmp_path / AGENTS_LOCK_FILE).open("rb") as agents:
        fcntl.flock(agents, fcntl.LOCK_SH)
        with pytest.raises(InputError, match="is in use by another run"):
            RunDirLock(tmp_path, 0.0)
        with pytest.raises(InputError, match="is in use by another run"):
            RunDir(tmp_path, 0.0)
        RunDirLock(tmp_path, 0.0, is_multi_node=True).release()
    RunDirLock(tmp_path, 0.0).release()


@pytest.mark.parametrize("pid", [0, 2**31 - 1])
def test_a_lock_file_names_a_process(tmp_path: Path, pid: int) -> None:
    (tmp_path / LOCK_FILE).write_text(json.dumps({"host": "here", "pid": pid}))
    assert read_owner(tmp_path)["pid"] == pid


@pytest.mark.parametrize(
    "details", [{"pid": 2**31}, {"pid": -1}, {"attempt": 10**9 + 1}, {"attempt": -1}]
)
def test_numbers_that_no_process_or_attempt_has_name_nobody(
    tmp_path: Path, details: dict[str, int]
) -> None:
    (tmp_path / LOCK_FILE).write_text(json.dumps({"host": "here", **details}))
    assert read_owner(tmp_path) == {}


@pytest.mark.parametrize("size", [1000, 1 << 40])
def test_a_damaged_lock_file_is_written_anew(tmp_path: Path, size: int) -> None:
    (tmp_path / LOCK_FILE).write_bytes(b"x" * 1000)
    os.truncate(tmp_path / LOCK_FILE, size)
    run_dir = RunDir(tmp_path, 0.0, fresh=False)
    run_dir.write_json("about.json", {"steps": 1})
    assert read_owner(tmp_path)["pid"] == os.getpid()
    run_dir.close()


def test_the_writer_of_a_directory_that_was_moved_away_has_lost_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    lock = RunDirLock(path, 0)
    lock.write_owner({})
    path.rename(tmp_path / "moved")
    with pytest.raises(InputError, match="its lock file is gone"):
        lock.validate_ownership()
    path.mkdir()
    second_lock = RunDirLock(path, 0)
    second_lock.write_owner({})
    with pytest.raises(InputError, match="lost run directory"):
        lock.validate_ownership()
    second_lock.validate_ownership()
    lock.release()
    second_lock.validate_ownership()
    second_lock.release()


def just_before_locking(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    flock = fcntl.flock

    def late(file: int, how: int) -> None:
        happens()
        flock(file, how)

    monkeypatch.setattr("fcntl.flock", late)


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_directory_that_is_moved_between_the_lock_files_opening_and_its_locking_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewritten: bool
) -> None:
    path = tmp_path / "run"
    path.mkdir()

    def move() -> None:
        path.rename(tmp_path / "moved")
        if rewritten:
            path.mkdir()
            (path / LOCK_FILE).touch()

    just_before_locking(monkeypatch, move)
    with pytest.raises(InputError, match=f"{path} is in use by another run"):
        RunDirLock(path, 0)


def test_a_directory_that_is_moved_while_a_run_waits_for_it_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    second_lock = RunDirLock(path, 0)
    monkeypatch.setattr("time.sleep", lambda _: path.rename(tmp_path / "moved"))
    with pytest.raises(InputError, match=f"{path} is in use by"):
        RunDirLock(path, 60)
    second_lock.close()


def test_a_fresh_run_is_not_refused_for_one_that_has_only_come_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all would go, each for another's look, and nobody train."""
    looking = RunDirLock(tmp_path, 0)
    monkeypatch.setattr("time.sleep", lambda _: looking.release())
    run_dir = RunDir(tmp_path, 60, fresh=True)
    run_dir.validate_ownership()
    run_dir.close()


@pytest.mark.parametrize("named", [{}, {"host": "a", "pid": 7, "token": "ab"}])
def test_a_fresh_run_ends_at_once_where_another_has_its_new_directory(
    tmp_path: Path, named: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    second_lock = RunDirLock(tmp_path, 0)
    second_lock.write_owner(named)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(InputError, match="is in use by process"):
        RunDir(tmp_path, 60, fresh=True)
    second_lock.release()


WRITER = {"host": "elsewhere", "pid": 7, "attempt": 3, "token": "ab"}


@pytest.mark.parametrize(
    "second_lock",
    [{}, {"host": "a"}, {"host": "z"}, {"pid": 8}, {"attempt": 4}, {"attempt": 2}, {"token": "ac"}],
)
def test_a_directory_that_another_run_had_for_a_moment_is_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second_lock: dict[str, object]
) -> None:
    """Whichever word tells the two apart. A heartbeat of the writer before tells nothing."""
    (tmp_path / LOCK_FILE).write_text(json.dumps(WRITER))
    last = json.dumps({**WRITER, "heartbeat": 1.5, **second_lock})
    just_before_locking(monkeypatch, lambda: (tmp_path / LOCK_FILE).write_text(last))
    with pytest.raises(InputError, match="is in use by process") if second_lock else nullcontext():
        RunDirLock(tmp_path, 0).release()


# -- what outlives a rank --------------------------------------------------------------------------


def test_a_lock_outlives_its_process_with_the_launchers_mailbox(tmp_path: Path) -> None:
    mailbox = fd_store.make_fd_store()
    try:
        for attempt in (1, 2):  # each ends as by kill -9
            pid = os.fork()
            if pid == 0:
                fd_store.set_fd_store(mailbox)
                RunDirLock(tmp_path, 0).write_owner({"attempt": attempt})
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(pid, 0)
            assert is_locked(tmp_path)
            assert read_owner(tmp_path)["attempt"] == attempt
            with pytest.raises(InputError, match=f"is in use by process {pid} "):
                RunDirLock(tmp_path, 0)
    finally:
        for end in mailbox:
            end.close()
    assert not is_locked(tmp_path)
    RunDirLock(tmp_path, 0).release()


def test_who_takes_the_lock_from_the_mailbox_leaves_it_there(tmp_path: Path) -> None:
    """It may be killed the moment after."""
    mailbox = fd_store.make_fd_store()
    fd_store.set_fd_store(mailbox)
    try:
        RunDirLock(tmp_path, 0).write_owner({})
        first = fd_store.find_stored_fd(lambda _: True)
        second_value = fd_store.find_stored_fd(lambda _: True)
        assert first is not None and second_value is not None
        assert fd_store.find_stored_fd(lambda _: False) is None
        assert fd_store.remove_all_fds(mailbox) == []
    finally:
        fd_store.set_fd_store(None)
        for end in mailbox:
            end.close()


def test_the_launcher_keeps_one_file_however_often_the_owner_is_written(tmp_path: Path) -> None:
    """Each one that is kept is an open file of the launcher."""
    mailbox = fd_store.make_fd_store()
    fd_store.set_fd_store(mailbox)
    try:
        first = RunDirLock(tmp_path, 0)
        first.write_owner({"step": 1})
        first.write_owner({"step": 2})
        first.close()
        RunDirLock(tmp_path, 0).write_owner({"step": 3})  # the next rank, which gets it from there
        assert len(fd_store.remove_all_fds(mailbox)) == 1
    finally:
        fd_store.set_fd_store(None)
        for end in mailbox:
            end.close()


@pytest.mark.parametrize("begun", [False, True])
def test_fresh_moves_aside_what_this_launch_has_not_begun_itself(
    tmp_path: Path, begun: bool
) -> None:
    """Its first rank may have been killed before it did, while it did, or later."""
    path = tmp_path / "run"
    mailbox = fd_store.make_fd_store()
    path.mkdir()
    (path / "writer").write_text("before")
    fd_store.set_fd_store(mailbox)
    try:
        lock = RunDirLock(path, 0)  # as to move it aside
        if begun:
            lock.write_owner({})
        lock.close()
        RunDir(path, 0, fresh=True).close()
    finally:
        fd_store.set_fd_store(None)
        for end in mailbox:
            end.close()
    assert path.with_name("run.old-1").exists() is not begun


# -- without locks ---------------------------------------------------------------------------------


def forbid_flock() -> None:
    """This process's flock() fails as on a file system that has none, for good: a filter of Linux's
    seccomp.
    """
    number = {"x86_64": 73, "aarch64": 32}[os.uname().machine]
    # BPF: the call's number; is it this one; what becomes of it
    load = 0x20
    equal = 0x15
    give = 0x06
    code = [
        (load, 0, 0, 0),
        (equal, 0, 1, number),
        (give, 0, 0, 0x50000 | errno.ENOSYS),
        (give, 0, 0, 0x7FFF0000),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    details = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges = 38
    set_seccomp = 22
    by_filter = 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, by_filter, details) == 0, os.strerror(ctypes.get_errno())


def test_without_locks_a_live_writer_keeps_others_out_and_leaves_the_place_free(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    with runs() as start:
        first = start(path, "first", locks=False)
        assert first.has_it()
        second = start(path, "second", locks=False)
        code, err = second.end()
        assert (code, "is in use by process" in err) == (2, True)
        assert first.end() == (0, "")
        assert {file.name for file in path.iterdir()} == {LOCK_FILE, "writer", "result.json"}
        third = start(path, "third", locks=False)
        assert third.has_it()
        assert third.end() == (0, "")


NOBODY = 2**31 - 1  # the number of no process


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid flock in this process, as `forbid_flock` does in the other ones."""

    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr("stepladder.storage.lock.LOCK_RETRY_INTERVAL_S", 0.01)


def make_link_lock(folder: Path, host: str, pid: int) -> None:
    """What a run leaves that was killed where there are no locks."""
    (folder / LOCK_FILE).write_text(json.dumps({"host": host, "pid": pid}))
    (folder / LINK_LOCK_FILE).touch()


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("host", ["-before", "~after"])
def test_without_locks_the_writer_on_another_machine_is_named_with_what_to_type(
    tmp_path: Path, host: str
) -> None:
    make_link_lock(tmp_path, host, NOBODY)
    with pytest.raises(InputError) as caught:
        RunDirLock(tmp_path, 60)
    assert f"in use by process {NOBODY} on {host}, if that still lives" in caught.value.problem
    assert "flock: Function not implemented" in caught.value.problem
    assert (
        "-o flock" in caught.value.hint and f"rm {tmp_path / LINK_LOCK_FILE}" in caught.value.hint
    )


@pytest.mark.usefixtures("no_locks")
def test_without_locks_what_a_killed_run_left_is_taken_at_once_and_nobody_was_waited_for(
    tmp_path: Path,
) -> None:
    make_link_lock(tmp_path, socket.gethostname(), NOBODY)
    lock = RunDirLock(tmp_path, 0)
    assert not lock.has_waited
    assert {file.name for file in tmp_path.iterdir()} == {LOCK_FILE, LINK_LOCK_FILE}
    lock.release()
    assert {file.name for file in tmp_path.iterdir()} == {LOCK_FILE}


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_run_is_live_until_it_is_known_to_have_ended(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    make_link_lock(tmp_path, socket.gethostname(), os.getpid())
    assert is_locked(tmp_path)
    make_link_lock(tmp_path, "elsewhere", NOBODY)
    assert is_locked(tmp_path)
    make_link_lock(tmp_path, socket.gethostname(), NOBODY)
    assert not is_locked(tmp_path)
    make_link_lock(tmp_path, socket.gethostname(), os.getpid())
    (tmp_path / LINK_LOCK_FILE).unlink()
    assert not is_locked(tmp_path)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("described", [False, True])
def test_without_locks_of_two_that_find_a_killed_run_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: bool
) -> None:
    """The second comes between the first one's look and its deed, and is done before."""
    make_link_lock(tmp_path, socket.gethostname(), NOBODY)
    if described:
        (tmp_path / LINK_LOCK_FILE).write_text((tmp_path / LOCK_FILE).read_text())
    taken: list[RunDirLock] = []

    def acquire() -> None:
        with suppress(InputError):
            taken.append(RunDirLock(tmp_path, 0))

    def check_owner(owner: dict[str, object]) -> bool:
        monkeypatch.setattr("stepladder.storage.lock.has_owner_ended", has_owner_ended)
        acquire()
        return has_owner_ended(owner)

    monkeypatch.setattr("stepladder.storage.lock.has_owner_ended", check_owner)
    acquire()
    assert len(taken) == 1
    taken[0].release()
    assert {file.name for file in tmp_path.iterdir()} == {LOCK_FILE}


@pytest.mark.usefixtures("no_locks")
def test_without_locks_moving_aside_takes_its_own_file_along_and_leaves_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text("before")
    remaining: list[RunDirLock] = []
    rename = Path.rename

    def moved(self: Path, target: Path) -> Path:
        new = rename(self, target)
        if self == path:
            path.mkdir()
            remaining.append(RunDirLock(path, 0))
        return new

    monkeypatch.setattr(Path, "rename", moved)
    assert move_run_dir_aside(path) == path.with_name("run.old-1")
    assert not (path.with_name("run.old-1") / LINK_LOCK_FILE).exists()
    assert is_locked(path)
    remaining[0].release()
