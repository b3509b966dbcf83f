"""torchelastic's agent over ranks that are started as on one node.

torchelastic keeps the loop (rendezvous, start, look, restart) and who is a member. What it leaves open is
done here: ranks stop with a snapshot when a node joins, a bug is not restarted, and the launch ends on all
nodes with one exit code.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from stepladder.core.console import say
from stepladder.core.exit_codes import STOPPED
from stepladder.launcher.local.outcome import Failure, Outcome, Raised, Refused
from stepladder.launcher.nodes.rendezvous import Ended, Generation
from stepladder.rank.exit_record import read_end
from stepladder.rank.preemption import seconds_left

if TYPE_CHECKING:
    from stepladder.launcher.nodes.elastic import Node

SECONDS_FOR_OTHER_NODES = 5.0  # after ranks were stopped: to learn why
SECONDS_TO_FINISH, SECONDS_TO_FINISH_A_BATCH_JOB = 30.0, 300.0
BROKEN = "stepladder/broken"  # in the store, of a group of ranks of which some have failed
SECONDS_OF_SILENCE = 15.0  # of another node's agent, before its ranks count as lost


class Handler(DynamicRendezvousHandler):
    """torchelastic's, which can be left without closing it for the others."""

    def leave(self) -> None:
        self._stop_heartbeats()


def environments(worker_group: WorkerGroup, shared: dict[str, str]) -> list[dict[str, str]]:
    """Who each rank of this node is, and what they all are told."""
    return [
        {"RANK": str(w.global_rank), "WORLD_SIZE": str(w.world_size), "LOCAL_RANK": str(w.local_rank), **shared}
        for w in worker_group.workers
    ]


class Agent(SimpleElasticAgent):
    """torchelastic's loop (rendezvous, start, look, restart) over a `LocalGroup`, for one generation."""

    def __init__(self, node: Node, handler: Handler, generation: Generation) -> None:
        spec = WorkerSpec(
            "train", node.nproc, handler, entrypoint="stepladder", max_restarts=node.restarts_left,
            monitor_interval=0.01,
        )  # fmt: skip
        # Slurm ends all agents with the first that leaves with 75: others wait for a long last snapshot.
        patience = SECONDS_TO_FINISH if math.isinf(seconds_left()) else SECONDS_TO_FINISH_A_BATCH_JOB
        super().__init__(spec, exit_barrier_timeout=patience)
        self.node, self.group, self.rendezvous = node, node.group, node.rendezvous
        self.handler, self.generation = handler, generation
        self.code = 0
        self.outcome: Outcome | None = None
        self.ended = self.beaten = 0.0
        self.heard: dict[int, tuple[int, float]] = {}

    @property
    def restarts_left(self) -> int:
        return self._remaining_restarts

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with self._looking_up():
            super()._rendezvous(worker_group)
        if worker_group.group_rank == 0:
            nodes, ranks = worker_group.group_world_size, worker_group.workers[0].world_size
            say(f"generation {self.generation.number}: nodes {nodes}, ranks {ranks}")

    @contextmanager
    def _looking_up(self) -> Iterator[None]:
        """Leave a wait of torchelastic's, which may be long, where others have gone on or a signal came."""
        before = signal.signal(signal.SIGALRM, self._look_up)
        signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _look_up(self, *_: Any) -> None:
        if self.group.stop_asked:
            self._end_stopped("stopped before its ranks had started")
        self.rendezvous.check(working=False)

    def _end_stopped(self, text: str) -> NoReturn:
        """Slurm's SIGTERM may come because another node has failed: then that is how the launch has ended."""
        code = self.rendezvous.end(STOPPED)
        raise Ended(code, text if code == STOPPED else "ended, as on another node")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        shared = {
            "LOCAL_WORLD_SIZE": str(self.node.nproc),
            "MASTER_ADDR": str(worker_group.master_addr), "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.node.starts),
        }  # fmt: skip
        attempt = f"{self.generation.number}.{self.node.starts}"
        self.node.starts += 1
        self.outcome = None
        self.heard.clear()
        self.group.start(self.node.work, (self.node.settings,), environments(worker_group, shared), attempt)
        return dict(enumerate(self.group.pids))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before a restart: healthy ranks stop with a snapshot, so a node that joins costs no step."""
        if self.outcome is None:
            if not self._is_broken(worker_group):
                say("other nodes are waiting: ranks stop with a snapshot, and all go on together")
                self.group.tell_to_stop()
            while not self.group.poll() and not self._is_broken(worker_group):
                pass
            self.group.end()

    def _is_broken(self, worker_group: WorkerGroup) -> bool:
        """Whether ranks elsewhere have failed: ours would wait in vain for a common end."""
        return worker_group.store is not None and worker_group.store.check([BROKEN])

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """At the end of this generation. Where the launch has ended well, ranks here may still be finishing."""
        published = self.rendezvous.read()
        deadline = time.monotonic() + SECONDS_TO_FINISH
        while (
            published and published.code in (0, STOPPED) and not self.group.poll() and time.monotonic() < deadline
        ):
            pass
        self.group.end()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.rendezvous.check(working=self.outcome is None)
        silent = None
        if self.outcome is None:
            ended = self.group.poll()
            silent = None if ended else self._silent_node(worker_group)
            if not ended and silent is None:
                return RunResult(WorkerState.HEALTHY)
            self.outcome, self.ended = self.group.end(), time.monotonic()
            if silent is not None:
                say(f"node {silent} has been silent for {SECONDS_OF_SILENCE:g} s: restarting all without it")
        state = WorkerState.FAILED if silent is not None else self._judge(self.outcome)
        if state == WorkerState.FAILED and worker_group.store is not None:
            worker_group.store.set(BROKEN, "")
        values = {w.global_rank: self.code for w in worker_group.workers} if state == WorkerState.SUCCEEDED else {}
        return RunResult(state, values)

    def _silent_node(self, worker_group: WorkerGroup) -> int | None:
        """Node 0 listens to all nodes, the others to node 0: a lost node does not always close its connections."""
        now, store, own = time.monotonic(), worker_group.store, worker_group.group_rank
        if now - self.beaten < 1.0 or store is None:
            return None
        self.beaten = now
        store.add(f"stepladder/alive-{own}", 1)
        for node in range(1, worker_group.group_world_size) if own == 0 else [0]:
            count = store.add(f"stepladder/alive-{node}", 0)
            if count != self.heard.get(node, (-1, 0.0))[0]:
                self.heard[node] = count, now
            elif now - self.heard[node][1] > SECONDS_OF_SILENCE:
                return node
        return None

    def _judge(self, outcome: Outcome) -> WorkerState:
        """What the end of this node's ranks means for the run."""
        self.code = outcome.code
        if outcome.code == 0:
            return WorkerState.SUCCEEDED
        if outcome.code == STOPPED:
            return self._why_stopped()
        if isinstance(outcome, Refused):
            self.rendezvous.end(outcome.code, outcome.text)
            raise outcome.input_error
        assert isinstance(outcome, Failure)
        if outcome.is_consequence:
            say("a rank on another node was lost: restarting all from the last snapshot")
        elif self.group.stop_asked and outcome.is_by(signal.SIGTERM):
            self._end_stopped("stopped by the signal itself")  # outside its steps: what was saved is there
        elif self._is_bug(outcome) or self.group.stop_asked:
            self.rendezvous.end(1, outcome.text)
            raise Ended(1, "ended on all nodes")
        return WorkerState.FAILED

    def _why_stopped(self) -> WorkerState:
        """By a signal or the time limit, which end the launch; else for a node that joins: the agent will see."""
        if self.group.stop_asked:
            self.code = self.rendezvous.end(STOPPED)
            return WorkerState.SUCCEEDED
        said = read_end()
        if said is not None and said["late"]:
            self.rendezvous.end(STOPPED)
        published = self.rendezvous.read()
        if published is not None and published.code is not None:
            return WorkerState.SUCCEEDED
        soon = time.monotonic() - self.ended < SECONDS_FOR_OTHER_NODES
        return WorkerState.HEALTHY if soon else WorkerState.FAILED  # late: the others have gone on, so join them

    def _is_bug(self, outcome: Failure) -> bool:
        """As on one node; the step that failed before is in the store, for the rank may have moved."""
        store, key = self.node.store, "stepladder/failed-step"
        assert store is not None
        known = int(store.get(key)) if store.check([key]) else None
        self.node.judge.step = known
        bug = self.node.judge.is_bug(outcome)
        if isinstance(outcome, Raised) and outcome.error.step is not None:
            store.set(key, str(outcome.error.step))
        return bug
