"""One node's part of a launch on several: an agent over the rendezvous that is opened here.

A script's agents meet as torchrun's do, a job's in a store that is published in the run directory.
The loss of the node that serves it, which would end torchelastic, begins a generation of the
rendezvous there.

torchelastic's own limits take 44 s to go on without a lost node, and some of its waits have no
limit at all."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from stepladder.core.address import is_listening, is_local
from stepladder.core.console import print_message
from stepladder.core.errors import FAILED, InputError
from stepladder.core.signing import ForgedError, load_or_make_secret, take_secret_from_env
from stepladder.launcher.nodes.agent import Agent
from stepladder.launcher.nodes.generation import Excluded, Moved
from stepladder.launcher.nodes.meeting import Meeting, Unpublished
from stepladder.launcher.nodes.own_node import OwnNode, interruptible
from stepladder.launcher.nodes.policy import GIVEN_UP, SECONDS_OF_SILENCE
from stepladder.launcher.nodes.rendezvous import SECRET_FILE, Rendezvous
from stepladder.launcher.nodes.trust import SignedBackend
from stepladder.launcher.options import NUMBERS, RendezvousSpec

SECONDS_TO_ANSWER = 30
# Clocks of nodes must agree to these 3 s.
LIMITS = {"last_call_timeout": 3.0, "keep_alive_interval": 1.0, "keep_alive_max_attempt": 3.0}


def run_on_nodes(node: OwnNode, spec: RendezvousSpec) -> int:
    """`node`'s part of a script. Returns the exit code when all nodes have ended. Raises
    InputError.
    """
    try:
        return Agent(
            node, Unpublished(), lambda check: interruptible(lambda: open_handler(spec), check)
        ).run()
    except RendezvousTimeoutError:
        print_message(f"fewer than {spec.nodes[0]} nodes came within {spec.timeout:g} s")
    except ForgedError as error:
        raise _foreign(spec.endpoint, "another port") from error
    except (RendezvousError, DistError) as error:
        print_message(
            f"the other nodes have ended, or the rendezvous is lost ({type(error).__name__})"
        )
    return FAILED


def _foreign(where: str, hint: str) -> InputError:
    return InputError(f"something else than this launch writes to the rendezvous at {where}", hint)


def open_handler(spec: RendezvousSpec) -> Meeting:
    """May wait for the node that serves the store. Raises InputError where it does not answer as
    one.
    """
    if spec.backend != "c10d":
        config: dict[str, Any] = {"rank": spec.node_rank, "timeout": int(spec.timeout), **spec.conf}
        parameters = RendezvousParameters(
            spec.backend, spec.endpoint, spec.run_id, *spec.nodes, spec.local_addr, **config
        )
        return Meeting(registry.get_rendezvous_handler(parameters), take_secret_from_env())
    given = {name: float(value) for name, value in spec.conf.items() if name in NUMBERS}
    limits = {"join_timeout": spec.timeout} | given
    return meeting_over(
        find_store(spec), spec.run_id, spec.nodes, spec.local_addr, limits, take_secret_from_env()
    )


def find_store(spec: RendezvousSpec) -> TCPStore:
    """Served here if the endpoint is this machine's and nobody else on it was first."""
    if is_local(spec.host) and spec.conf.get("is_host", "true").lower() in ("true", "1"):
        with suppress(DistError):
            return open_store(spec.host, spec.port, serves=True)
    deadline = time.monotonic() + spec.timeout
    while not is_listening(spec.host, spec.port):
        if time.monotonic() > deadline:
            raise InputError(
                f"no rendezvous answered at {spec.endpoint} within {spec.timeout:g} s",
                f"the same --rdzv-endpoint on all nodes, one of which is {spec.host}; no firewall between",
            )
        time.sleep(0.3)
    deadline = time.monotonic() + SECONDS_TO_ANSWER

    def check() -> None:
        if time.monotonic() > deadline:
            raise InputError(
                f"--rdzv-endpoint: port {spec.port} of {spec.host} is in use by something else",
                "another port",
            )

    # torch would wait for ever for what speaks otherwise
    return interruptible(lambda: open_store(spec.host, spec.port, serves=False), check)


def train_on_nodes(node: OwnNode, rendezvous: Rendezvous, nodes: tuple[int, int]) -> int:
    """`node`'s part of a job on nodes[0] to nodes[1] nodes. Returns the exit code. Raises
    InputError.
    """
    text = GIVEN_UP
    try:
        while node.restarts_left >= 0:
            allowed = node.restarts_left
            try:
                return Agent(
                    node, rendezvous, lambda check: open_generation(rendezvous, nodes, check)
                ).run()
            except RendezvousTimeoutError:
                text = f"fewer than {nodes[0]} nodes came within {rendezvous.timeout:g} s"
                break
            except Excluded:
                print_message(
                    "the others have heard nothing of this node and gone on without it: joining them again"
                )
            except (Moved, RendezvousError, DistError):
                print_message(f"the rendezvous of generation {rendezvous.number} is lost")
                node.restarts_left = min(allowed - 1, node.restarts_left)
        rendezvous.end(FAILED, text)
    except ForgedError as error:
        raise _foreign(
            f"{rendezvous.current}", "train again: the rendezvous gets another port"
        ) from error
    finally:
        rendezvous.leave()
    print_message(text)
    return FAILED


def open_generation(
    rendezvous: Rendezvous, nodes: tuple[int, int], check: Callable[[], None]
) -> Meeting:
    """The rendezvous of the generation to belong to; its store may be served here. check: may raise
    meanwhile.
    """
    served: list[TCPStore] = []

    def serve(port: int) -> int:
        try:
            served.append(open_store(rendezvous.address, port, serves=True))
        except DistError as error:
            if not port:
                raise
            raise InputError(
                f"--rdzv-endpoint: port {port} cannot be opened here", "another port"
            ) from error
        return served[0].port

    generation = rendezvous.join(serve, check)
    check()  # for one whose launch has ended, nobody may answer
    host, port = generation.host, generation.port
    store = (
        served[0] if served else interruptible(lambda: open_store(host, port, serves=False), check)
    )
    limit_silence(port)
    name, limits = f"generation-{generation.number}", {"join_timeout": rendezvous.timeout}
    return meeting_over(
        store,
        name,
        nodes,
        rendezvous.address,
        limits,
        load_or_make_secret(rendezvous.run_dir / SECRET_FILE),
    )


def open_store(host: str, port: int, serves: bool) -> TCPStore:
    """At host:port, where port 0 is any free one; one that does not serve waits for one that does."""
    return TCPStore(
        host,
        port,
        is_master=serves,
        wait_for_workers=False,
        timeout=timedelta(seconds=SECONDS_TO_ANSWER),
    )


def meeting_over(
    store: TCPStore,
    name: str,
    nodes: tuple[int, int],
    address: str,
    limits: Mapping[str, float],
    secret: str,
) -> Meeting:
    """A rendezvous of at least nodes[0] and at most nodes[1] agents. address: how the others reach
    this one.

    limits: torchelastic's, in seconds; join_timeout, for enough nodes to come, has to be among
    them."""
    limits = LIMITS | dict(limits)
    timeout = RendezvousTimeout(
        join=timedelta(seconds=limits["join_timeout"]),
        last_call=timedelta(seconds=limits["last_call_timeout"]),
    )
    backend = SignedBackend(C10dRendezvousBackend(store, name), secret, name)
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        name,
        store,
        backend,
        *nodes,
        address,
        timeout,
        keep_alive_interval=int(limits["keep_alive_interval"]),
        keep_alive_max_attempt=int(limits["keep_alive_max_attempt"]),
    )
    return Meeting(handler, secret, address, nodes[0], store)


def limit_silence(port: int) -> None:
    """Let the kernel end our connections to the store when its node falls silent: torch would wait
    for ever.
    """
    for found in psutil.Process().net_connections("tcp"):
        if found.raddr and found.raddr.port == port:
            with (
                suppress(OSError),
                socket.socket(fileno=os.dup(found.fd)) as connection,
            ):  # closed meanwhile
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
                connection.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SECONDS_OF_SILENCE)
                )
