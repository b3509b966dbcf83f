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
from stepladder.storage.lock import AGENTS, HELD, LOCK, MEETING, Lock, has_ended, is_held, owner_of
from stepladder.storage.rundir import RunDir, move_aside

# A run without torch: takes the directory, writes its name there, says so, and ends well when told
# to.
RUN = """
import sys
import time
from pathlib import Path
from stepladder.core.errors import InputError
from stepladder.storage.rundir import RESULT, RunDir

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
run_dir.store(RESULT, {"steps": 1, "by": name})
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


@pytest.mark.parametrize("locks", [True, False])
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
        lock = Lock(path, 0)
        lock.write({"attempt": 1})
        waiting = start(path, "waiting", wait=600.0)
        attempt = 1
        while is_running(waiting.process.pid):
            attempt += 1
            lock.write({"attempt": attempt})  # as by other ones, each of which had it for a moment
        code, err = waiting.end()
        lock.release()
    assert code == 2
    assert "is in use by process" in err


def is_running(pid: int) -> bool:
    time.sleep(0.01)
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_agents_of_several_nodes_that_live_keep_a_run_on_one_out(tmp_path: Path) -> None:
    """Their ranks, which they have not started yet, hold no lock."""
    for name in (MEETING, AGENTS):
        (tmp_path / name).touch()
    Lock(tmp_path, 0.0).release()
    with (tmp_path / AGENTS).open("rb") as agents:
        fcntl.flock(agents, fcntl.LOCK_SH)
        with pytest.raises(InputError, match="is in use by another run"):
            Lock(tmp_path, 0.0)
        Lock(tmp_path, 0.0, of_nodes=True).release()
    Lock(tmp_path, 0.0).release()


@pytest.mark.parametrize("pid", [0, 2**31 - 1])
def test_a_lock_file_names_a_process(tmp_path: Path, pid: int) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"host": "here", "pid": pid}))
    assert owner_of(tmp_path)["pid"] == pid


@pytest.mark.parametrize(
    "about", [{"pid": 2**31}, {"pid": -1}, {"attempt": 10**9 + 1}, {"attempt": -1}]
)
def test_numbers_that_no_process_or_attempt_has_name_nobody(
    tmp_path: Path, about: dict[str, int]
) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"host": "here", **about}))
    assert owner_of(tmp_path) == {}


@pytest.mark.parametrize("size", [1000, 1 << 40])
def test_a_damaged_lock_file_is_written_anew(tmp_path: Path, size: int) -> None:
    (tmp_path / LOCK).write_bytes(b"x" * 1000)
    os.truncate(tmp_path / LOCK, size)
    run_dir = RunDir(tmp_path, 0.0, fresh=False)
    run_dir.store("about.json", {"steps": 1})
    assert owner_of(tmp_path)["pid"] == os.getpid()
    run_dir.close()


def test_the_writer_of_a_directory_that_was_moved_away_has_lost_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    lock = Lock(path, 0)
    lock.write({})
    path.rename(tmp_path / "moved")
    with pytest.raises(InputError, match="its lock file is gone"):
        lock.guard()
    path.mkdir()
    other = Lock(path, 0)
    other.write({})
    with pytest.raises(InputError, match="lost run directory"):
        lock.guard()
    other.guard()
    lock.release()
    other.guard()
    other.release()


def just_before_locking(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    flock = fcntl.flock

    def late(file: int, how: int) -> None:
        happens()
        flock(file, how)

    monkeypatch.setattr("fcntl.flock", late)


@pytest.mark.parametrize("anew", [False, True])
def test_a_directory_that_is_moved_between_the_lock_files_opening_and_its_locking_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    path = tmp_path / "run"
    path.mkdir()

    def move() -> None:
        path.rename(tmp_path / "moved")
        if anew:
            path.mkdir()
            (path / LOCK).touch()

    just_before_locking(monkeypatch, move)
    with pytest.raises(InputError, match=f"{path} is in use by another run"):
        Lock(path, 0)


def test_a_directory_that_is_moved_while_a_run_waits_for_it_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    other = Lock(path, 0)
    monkeypatch.setattr("time.sleep", lambda _: path.rename(tmp_path / "moved"))
    with pytest.raises(InputError, match=f"{path} is in use by"):
        Lock(path, 60)
    other.close()


def test_a_fresh_run_is_not_refused_for_one_that_has_only_come_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all would go, each for another's look, and nobody train."""
    looking = Lock(tmp_path, 0)
    monkeypatch.setattr("time.sleep", lambda _: looking.release())
    run_dir = RunDir(tmp_path, 60, fresh=True)
    run_dir.guard()
    run_dir.close()


@pytest.mark.parametrize("named", [{}, {"host": "a", "pid": 7, "token": "ab"}])
def test_a_fresh_run_ends_at_once_where_another_has_its_new_directory(
    tmp_path: Path, named: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Lock(tmp_path, 0)
    other.write(named)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(InputError, match="is in use by process"):
        RunDir(tmp_path, 60, fresh=True)
    other.release()


WRITER = {"host": "elsewhere", "pid": 7, "attempt": 3, "token": "ab"}


@pytest.mark.parametrize(
    "other",
    [{}, {"host": "a"}, {"host": "z"}, {"pid": 8}, {"attempt": 4}, {"attempt": 2}, {"token": "ac"}],
)
def test_a_directory_that_another_run_had_for_a_moment_is_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    """Whichever word tells the two apart. A heartbeat of the writer before tells nothing."""
    (tmp_path / LOCK).write_text(json.dumps(WRITER))
    last = json.dumps({**WRITER, "heartbeat": 1.5, **other})
    just_before_locking(monkeypatch, lambda: (tmp_path / LOCK).write_text(last))
    with pytest.raises(InputError, match="is in use by process") if other else nullcontext():
        Lock(tmp_path, 0).release()


# -- what outlives a rank --------------------------------------------------------------------------


def test_a_lock_outlives_its_process_with_the_launchers_mailbox(tmp_path: Path) -> None:
    mailbox = fd_store.make_fd_store()
    try:
        for attempt in (1, 2):  # each ends as by kill -9
            pid = os.fork()
            if pid == 0:
                fd_store.set_fd_store(mailbox)
                Lock(tmp_path, 0).write({"attempt": attempt})
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(pid, 0)
            assert is_held(tmp_path)
            assert owner_of(tmp_path)["attempt"] == attempt
            with pytest.raises(InputError, match=f"is in use by process {pid} "):
                Lock(tmp_path, 0)
    finally:
        for end in mailbox:
            end.close()
    assert not is_held(tmp_path)
    Lock(tmp_path, 0).release()


def test_who_takes_the_lock_from_the_mailbox_leaves_it_there(tmp_path: Path) -> None:
    """It may be killed the moment after."""
    mailbox = fd_store.make_fd_store()
    fd_store.set_fd_store(mailbox)
    try:
        Lock(tmp_path, 0).write({})
        first, again = (
            fd_store.find_stored_fd(lambda _: True),
            fd_store.find_stored_fd(lambda _: True),
        )
        assert first is not None and again is not None
        assert fd_store.find_stored_fd(lambda _: False) is None
        assert fd_store.remove_all_fds(mailbox) == []
    finally:
        fd_store.set_fd_store(None)
        for end in mailbox:
            end.close()


@pytest.mark.parametrize("begun", [False, True])
def test_fresh_moves_aside_what_this_launch_has_not_begun_itself(
    tmp_path: Path, begun: bool
) -> None:
    """Its first rank may have been killed before it did, while it did, or later."""
    path, mailbox = tmp_path / "run", fd_store.make_fd_store()
    path.mkdir()
    (path / "writer").write_text("before")
    fd_store.set_fd_store(mailbox)
    try:
        lock = Lock(path, 0)  # as to move it aside
        if begun:
            lock.write({})
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
    load, equal, give = (
        0x20,
        0x15,
        0x06,
    )  # BPF: the call's number; is it this one; what becomes of it
    code = [
        (load, 0, 0, 0),
        (equal, 0, 1, number),
        (give, 0, 0, 0x50000 | errno.ENOSYS),
        (give, 0, 0, 0x7FFF0000),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    about = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, by_filter, about) == 0, os.strerror(ctypes.get_errno())


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
        assert {file.name for file in path.iterdir()} == {LOCK, "writer", "result.json"}
        third = start(path, "third", locks=False)
        assert third.has_it()
        assert third.end() == (0, "")


NOBODY = 2**31 - 1  # the number of no process


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the processes above, here."""

    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr("stepladder.storage.lock.SECONDS_BETWEEN_TRIES", 0.01)


def leave(folder: Path, host: str, pid: int) -> None:
    """What a run leaves that was killed where there are no locks."""
    (folder / LOCK).write_text(json.dumps({"host": host, "pid": pid}))
    (folder / HELD).touch()


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("host", ["-before", "~after"])
def test_without_locks_the_writer_on_another_machine_is_named_with_what_to_type(
    tmp_path: Path, host: str
) -> None:
    leave(tmp_path, host, NOBODY)
    with pytest.raises(InputError) as caught:
        Lock(tmp_path, 60)
    assert f"in use by process {NOBODY} on {host}, if that still lives" in caught.value.problem
    assert "flock: Function not implemented" in caught.value.problem
    assert "-o flock" in caught.value.hint and f"rm {tmp_path / HELD}" in caught.value.hint


@pytest.mark.usefixtures("no_locks")
def test_without_locks_what_a_killed_run_left_is_taken_at_once_and_nobody_was_waited_for(
    tmp_path: Path,
) -> None:
    leave(tmp_path, socket.gethostname(), NOBODY)
    lock = Lock(tmp_path, 0)
    assert not lock.waited
    assert {file.name for file in tmp_path.iterdir()} == {LOCK, HELD}
    lock.release()
    assert {file.name for file in tmp_path.iterdir()} == {LOCK}


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_run_is_live_until_it_is_known_to_have_ended(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    leave(tmp_path, socket.gethostname(), os.getpid())
    assert is_held(tmp_path)
    leave(tmp_path, "elsewhere", NOBODY)
    assert is_held(tmp_path)
    leave(tmp_path, socket.gethostname(), NOBODY)
    assert not is_held(tmp_path)
    leave(tmp_path, socket.gethostname(), os.getpid())
    (tmp_path / HELD).unlink()
    assert not is_held(tmp_path)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("described", [False, True])
def test_without_locks_of_two_that_find_a_killed_run_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: bool
) -> None:
    """The second comes between the first one's look and its deed, and is done before."""
    leave(tmp_path, socket.gethostname(), NOBODY)
    if described:
        (tmp_path / HELD).write_text((tmp_path / LOCK).read_text())
    taken: list[Lock] = []

    def take() -> None:
        with suppress(InputError):
            taken.append(Lock(tmp_path, 0))

    def look(owner: dict[str, object]) -> bool:
        monkeypatch.setattr("stepladder.storage.lock.has_ended", has_ended)
        take()
        return has_ended(owner)

    monkeypatch.setattr("stepladder.storage.lock.has_ended", look)
    take()
    assert len(taken) == 1
    taken[0].release()
    assert {file.name for file in tmp_path.iterdir()} == {LOCK}


@pytest.mark.usefixtures("no_locks")
def test_without_locks_moving_aside_takes_its_own_file_along_and_leaves_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text("before")
    others: list[Lock] = []
    rename = Path.rename

    def moved(self: Path, target: Path) -> Path:
        new = rename(self, target)
        if self == path:
            path.mkdir()
            others.append(Lock(path, 0))
        return new

    monkeypatch.setattr(Path, "rename", moved)
    assert move_aside(path) == path.with_name("run.old-1")
    assert not (path.with_name("run.old-1") / HELD).exists()
    assert is_held(path)
    others[0].release()
