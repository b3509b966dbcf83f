"""The nodes of one start, as the agents exchange values through the store of their rendezvous."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from stepladder.core.signing import ForgedError
from stepladder.launcher.diagnose.inquiry import Inquiry
from stepladder.launcher.nodes.local_node import NodeInfo
from stepladder.launcher.nodes.policy import NODE_SILENCE_S
from stepladder.launcher.nodes.signed_board import SignedBoard

LAUNCH_SCOPE = "stepladder"  # scope of keys that belong to no single start
INTRODUCTION_POLL_INTERVAL_S = 0.05
HEARTBEAT_INTERVAL_S = 1.0
PEERS_POLL_INTERVAL_S = 0.1
# After ranks here failed because others did: time for the other node to report why.
CAUSE_TIMEOUT_S = 8.0
BROKEN_KEY = "broken"
CAUSE_KEY = "cause"
ENDED_KEY = "ended"
FAILED_KEY = "failed"


def open_start_board(shared_store: Store, attempt: int, secret: str) -> SignedBoard:
    """Return the board for the values of one start."""
    return SignedBoard(shared_store, f"{LAUNCH_SCOPE}/start-{attempt}", secret)


class Peers:
    """The nodes of one start.

    Args:
        store: The store of this rendezvous round.
        index: The index of this node, below `node_count`.
        node_count: The number of nodes, lost ones included.
        secret: Signs the values.
        clock: Returns seconds.
        shared_store: The store of all starts, by default `store`.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        node_count: int,
        secret: str,
        clock: Callable[[], float] = time.monotonic,
        shared_store: Store | None = None,
    ) -> None:
        self.store = store
        self.index = index
        self.node_count = node_count
        self.secret = secret
        self.clock = clock
        self.shared_store = shared_store or store
        # The values of this start; before `begin_start` those of no start.
        self.board = open_start_board(self.shared_store, -1, secret)
        # The inquiry of all agents into why ranks wait.
        self.inquiry = Inquiry(self.board, index, node_count)
        # The number of ranks at the start.
        self.world_size = 0
        # The first rank of this node; None if it joined running ranks.
        self.first_rank: int | None = None
        # Host and port where each agent listens, see liveness.py.
        self.liveness_addresses: dict[int, tuple[str, int]] = {}
        # The ids of the nodes, see node_ids.py.
        self.node_ids: dict[int, int] = {}
        # The nodes that the others continue without.
        self.lost_nodes: set[int] = set()
        self._next_free_rank = 0
        self._own_beats = 0
        self._last_beat_at = clock() - HEARTBEAT_INTERVAL_S
        # By node: its heartbeat counter, and when that last changed.
        self._heartbeats: dict[int, tuple[int, float]] = {}

    def introduce(self, own_info: NodeInfo) -> NodeInfo:
        """Exchange the infos of all nodes, and begin the start.

        Args:
            own_info: What this node tells the others.

        Returns:
            This node's info, with the number of the start and what the nodes agreed on.

        Raises:
            ForgedError: A value was not written by this launch.
            DistError: A node does not introduce itself.
        """
        infos = self._exchange_infos(json.dumps(asdict(own_info)))
        rank_counts = [info["nproc"] for info in infos]
        self.first_rank = sum(rank_counts[: self.index])
        attempt, step = max(info["failed"] for info in infos)
        known = NodeInfo(
            own_info.nproc,
            1 + max(info["attempt"] for info in infos),
            (attempt, step),
            tuple(infos[0]["master"]),
        )
        for node, info in enumerate(infos):
            self.register_peer(node, info)
        self.begin_start(known.attempt, sum(rank_counts))
        self.board.write(f"node-{self.index}", json.dumps(asdict(own_info)))
        return known

    def _exchange_infos(self, own_json: str) -> list[Any]:
        """Return the info of each node of this start, and of no earlier start.

        A store may hold signed values of earlier starts, either because the rendezvous has one
        store for all starts, or because an attacker writes them again. So each node draws a nonce,
        and repeats the nonces of all nodes with its info. An info that repeats this node's nonce
        was written after this node drew it.

        Args:
            own_json: The info of this node, as JSON.

        Returns:
            The parsed info of each node, in the order of the nodes.

        Raises:
            DistError: A node has not written its info within the timeout of the store.
        """
        deadline = self.clock() + self.store.timeout.total_seconds()  # type: ignore[attr-defined]
        board = SignedBoard(self.store, LAUNCH_SCOPE, self.secret)
        nonce_keys = [f"drawn-{node}" for node in range(self.node_count)]
        info_keys = [f"node-{node}" for node in range(self.node_count)]
        nonce = secrets.token_hex(16)
        board.write(nonce_keys[self.index], nonce)
        repeated: list[str] = []
        while True:
            nonces = board.read_all(nonce_keys)
            if nonces != repeated:
                board.write(info_keys[self.index], json.dumps({"drawn": nonces, "own": own_json}))
                repeated = nonces
            records = [json.loads(text) for text in board.read_all(info_keys)]
            own_slot = slice(self.index, self.index + 1)
            all_are_new = all(record["drawn"][own_slot] == [nonce] for record in records)
            if all_are_new and board.read_all(nonce_keys) == repeated:
                return [json.loads(record["own"]) for record in records]
            if self.clock() > deadline:
                raise DistError("a node of this start does not introduce itself")
            time.sleep(INTRODUCTION_POLL_INTERVAL_S)

    def register_peer(self, node: int, info: Mapping[str, Any]) -> None:
        """Store what is needed of a node's `NodeInfo` after the start."""
        self.liveness_addresses[node] = tuple(info["liveness_address"])
        self.node_ids[node] = info["node_id"]

    def begin_start(self, attempt: int, world_size: int) -> None:
        """Use the board of this start from now on."""
        self.board = open_start_board(self.shared_store, attempt, self.secret)
        self.inquiry = Inquiry(self.board, self.index, self.node_count)
        self.world_size = world_size
        self._next_free_rank = world_size

    def assign_ranks(self, nproc: int) -> Sequence[int]:
        """Return the numbers of this node's ranks."""
        if self.first_rank is None:
            return [self.claim_rank() for _ in range(nproc)]
        return range(self.first_rank, self.first_rank + nproc)

    def claim_rank(self) -> int:
        """Return a rank number beyond those of the start, which no other node has."""
        claim = f"{self.index} {secrets.token_hex(8)}"
        while self.board.write_if_absent(f"rank-{self._next_free_rank}", claim) != claim:
            self._next_free_rank += 1
        return self._next_free_rank

    def add_joined_nodes(self) -> None:
        """Add the nodes that have joined since the last call."""
        while self.board.has(key := f"node-{self.node_count}"):
            self.register_peer(self.node_count, json.loads(self.board.read(key)))
            self.node_count += 1
            self.inquiry.set_members(self.living_nodes)

    @property
    def living_nodes(self) -> list[int]:
        """The nodes that are not lost."""
        return [node for node in range(self.node_count) if node not in self.lost_nodes]

    def update_living_nodes(self) -> list[int]:
        """Return the living nodes, without those that another node has marked as lost."""
        others = [node for node in self.living_nodes if node != self.index]
        self.lost_nodes |= {node for node in others if self.is_marked_lost(node)}
        return self.living_nodes

    def is_marked_lost(self, node: int) -> bool:
        """Return whether some node has marked this one as lost."""
        return self.board.has(f"lost-{node}")

    def mark_lost(self, node: int) -> None:
        """Tell all nodes that they continue without this one."""
        self.lost_nodes.add(node)
        self.board.write(f"lost-{node}")

    def exclude_nodes(self, nodes: Collection[int]) -> None:
        """Continue without these nodes, as all have agreed."""
        self.lost_nodes |= set(nodes)
        self.inquiry.set_members(self.living_nodes)

    @property
    def monitored_nodes(self) -> list[int]:
        """The nodes that this one monitors: the first living node monitors all, the others it."""
        first, *others = self.living_nodes
        return others if self.index == first else [first]

    def find_silent_node(self, limit: float = NODE_SILENCE_S) -> int | None:
        """Write a heartbeat, and return a node whose heartbeat has stopped, or None.

        The heartbeat finds lost nodes whose connections stay open.

        Args:
            limit: The number of seconds that a node may be without a heartbeat.

        Returns:
            The index of the first node found to be silent; None if there is none, or if the last
            heartbeat was written less than HEARTBEAT_INTERVAL_S seconds ago.

        Raises:
            ForgedError: An earlier heartbeat of a node has been written again, so the store is not
                trusted.
        """
        now = self.clock()
        if now - self._last_beat_at < HEARTBEAT_INTERVAL_S:
            return None
        self._last_beat_at = now
        self._write_heartbeat()
        for node, beats in self._read_heartbeats(self.monitored_nodes).items():
            last, changed_at = self._heartbeats.get(node, (-1, now))
            if beats < last:
                raise ForgedError
            if beats > last:
                self._heartbeats[node] = (beats, now)
            elif now - changed_at > limit:
                return node
        return None

    def _write_heartbeat(self) -> None:
        key = f"alive-{self.index}"
        if self._own_beats and self.board.read(key) != str(self._own_beats):
            raise ForgedError
        self._own_beats += 1
        self.board.write(key, str(self._own_beats))

    def _read_heartbeats(self, nodes: Sequence[int]) -> dict[int, int]:
        """Return the heartbeat counter of each node, 0 for one that has not written any."""

        def has_written(node: int) -> bool:
            beats, _ = self._heartbeats.get(node, (0, 0.0))
            return beats > 0 or self.board.has(f"alive-{node}")

        counters = dict.fromkeys(nodes, 0)
        beating = [node for node in nodes if has_written(node)]
        if beating:
            texts = self.board.read_all([f"alive-{node}" for node in beating])
            counters.update(zip(beating, map(int, texts), strict=True))
        return counters

    def report_broken(self) -> None:
        """Report that ranks here have failed, or are about to be restarted."""
        with suppress(DistError):  # if the store's node is lost, all nodes notice that anyway
            self.board.write(BROKEN_KEY)

    @property
    def is_broken(self) -> bool:
        """Whether a node has reported that its ranks failed or restart."""
        return self.board.has(BROKEN_KEY)

    def report_cause(self, text: str) -> None:
        """Report why ranks here have failed, where no other node caused it."""
        with suppress(DistError):
            self.board.write(CAUSE_KEY, f"node {self.index}: {text}")

    def wait_for_cause(self, seconds: float = CAUSE_TIMEOUT_S) -> str:
        """Return the cause that another node reports within so many seconds, else ""."""
        with suppress(DistError, ForgedError):
            if self._wait_for(lambda: self.board.has(CAUSE_KEY), lambda: seconds):
                return self.board.read(CAUSE_KEY)
        return ""

    def report_failed(self) -> None:
        """Report that the launch has failed here, so no node needs to wait for this one's ranks."""
        with suppress(DistError):
            self.board.write(FAILED_KEY)

    def wait_for_end(
        self, timeout: Callable[[], float], meanwhile: Callable[[], object] = lambda: None
    ) -> bool:
        """Wait until the ranks of all nodes have ended, or one node has failed.

        Args:
            timeout: Returns the seconds to wait; called again and again, for they may change.
            meanwhile: Called between two polls.

        Returns:
            False if the timeout has passed.
        """

        def have_ended() -> bool:
            meanwhile()
            if self.board.has(FAILED_KEY):
                return True
            return self.board.has(*(f"{ENDED_KEY}-{node}" for node in self.living_nodes))

        with suppress(DistError):  # the store's node exits once it has seen all end
            self.board.write(ENDED_KEY)
            self.board.write(f"{ENDED_KEY}-{self.index}")
            return self._wait_for(have_ended, timeout)
        return True

    def _wait_for(self, condition: Callable[[], bool], timeout: Callable[[], float]) -> bool:
        started_at = self.clock()
        while not condition():
            if self.clock() - started_at >= timeout():
                return False
            time.sleep(PEERS_POLL_INTERVAL_S)
        return True
