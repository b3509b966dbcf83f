"""Where the agents of several nodes meet: published in the run directory, which all nodes see.

rendezvous.json    the current generation: its store's host and port; touched while that node lives
rendezvous.lock    held for a moment by an agent that looks there, and publishes if need be
rendezvous.secret  signs what agents tell each other over the network; only its owner can read it
rendezvous.agents  shared by all agents while they live: who could have it alone begins a new launch
rendezvous.seats   each agent has a byte of it to itself, see seats.py

A generation is one store's life. When its node is lost, a survivor serves the next one; not so a
node that is only cut off from it. The file says at last how the launch ended."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from stepladder.core import durable, typed_file
from stepladder.core.address import find_own_address, is_listening, is_local, parse_endpoint
from stepladder.core.errors import DONE, InputError, StorageFault, as_input_error
from stepladder.launcher.nodes.generation import Excluded, Generation, Moved
from stepladder.launcher.nodes.policy import End
from stepladder.launcher.nodes.seats import Seats
from stepladder.storage.lock import (
    AGENTS_LOCK_FILE,
    NO_OWNER,
    RENDEZVOUS_LOCK_FILE,
    open_lock_file,
    try_lock,
)
from stepladder.storage.run_dir import move_run_dir_aside, open_lock
from stepladder.storage.run_dir_access import validate_run_dir_writable
from stepladder.storage.run_files import CONFIG_FILE

PUBLISHED = "rendezvous.json"
SECRET_FILE = "rendezvous.secret"  # of one launch, made anew by the next
SECONDS_TO_TELL = 3.0
SECONDS_BETWEEN_TRIES = 0.3
SECONDS_OF_SILENCE = 4.0  # of the store's node in the file, where its store does not answer
SECONDS_FOR_MEMBERS = 30.0  # to notice that their store is gone, before a newcomer takes its place
SECONDS_FOR_A_SEAT = 30.0  # and for a run on one machine to end
SECONDS_BETWEEN_LOOKS = 1.0  # each is a small read from a shared file system


class Rendezvous:
    """One agent's view of `run_dir`'s rendezvous.

    address: how other nodes reach this one, "" for its host name.  endpoint: host:port where the
    first store must be, "" for anywhere.  fresh: a new launch moves an earlier run aside.  timeout:
    seconds to find others. touch: gives a file the file system's own time, the only one that all
    nodes share. asked: tells launches apart that compute different things."""

    asked = ""

    def __init__(
        self,
        run_dir: Path,
        address: str,
        endpoint: str,
        fresh: bool,
        timeout: float,
        touch: Callable[[Path], None] = os.utime,
    ) -> None:
        self.run_dir, self.fresh, self.timeout, self.touch = run_dir, fresh, timeout, touch
        self.address = address.strip("[]") or find_own_address()
        self.endpoint = parse_endpoint(endpoint) if endpoint else None
        self.current: Generation | None = None
        self.agents: int | None = None
        self.seats = Seats(run_dir / "rendezvous.seats")
        self.moved = False
        self.since, self.serves = 0.0, 0
        self.joining, self.looked = True, 0.0
        self.end_seen: End | None = None

    @property
    def number(self) -> int:
        """Of the current generation, from 1."""
        return self.current.number if self.current else 0

    def join(
        self, serve: Callable[[int], int], check: Callable[[], object] = lambda: None
    ) -> Generation:
        """The generation to belong to, found or begun; with a `code` if the launch has ended.

        serve: opens a store on a port (0: any free one) and returns the port.  check: called
        between tries, to raise where it makes no sense to go on. Raises InputError where nobody
        answers for `timeout` seconds."""
        if not self.fresh:
            validate_run_dir_writable(self.run_dir)
        self.joining, self.since = True, time.monotonic()
        while time.monotonic() - self.since < self.timeout:
            check()
            with self._locked() as got:
                if got and (generation := self._find_or_begin(serve)):
                    self.current, self.end_seen, self.joining = generation, generation.end, False
                    return generation
            time.sleep(SECONDS_BETWEEN_TRIES)
        published = self.read()
        where = (published.host, published.port) if published else self.endpoint
        raise InputError(
            f"no rendezvous answered at {where and '{}:{}'.format(*where)} within {self.timeout:g} s",
            f"the same --run-dir and --rdzv-endpoint on all nodes; it is in {self.run_dir / PUBLISHED}",
        )

    def _find_or_begin(self, serve: Callable[[int], int]) -> Generation | None:
        if self.agents is None and not self._enter():
            return None
        published = self.read()
        if published is not None and published.code is not None:
            return published
        if published is not None and is_listening(published.host, published.port):
            return published if self._sit(published) else None
        if published is not None and not self._may_replace(published):
            return None
        port = 0
        if (
            self.current is None and self.endpoint is not None
        ):  # the first one, where the user wants it
            host, port = self.endpoint
            if not is_local(host):
                return None
        if not self._sit(published):
            return None
        number, given_up = (published.number + 1, published.given_up) if published else (1, ())
        generation = Generation(number, self.address, serve(port), self.asked, given_up=given_up)
        self.serves = number
        self._publish(generation)
        return generation

    def _may_replace(self, published: Generation) -> bool:
        """Members of a generation may, when its node is gone; a newcomer, when no member has in
        time.
        """
        if self.current is None and self._alone():
            return True
        if self.current is None and time.monotonic() - self.since < SECONDS_FOR_MEMBERS:
            return False
        return (
            self.current is None or self.current.number == published.number
        ) and self._is_silent()

    def _is_silent(self) -> bool:
        """Both times are the file system's own: clocks of nodes may differ. We hold the lock."""
        self.touch(self.run_dir / RENDEZVOUS_LOCK_FILE)
        with (self.run_dir / PUBLISHED).open(
            "rb"
        ) as opened:  # then a network file system looks anew
            touched = os.fstat(opened.fileno()).st_mtime
        return (self.run_dir / RENDEZVOUS_LOCK_FILE).stat().st_mtime - touched > SECONDS_OF_SILENCE

    def _alone(self) -> bool:
        """Whether no other agent lives. Ours stays known."""
        assert self.agents is not None
        try:
            return try_lock(self.agents)
        finally:
            fcntl.flock(
                self.agents, fcntl.LOCK_SH
            )  # nobody enters meanwhile: that needs the other lock

    def _enter(self) -> bool:
        """Be one of the launch's agents, or the first of a new launch. False: try again."""
        self.agents = open_lock_file(self.run_dir / AGENTS_LOCK_FILE)
        if self._alone():
            entered = self._begin()
        else:
            published = self.read()
            entered = self._may_join(published) and self._sit(published)
        if not entered:
            self.leave()
        return entered

    def _may_join(self, published: Generation | None) -> bool:
        """Raises InputError where the launch that lives here is another one than ours."""
        if published is None or published.code == DONE:
            return True
        if published.code is None and published.asked not in ("", self.asked):
            raise InputError(
                f"run directory {self.run_dir} is in use by a launch whose job or settings are others",
                "the same command on all its nodes, or another --run-dir",
            )
        return (
            published.code is None
        )  # one that has failed, or was stopped: its agents are about to leave

    def _begin(self) -> bool:
        """Make room for a new launch. False: it was made, by moving a run aside; enter anew."""
        wait = min(self.timeout, SECONDS_FOR_A_SEAT)
        if self.fresh and not self.moved and (self.run_dir / CONFIG_FILE).exists():
            move_run_dir_aside(self.run_dir, wait, is_multi_node=True)
            self.moved = True
            return False
        # A run on one machine may be here: it asks for us when it has its lock, we for its lock
        # while we are here.
        lock = open_lock(self.run_dir, wait, NO_OWNER if self.moved else None, is_multi_node=True)
        lock.release()
        if self.moved and (self.run_dir / CONFIG_FILE).exists():
            raise lock.make_in_use_error()
        for name in (PUBLISHED, SECRET_FILE):
            (self.run_dir / name).unlink(missing_ok=True)
        self.seats.clear()
        return self._sit(None)

    def _sit(self, published: Generation | None) -> bool:
        """Whether the launch has room for this agent. Raises InputError where there was none for
        long enough.
        """
        if self.seats.take(published.given_up if published else ()):
            return True
        if time.monotonic() - self.since > min(self.timeout / 2, SECONDS_FOR_A_SEAT):
            raise InputError(
                f"run directory {self.run_dir} is in use by a launch that has its {self.seats.most} nodes",
                "wait for it, stop it, or choose another --run-dir",
            )
        return False

    def look(self, given_up: Collection[int] = ()) -> End | None:
        """How the launch has ended, as published a second ago at most. Raises Moved where it goes
        on elsewhere.

        given_up: seats of nodes that all go on without: they are published too. Raises Excluded on
        such a node."""
        if (
            time.monotonic() - self.looked < SECONDS_BETWEEN_LOOKS
            or self.current is None
            or self.joining
        ):
            return self.end_seen
        self.looked = time.monotonic()
        published = self.read()
        if published is not None and self.serves == published.number:
            self.touch(self.run_dir / PUBLISHED)
        if published is not None and published.number > self.current.number:
            raise Moved
        if published is not None and self.seats.number in published.given_up:
            raise Excluded
        if published is not None and not set(given_up) <= set(published.given_up):
            self._give_up(given_up)
        self.end_seen = published.end if published is not None else None
        return self.end_seen

    def _give_up(self, seats: Collection[int]) -> None:
        with (
            suppress(OSError, InputError, StorageFault),
            self._locked() as got,
        ):  # else at the next look, or by another node
            published = self.read()
            if got and published is not None and published.number == self.number:
                all_seats = tuple(sorted({*published.given_up, *seats}))
                self._publish(replace(published, given_up=all_seats))

    def read_end(self) -> End | None:
        """As `look`, but now."""
        published = self.read()
        return None if published is None else published.end

    def end(self, code: int, text: str = "") -> int:
        """Tell all agents that the launch has ended. Returns the first one's code, which counts."""
        deadline = time.monotonic() + SECONDS_TO_TELL
        while time.monotonic() < deadline:
            with self._locked() as got:
                if got:
                    published = self.read()
                    if published is None:
                        return code
                    if published.code is not None:
                        return published.code
                    if (
                        published.number == self.number
                        and self.seats.number not in published.given_up
                    ):
                        self._publish(replace(published, code=code, text=text))
                    return code
            time.sleep(SECONDS_BETWEEN_TRIES)
        return code

    def read(self) -> Generation | None:
        try:
            return typed_file.parse_json(typed_file.read_file(self.run_dir / PUBLISHED), Generation)
        except (OSError, ValueError):
            return None

    def _publish(self, generation: Generation) -> None:
        path = self.run_dir / PUBLISHED
        with durable.name_write_errors(
            path, "--run-dir DIR on a file system that all nodes can write"
        ):
            durable.write(path, json.dumps(asdict(generation)) + "\n")

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """False where another agent is there just now, or where the folder was moved aside
        meanwhile.
        """
        hint = "--run-dir DIR on a file system that all nodes can write"
        with as_input_error(f"run directory {self.run_dir} cannot be written", hint):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            lock = open_lock_file(self.run_dir / RENDEZVOUS_LOCK_FILE)
        try:
            yield self._take(lock)
        finally:
            os.close(lock)

    def _take(self, lock: int) -> bool:
        hint = "mount it with locks (Lustre: -o flock), or --run-dir DIR on another file system"
        with as_input_error(
            f"run directory {self.run_dir} has no locks, which several nodes need", hint
        ):
            if not try_lock(lock):
                return False
        with suppress(FileNotFoundError):
            return os.fstat(lock).st_ino == (self.run_dir / RENDEZVOUS_LOCK_FILE).stat().st_ino
        return False

    def leave(self) -> None:
        """This agent is no longer part of the launch."""
        if self.agents is not None:
            os.close(self.agents)
        self.agents = None
        self.seats.leave()
