"""One node of several that run a script: torchelastic's agent, with ranks that are started as on one node.

Imports torch, for torchelastic is part of it; so it is itself imported only where there are several nodes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from stepladder.core.address import answers, is_local
from stepladder.core.console import say
from stepladder.core.errors import InputError
from stepladder.core.exit_codes import STOPPED
from stepladder.launcher.local.group import LocalGroup
from stepladder.launcher.local.outcome import Failure, Outcome, Refused, Success
from stepladder.launcher.local.ranks import end_badly
from stepladder.launcher.nodes.agent import environments
from stepladder.launcher.nodes.rendezvous_flags import RendezvousSpec
from stepladder.launcher.options import Options
from stepladder.launcher.script import Script

T = TypeVar("T")
# torchelastic's defaults take 44 s to go on without a lost node.
SECONDS_FOR_LATE_NODES = 3
SECONDS_BETWEEN_HEARTBEATS, HEARTBEATS_MISSED = 1, 3
SECONDS_TO_ANSWER = 20
SECONDS_FOR_THE_CAUSE = 8.0  # after ranks failed here because others did: until that node has said why
SECONDS_FOR_OTHERS_TO_STOP = 30.0


def open_handler(spec: RendezvousSpec) -> RendezvousHandler:
    """May wait for the node that serves the store. Raises InputError where it does not answer as one."""
    if spec.backend != "c10d":
        config: dict[str, Any] = {"rank": spec.node_rank, "timeout": int(spec.timeout), **spec.conf}
        parameters = RendezvousParameters(
            spec.backend, spec.endpoint, spec.run_id, *spec.nodes, spec.local_addr, **config
        )
        return registry.get_rendezvous_handler(parameters)
    given = {name: float(value) for name, value in spec.conf.items() if value.replace(".", "", 1).isdigit()}
    conf = {
        "join_timeout": spec.timeout, "last_call_timeout": SECONDS_FOR_LATE_NODES,
        "keep_alive_interval": SECONDS_BETWEEN_HEARTBEATS, "keep_alive_max_attempt": HEARTBEATS_MISSED,
    } | given  # fmt: skip
    store = open_store(spec)
    return DynamicRendezvousHandler.from_backend(
        spec.run_id, store, C10dRendezvousBackend(store, spec.run_id), *spec.nodes, spec.local_addr,
        RendezvousTimeout(timedelta(seconds=conf["join_timeout"]), timedelta(seconds=conf["last_call_timeout"])),
        keep_alive_interval=int(conf["keep_alive_interval"]),
        keep_alive_max_attempt=int(conf["keep_alive_max_attempt"]),
    )  # fmt: skip


def open_store(spec: RendezvousSpec) -> TCPStore:
    """Served here if the endpoint is this machine's and nobody else on it was first."""

    def connect(serves: bool) -> TCPStore:
        seconds = timedelta(seconds=SECONDS_TO_ANSWER)
        return TCPStore(spec.host, spec.port, None, serves, seconds, wait_for_workers=False, multi_tenant=True)

    if is_local(spec.host) and spec.conf.get("is_host", "true").lower() in ("true", "1"):
        with suppress(DistError):
            return connect(serves=True)
    deadline = time.monotonic() + spec.timeout
    while not answers(spec.host, spec.port):
        if time.monotonic() > deadline:
            raise InputError(
                f"no rendezvous answered at {spec.endpoint} within {spec.timeout:g} s",
                f"the same --rdzv-endpoint on all nodes, one of which is {spec.host}; no firewall between",
            )
        time.sleep(0.3)
    started = time.monotonic()

    def check() -> None:
        if time.monotonic() - started > SECONDS_TO_ANSWER:
            raise InputError(
                f"--rdzv-endpoint: port {spec.port} of {spec.host} is in use by something else",
                "another port",
            )

    return waiting(lambda: connect(serves=False), check)  # torch would wait for ever for what speaks otherwise


class Stopped(Exception):
    """A signal came while no ranks ran."""


class ScriptAgent(SimpleElasticAgent):
    """torchelastic's loop (rendezvous, start, look, restart) over a script's ranks."""

    def __init__(
        self,
        group: LocalGroup,
        script: Script,
        options: Options,
        handler: RendezvousHandler,
        nproc: int,
        local_addr: str,
    ) -> None:
        spec = WorkerSpec(
            options.role, nproc, handler, entrypoint="script", max_restarts=options.max_restarts,
            monitor_interval=0.01, local_addr=local_addr,
        )  # fmt: skip
        super().__init__(spec)
        self.group, self.script, self.handler = group, script, handler
        self.code, self.attempt, self.running = 0, -1, False
        self.outcome: Outcome = Success()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        waiting(lambda: super(ScriptAgent, self)._rendezvous(worker_group), self._check)
        if worker_group.group_rank == 0:
            nodes, ranks = worker_group.group_world_size, worker_group.workers[0].world_size
            say(f"nodes {nodes}, ranks {ranks}")

    def _agree_on_attempt(self, worker_group: WorkerGroup) -> int:
        """A number that is new for each start, and the same on all nodes, which count restarts differently."""
        store, key = worker_group.store, "stepladder/attempt"
        assert store is not None
        store.set(f"{key}-{worker_group.group_rank}", str(self.attempt))
        return 1 + max(int(store.get(f"{key}-{node}")) for node in range(worker_group.group_world_size))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.attempt = self._agree_on_attempt(worker_group)
        shared = {
            "LOCAL_WORLD_SIZE": str(len(worker_group.workers)),
            "GROUP_RANK": str(worker_group.group_rank), "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "MASTER_ADDR": str(worker_group.master_addr), "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.handler.use_agent_store),
        }  # fmt: skip
        self.group.start(self.script.work, (), environments(worker_group, shared), str(self.attempt))
        self.running = True
        return dict(enumerate(self.group.pids))

    def _exit_barrier(self) -> None:
        """Stopped ranks end with 75, on other nodes perhaps later; Slurm ends all with the first agent."""
        patience = time.monotonic() + SECONDS_FOR_OTHERS_TO_STOP

        def check() -> None:
            if self.code != STOPPED or time.monotonic() > patience:
                self._check()

        with suppress(Stopped):
            waiting(super()._exit_barrier, check)

    def _check(self) -> None:
        if self.group.stop_asked:
            raise Stopped

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before a restart for a node that joins; ranks that have failed were ended already."""
        if self.running:
            say("other nodes have come or gone: restarting all ranks")
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        if self.running:
            self.group.end()
            self.running = False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.group.poll():
            return RunResult(WorkerState.HEALTHY)
        self.outcome, self.running = self.group.end(), False
        outcome, self.code = self.outcome, self.outcome.code
        if isinstance(outcome, Success):
            return RunResult(
                WorkerState.SUCCEEDED, dict.fromkeys((w.global_rank for w in worker_group.workers), 0)
            )
        key = f"stepladder/first-failure-{self.attempt}"
        store = worker_group.store
        assert store is not None
        told = ""
        with suppress(DistError):  # its node has gone
            if isinstance(outcome, Refused) or not outcome.is_consequence:
                store.set(key, f"node {worker_group.group_rank}: {outcome.text}")
            elif wait_for(lambda: store.check([key]), SECONDS_FOR_THE_CAUSE):
                told = store.get(key).decode(errors="replace")
        if isinstance(outcome, Refused):
            raise outcome.input_error
        if told:
            say(f"ended by {told}")
        else:
            self.group.judge.show(outcome)
        if self.group.stop_asked:
            raise Stopped
        return RunResult(WorkerState.FAILED)


def run_on_several_nodes(
    group: LocalGroup, script: Script, options: Options, spec: RendezvousSpec, nproc: int
) -> int:
    """This node's part. Returns the exit code when all nodes have ended. Raises InputError."""
    for name in ("torch.distributed.elastic", SimpleElasticAgent.__module__):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters is said here
    # Ranks get a store of their own for each start: in the agents' they would find the addresses of the dead.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    handler: RendezvousHandler | None = None

    def check() -> None:
        if group.stop_asked:
            raise Stopped

    try:
        handler = waiting(lambda: open_handler(spec), check)
        agent = ScriptAgent(group, script, options, handler, nproc, spec.local_addr)
        result = agent.run()
        if result is not None and not result.is_failed():
            return agent.code
        return end_badly(agent.outcome if isinstance(agent.outcome, Failure) else None)
    except Stopped:
        return end_badly(None, group.stop_asked)
    except RendezvousTimeoutError:
        say(f"fewer than {spec.nodes[0]} nodes came within {spec.timeout:g} s")
    except (RendezvousError, DistError) as error:
        say(f"the other nodes have ended, or the rendezvous is lost ({type(error).__name__})")
    finally:
        if handler is not None and not group.stop_asked:
            with suppress(Exception):  # the store may have left already
                handler.shutdown()
    return 1


def waiting(function: Callable[[], T], check: Callable[[], None]) -> T:
    """`function()` in a thread: torch's waits would hold back signals for minutes. Ends when `check()` raises."""
    result: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            result.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        check()
    if errors:
        raise errors[0]
    return result[0]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
