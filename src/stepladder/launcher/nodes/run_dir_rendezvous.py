"""The rendezvous of several nodes, published in the run directory, which all nodes share.

rendezvous.json    the current generation: its store's host and port; touched while that node lives
rendezvous.lock    locked for a moment by an agent that reads the above, and publishes if need be
rendezvous.secret  signs what agents tell each other over the network; only its owner can read it
rendezvous.agents  locked by all agents while they live; an agent that is alone begins a new launch
rendezvous.seats   each agent locks one byte of it, see node_ids.py

A generation is the life of one store. When the node that serves the store is lost, another node
serves the next one. A node that cannot reach a store whose node lives does not. When the launch
ends, rendezvous.json says how.
"""

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
from stepladder.core.waiting import wait_until
from stepladder.launcher.nodes.generation import Generation, NodeExcluded, RendezvousMoved
from stepladder.launcher.nodes.node_ids import NodeIds
from stepladder.launcher.nodes.policy import End
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

RENDEZVOUS_FILE = "rendezvous.json"
SECRET_FILE = "rendezvous.secret"  # of one launch; the next one writes a new secret
NODE_IDS_FILE = "rendezvous.seats"
PUBLISH_END_TIMEOUT_S = 3.0
JOIN_RETRY_INTERVAL_S = 0.3
# A store that does not answer is lost if its node has not touched the file for so long either.
STORE_NODE_SILENCE_S = 4.0
# An agent that joins waits so long for the launch's own agents to replace a lost store.
NEW_AGENT_DELAY_S = 30.0
NODE_ID_TIMEOUT_S = 30.0  # the longest wait for a node id, and for a run on one machine to end
PUBLISHED_POLL_INTERVAL_S = 1.0  # each poll is a small read from a shared file system

SHARED_DIR_HINT = "--run-dir DIR on a file system that all nodes can write"
Serve = Callable[[int], int]  # opens a store on a port, 0 for any free one; returns the port


class RunDirRendezvous:
    """One agent's view of the rendezvous of a run directory."""

    def __init__(
        self,
        run_dir: Path,
        address: str,
        endpoint: str,
        fresh: bool,
        timeout: float,
        touch: Callable[[Path], None] = os.utime,
        job_digest: str = "",
        max_nodes: int = 0,
    ) -> None:
        """Set up the view, without any access to the run directory.

        Args:
            run_dir: The run directory.
            address: How other nodes reach this one, "" for its host name.
            endpoint: HOST:PORT where the first store must be, "" for anywhere.
            fresh: Whether a new launch moves an earlier run aside.
            timeout: Seconds to find other nodes.
            touch: Sets a file's time to the file system's, the only clock that all nodes share.
            job_digest: A digest of the job and its settings; an agent joins no launch with another.
            max_nodes: The number of nodes that can take part, 0 for no limit.
        """
        self.run_dir = run_dir
        self.address = address.strip("[]") or find_own_address()
        self.timeout = timeout
        # The ids of the launch's nodes.
        self.node_ids = NodeIds(run_dir / NODE_IDS_FILE, max_nodes)
        # The generation that this agent belongs to.
        self.current: Generation | None = None
        self._endpoint = parse_endpoint(endpoint) if endpoint else None
        self._fresh = fresh
        self._touch = touch
        self._job_digest = job_digest
        self._agents_file: int | None = None  # locked while this agent takes part
        self._has_moved_run = False
        self._joining = True
        self._join_started_at = 0.0
        self._served_generation = 0
        self._polled_at = 0.0
        self._published_end: End | None = None

    @property
    def number(self) -> int:
        """The number of the current generation, from 1; 0 without one."""
        return self.current.number if self.current else 0

    def join(self, serve: Serve, check: Callable[[], object] = lambda: None) -> Generation:
        """Find the generation to belong to, or begin it.

        Args:
            serve: Opens the store of a generation that this agent begins.
            check: Called between tries; an exception from it abandons the wait.

        Returns:
            The generation; with a `code` if the launch has ended.

        Raises:
            InputError: No store answers within `timeout` seconds.
        """
        if not self._fresh:
            validate_run_dir_writable(self.run_dir)
        self._joining = True
        self._join_started_at = time.monotonic()
        while self._seconds_joining() < self.timeout:
            check()
            with self._locked() as is_locked:
                generation = self._find_or_begin(serve) if is_locked else None
                if generation is not None:
                    self.current = generation
                    self._published_end = generation.end
                    self._joining = False
                    return generation
            time.sleep(JOIN_RETRY_INTERVAL_S)
        published = self.read()
        address = (published.host, published.port) if published else self._endpoint
        endpoint = "{}:{}".format(*address) if address else None
        raise InputError(
            f"no rendezvous answered at {endpoint} within {self.timeout:g} s",
            "the same --run-dir and --rdzv-endpoint on all nodes;"
            f" it is in {self.run_dir / RENDEZVOUS_FILE}",
        )

    def _seconds_joining(self) -> float:
        return time.monotonic() - self._join_started_at

    def _find_or_begin(self, serve: Serve) -> Generation | None:
        """Return the generation to belong to, or None to try again. Needs the lock."""
        if self._agents_file is None and not self._enter_launch():
            return None
        published = self.read()
        if published is None:
            return self._begin_first_generation(serve)
        if published.code is not None:
            return published
        if is_listening(published.host, published.port):
            return published if self._claim_node_id(published) else None
        if not self._may_replace(published) or self._must_serve_elsewhere():
            return None
        if not self._claim_node_id(published):
            return None
        return self._begin_generation(serve, published.number + 1, published.given_up)

    def _begin_first_generation(self, serve: Serve) -> Generation | None:
        if self._must_serve_elsewhere() or not self._claim_node_id(None):
            return None
        return self._begin_generation(serve, 1, ())

    def _must_serve_elsewhere(self) -> bool:
        """Return whether the user wants the first store on another node."""
        if self.current is not None or self._endpoint is None:
            return False
        return not is_local(self._endpoint[0])

    def _begin_generation(self, serve: Serve, number: int, given_up: tuple[int, ...]) -> Generation:
        port = 0
        if self.current is None and self._endpoint is not None:
            port = self._endpoint[1]
        generation = Generation(
            number, self.address, serve(port), self._job_digest, given_up=given_up
        )
        self._served_generation = number
        self._publish(generation)
        return generation

    def _may_replace(self, published: Generation) -> bool:
        """Return whether this agent may begin the next generation.

        The agents of the launch may when the store's node is lost. An agent that joins may when
        none of them did so in time, or none lives.
        """
        if self.current is None:
            if self._is_alone():
                return True
            return self._seconds_joining() >= NEW_AGENT_DELAY_S and self._is_store_node_silent()
        return self.current.number == published.number and self._is_store_node_silent()

    def _is_store_node_silent(self) -> bool:
        """Return whether the store's node no longer touches rendezvous.json. Needs the lock.

        The file system sets both times that are compared: the clocks of the nodes may differ.
        """
        lock_file = self.run_dir / RENDEZVOUS_LOCK_FILE
        self._touch(lock_file)
        # A network file system asks its server for the time of a file that is opened.
        with (self.run_dir / RENDEZVOUS_FILE).open("rb") as opened:
            touched_at = os.fstat(opened.fileno()).st_mtime
        return lock_file.stat().st_mtime - touched_at > STORE_NODE_SILENCE_S

    def _is_alone(self) -> bool:
        """Return whether no other agent lives, and stay registered as a living one."""
        assert self._agents_file is not None
        try:
            return try_lock(self._agents_file)
        finally:
            # No agent registers between the two calls: that needs rendezvous.lock.
            fcntl.flock(self._agents_file, fcntl.LOCK_SH)

    def _enter_launch(self) -> bool:
        """Become one of the launch's agents, or the first of a new one; False to try again."""
        self._agents_file = open_lock_file(self.run_dir / AGENTS_LOCK_FILE)
        if self._is_alone():
            entered = self._begin_launch()
        else:
            published = self.read()
            entered = self._may_join(published) and self._claim_node_id(published)
        if not entered:
            self.leave()
        return entered

    def _may_join(self, published: Generation | None) -> bool:
        """Return whether this agent may join the launch that runs here.

        Raises:
            InputError: The launch computes something else.
        """
        if published is None or published.code == DONE:
            return True
        if published.code is not None:
            return False  # the launch has failed or was stopped: its agents are about to exit
        if published.asked not in ("", self._job_digest):
            raise InputError(
                f"run directory {self.run_dir} is in use by a launch with another job or settings",
                "the same command on all its nodes, or another --run-dir",
            )
        return True

    def _begin_launch(self) -> bool:
        """Prepare the folder for a new launch.

        Returns:
            False if an earlier run was moved aside: this agent has to enter the new, empty folder.
        """
        wait = min(self.timeout, NODE_ID_TIMEOUT_S)
        holds_run = (self.run_dir / CONFIG_FILE).exists()
        if self._fresh and not self._has_moved_run and holds_run:
            move_run_dir_aside(self.run_dir, wait, is_multi_node=True)
            self._has_moved_run = True
            return False
        # A run on one machine may use the folder. It searches for agents once it has the folder's
        # lock, and this agent takes that lock while it is registered: one notices the other.
        owner = NO_OWNER if self._has_moved_run else None
        lock = open_lock(self.run_dir, wait, owner, is_multi_node=True)
        lock.release()
        if self._has_moved_run and (self.run_dir / CONFIG_FILE).exists():
            raise lock.make_in_use_error()
        for name in (RENDEZVOUS_FILE, SECRET_FILE):
            (self.run_dir / name).unlink(missing_ok=True)
        self.node_ids.reset()
        return self._claim_node_id(None)

    def _claim_node_id(self, published: Generation | None) -> bool:
        """Return whether this agent has an id.

        Raises:
            InputError: All ids have been in use for too long.
        """
        if self.node_ids.claim(published.given_up if published else ()):
            return True
        if self._seconds_joining() > min(self.timeout / 2, NODE_ID_TIMEOUT_S):
            raise InputError(
                f"run directory {self.run_dir} is in use by a launch that has its"
                f" {self.node_ids.max_nodes} nodes",
                "wait for it, stop it, or choose another --run-dir",
            )
        return False

    def poll(self, given_up: Collection[int] = ()) -> End | None:
        """Return how the launch has ended, as published a second ago at most; None if it runs.

        Args:
            given_up: Ids of the nodes that the others continue without, to be published.

        Raises:
            RendezvousMoved: A newer generation is published.
            NodeExcluded: The other nodes continue without this one.
        """
        polled_recently = time.monotonic() - self._polled_at < PUBLISHED_POLL_INTERVAL_S
        if polled_recently or self._joining or self.current is None:
            return self._published_end
        self._polled_at = time.monotonic()
        published = self.read()
        if published is None:
            self._published_end = None
            return None
        if self._served_generation == published.number:
            self._touch(self.run_dir / RENDEZVOUS_FILE)
        if published.number > self.current.number:
            raise RendezvousMoved
        if self.node_ids.own_id in published.given_up:
            raise NodeExcluded
        if not set(given_up) <= set(published.given_up):
            self._publish_given_up(given_up)
        self._published_end = published.end
        return self._published_end

    def _publish_given_up(self, node_ids: Collection[int]) -> None:
        # If it fails, the next poll tries again, or another node does.
        with suppress(OSError, InputError, StorageFault), self._locked() as is_locked:
            published = self.read() if is_locked else None
            if published is not None and published.number == self.number:
                given_up = tuple(sorted({*published.given_up, *node_ids}))
                self._publish(replace(published, given_up=given_up))

    def read_end(self) -> End | None:
        """Return how the launch has ended, as published now."""
        published = self.read()
        return None if published is None else published.end

    def end(self, code: int, text: str = "") -> int:
        """Publish that the launch has ended.

        Returns:
            The exit code that was published first: it holds for all nodes.
        """

        def publish() -> tuple[int, ...]:
            with self._locked() as is_locked:
                if is_locked:
                    return (self._publish_end(code, text),)
            return ()

        return next(iter(wait_until(publish, PUBLISH_END_TIMEOUT_S)), code)

    def _publish_end(self, code: int, text: str) -> int:
        published = self.read()
        if published is None:
            return code
        if published.code is not None:
            return published.code
        is_member = self.node_ids.own_id not in published.given_up
        if published.number == self.number and is_member:
            self._publish(replace(published, code=code, text=text))
        return code

    def read(self) -> Generation | None:
        """Return the published generation, or None if there is none that can be read."""
        try:
            return typed_file.parse_json(
                typed_file.read_file(self.run_dir / RENDEZVOUS_FILE), Generation
            )
        except (OSError, ValueError):
            return None

    def _publish(self, generation: Generation) -> None:
        path = self.run_dir / RENDEZVOUS_FILE
        with durable.name_write_errors(path, SHARED_DIR_HINT):
            durable.write(path, json.dumps(asdict(generation)) + "\n")

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Try to lock rendezvous.lock for the length of the block.

        Yields:
            False if another agent has the lock, or if the folder was moved aside meanwhile.
        """
        with as_input_error(f"run directory {self.run_dir} cannot be written", SHARED_DIR_HINT):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            lock = open_lock_file(self.run_dir / RENDEZVOUS_LOCK_FILE)
        try:
            yield self._try_lock(lock)
        finally:
            os.close(lock)

    def _try_lock(self, lock: int) -> bool:
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
        """Stop being one of the launch's agents."""
        if self._agents_file is not None:
            os.close(self._agents_file)
        self._agents_file = None
        self.node_ids.release()
