"""One node of several: an agent of torchelastic, anew for each generation of the rendezvous.

Imports torch, for torchelastic is part of it; so it is itself imported only where there are several nodes.
The loss of the node that serves the rendezvous store, which ends torchelastic, begins a generation here.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import psutil
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from stepladder.core.console import say
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.launcher.local.group import LocalGroup
from stepladder.launcher.local.outcome import Failure
from stepladder.launcher.local.ranks import end_badly
from stepladder.launcher.nodes.agent import Agent, Handler
from stepladder.launcher.nodes.rendezvous import Ended, Generation, Moved, Rendezvous

# torchelastic's defaults take 44 s to go on without a lost node. Clocks of nodes must agree to these 3 s.
SECONDS_FOR_LATE_NODES = 3
SECONDS_BETWEEN_HEARTBEATS, HEARTBEATS_MISSED = 1, 3
SECONDS_TO_ANSWER = 30


class Node:
    """This machine's part of the launch, over the generations of its rendezvous."""

    def __init__(
        self,
        work: Callable[[Settings], int],
        settings: Settings,
        rendezvous: Rendezvous,
        nodes: tuple[int, int],
        nproc: int,
        restarts_left: int,
        group: LocalGroup,
    ) -> None:
        self.work, self.settings, self.rendezvous, self.nodes, self.nproc = (
            work,
            settings,
            rendezvous,
            nodes,
            nproc,
        )
        self.restarts_left, self.group, self.judge = restarts_left, group, group.judge
        self.store: TCPStore | None = None
        self.starts = 0

    def run(self) -> int:
        """The exit code, when the launch has ended on all nodes."""
        for name in ("torch.distributed.elastic", SimpleElasticAgent.__module__):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters is said here
        # A store shared with the ranks would be remembered by nodes that stay when its node goes.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        try:
            return self._run()
        except Ended as end:
            say(end.text or "the run has ended on the other nodes")
            return end.code
        finally:
            self.rendezvous.leave()

    def _run(self) -> int:
        """Generation after generation."""
        while True:
            generation = self.rendezvous.join(self._serve)
            if generation.code is not None:
                raise Ended(generation.code, generation.text)
            agent: Agent | None = None
            try:
                agent = self._agent(generation)
                return self._finish(agent)
            except RendezvousTimeoutError:
                self._give_up(f"fewer than {self.nodes[0]} nodes came within {self.settings.timeout:g} s")
            except (Moved, RendezvousError, DistError):
                say(f"the rendezvous of generation {generation.number} is lost")
                if agent is not None:
                    self.restarts_left = min(self.restarts_left - 1, agent.restarts_left)
                self.store = None
            if self.restarts_left < 0:
                self._give_up("given up: --max-restarts are used")

    def _finish(self, agent: Agent) -> int:
        try:
            result = agent.run()
        finally:
            agent.handler.leave()
        if result is None or result.is_failed():
            end_badly(agent.outcome if isinstance(agent.outcome, Failure) else None)
            self._give_up("given up: --max-restarts are used")
        self.rendezvous.end(agent.code)
        with suppress(Exception):  # the store may have left already
            agent.handler.shutdown()
        return agent.code

    def _give_up(self, text: str) -> None:
        self.rendezvous.end(1, text)
        raise Ended(1, text)

    def _serve(self, port: int) -> int:
        self.store = self._open(self.rendezvous.address, port, True)
        return self.store.port

    def _open(self, host: str, port: int, serves: bool) -> TCPStore:
        try:
            return TCPStore(
                host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=SECONDS_TO_ANSWER)
            )
        except DistError as error:
            if serves and port:
                raise InputError(f"--rdzv-endpoint: port {port} cannot be opened here", "another port") from error
            raise

    def _agent(self, generation: Generation) -> Agent:
        if self.store is None:
            self.store = self._open(generation.host, generation.port, False)
        limit_silence(generation.port)
        name = f"generation-{generation.number}"
        timeout = timedelta(seconds=self.settings.timeout)
        handler = Handler.from_backend(
            name, self.store, C10dRendezvousBackend(self.store, name), *self.nodes, self.rendezvous.address,
            RendezvousTimeout(join=timeout, last_call=timedelta(seconds=SECONDS_FOR_LATE_NODES)),
            keep_alive_interval=SECONDS_BETWEEN_HEARTBEATS, keep_alive_max_attempt=HEARTBEATS_MISSED,
        )  # fmt: skip
        return Agent(self, handler, generation)


def limit_silence(port: int) -> None:
    """Let the kernel end our connections to the store when its node falls silent: torch would wait for ever."""
    for found in psutil.Process().net_connections("tcp"):
        if found.raddr and found.raddr.port == port:
            with suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:  # closed meanwhile
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)
