"""One node's part of a launch on several nodes: an agent, and the rendezvous that it needs.

The agents of a script meet as torchrun's do. Those of a job meet in a store whose address is
published in the run directory. torchelastic ends with the node that serves the store; here its loss
begins a new generation of the rendezvous.

torchelastic's default limits take 44 s to continue without a lost node, and some of its waits have
no limit at all.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
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
from stepladder.core.waiting import wait_until
from stepladder.launcher.nodes.agent import Agent
from stepladder.launcher.nodes.generation import NodeExcluded, RendezvousMoved
from stepladder.launcher.nodes.local_node import LocalNode, wait_interruptibly
from stepladder.launcher.nodes.open_rendezvous import OpenRendezvous, UnpublishedRendezvous
from stepladder.launcher.nodes.policy import GIVEN_UP, NODE_SILENCE_S
from stepladder.launcher.nodes.run_dir_rendezvous import SECRET_FILE, RunDirRendezvous
from stepladder.launcher.nodes.signed_backend import SignedBackend
from stepladder.launcher.options import CONF_NUMBERS, RendezvousSpec

STORE_TIMEOUT_S = 30
STORE_POLL_INTERVAL_S = 0.3
KEEPALIVE_S = 5
CONNECTION_OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): KEEPALIVE_S,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): KEEPALIVE_S,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): int(1000 * NODE_SILENCE_S),
}
# torchelastic's limits. The clocks of the nodes must agree to these 3 s.
RENDEZVOUS_LIMITS = {
    "last_call_timeout": 3.0,
    "keep_alive_interval": 1.0,
    "keep_alive_max_attempt": 3.0,
}


def run_on_nodes(node: LocalNode, spec: RendezvousSpec) -> int:
    """Run this node's part of a script.

    Returns:
        The exit code, when all nodes have ended.

    Raises:
        InputError: The rendezvous cannot be opened, or something else writes to it.
    """  # noqa: DOC501 - _make_foreign_writer_error makes an InputError

    def open_rendezvous(check: Callable[[], None]) -> OpenRendezvous:
        return wait_interruptibly(lambda: _open_script_rendezvous(spec), check)

    try:
        return Agent(node, UnpublishedRendezvous(), open_rendezvous).run()
    except RendezvousTimeoutError:
        print_message(f"fewer than {spec.nodes[0]} nodes came within {spec.timeout:g} s")
    except ForgedError as error:
        raise _make_foreign_writer_error(spec.endpoint, "another port") from error
    except (RendezvousError, DistError) as error:
        print_message(
            f"the other nodes have ended, or the rendezvous is lost ({type(error).__name__})"
        )
    return FAILED


def _make_foreign_writer_error(where: str, hint: str) -> InputError:
    return InputError(f"something else than this launch writes to the rendezvous at {where}", hint)


def _open_script_rendezvous(spec: RendezvousSpec) -> OpenRendezvous:
    """Open the rendezvous of a script's agents.

    This may wait for the node that serves the store.

    Returns:
        The rendezvous, which this node has not joined yet.

    Raises:
        InputError: No store answers at the endpoint.
    """
    if spec.backend != "c10d":
        config: dict[str, Any] = {"rank": spec.node_rank, "timeout": int(spec.timeout), **spec.conf}
        parameters = RendezvousParameters(
            spec.backend, spec.endpoint, spec.run_id, *spec.nodes, spec.local_addr, **config
        )
        return OpenRendezvous(registry.get_rendezvous_handler(parameters), take_secret_from_env())
    conf = {name: float(value) for name, value in spec.conf.items() if name in CONF_NUMBERS}
    limits = {"join_timeout": spec.timeout} | conf
    store = open_or_find_store(spec)
    return make_rendezvous(
        store, spec.run_id, spec.nodes, spec.local_addr, limits, take_secret_from_env()
    )


def open_or_find_store(spec: RendezvousSpec) -> TCPStore:
    """Serve the store if the endpoint is on this machine and still free, else connect to it.

    Returns:
        The store, connected.

    Raises:
        InputError: No store answers at the endpoint, or another program uses its port.
    """
    may_serve = spec.conf.get("is_host", "true").lower() in ("true", "1")
    if may_serve and is_local(spec.host):
        with suppress(DistError):
            return _open_store(spec.host, spec.port, serves=True)
    why = f"waiting for the rendezvous at {spec.endpoint}"
    if not wait_until(partial(is_listening, spec.host, spec.port), spec.timeout, why):
        raise InputError(
            f"no rendezvous answered at {spec.endpoint} within {spec.timeout:g} s",
            f"the same --rdzv-endpoint on all nodes, one of which is {spec.host};"
            " no firewall between",
        )
    deadline = time.monotonic() + STORE_TIMEOUT_S

    def check() -> None:
        if time.monotonic() > deadline:
            raise InputError(
                f"--rdzv-endpoint: port {spec.port} of {spec.host} is in use by something else",
                "another port",
            )

    # If another protocol answers at the port, torch waits for ever.
    return wait_interruptibly(lambda: _open_store(spec.host, spec.port, serves=False), check)


def train_on_nodes(node: LocalNode, rendezvous: RunDirRendezvous, nodes: tuple[int, int]) -> int:
    """Run this node's part of a job.

    Args:
        node: This node.
        rendezvous: The rendezvous in the run directory.
        nodes: The smallest and the largest number of nodes.

    Returns:
        The exit code, when all nodes have ended.

    Raises:
        InputError: The rendezvous cannot be opened, or something else writes to it.
    """  # noqa: DOC501 - _make_foreign_writer_error makes an InputError

    def open_rendezvous(check: Callable[[], None]) -> OpenRendezvous:
        return open_generation(rendezvous, nodes, check)

    text = GIVEN_UP
    try:
        while node.restarts_left >= 0:
            restarts_allowed = node.restarts_left
            try:
                return Agent(node, rendezvous, open_rendezvous).run()
            except RendezvousTimeoutError:
                text = f"fewer than {nodes[0]} nodes came within {rendezvous.timeout:g} s"
                break
            except NodeExcluded:
                print_message(
                    "the other nodes have not heard from this one and continued without it:"
                    " it joins them again"
                )
            except (RendezvousMoved, RendezvousError, DistError):
                print_message(f"the rendezvous of generation {rendezvous.number} is lost")
                node.limit_restarts(restarts_allowed - 1)
        rendezvous.end(FAILED, text)
    except ForgedError as error:
        hint = "train again: the rendezvous gets another port"
        raise _make_foreign_writer_error(f"{rendezvous.current}", hint) from error
    finally:
        rendezvous.leave()
    print_message(text)
    return FAILED


def open_generation(
    rendezvous: RunDirRendezvous, nodes: tuple[int, int], check: Callable[[], None]
) -> OpenRendezvous:
    """Open the rendezvous of the current generation; this process may serve its store.

    Args:
        rendezvous: The rendezvous in the run directory.
        nodes: The smallest and the largest number of nodes.
        check: Called while this waits; an exception from it abandons the wait.

    Returns:
        The rendezvous, whose store is served and connected.

    Raises:
        InputError: This process is to serve the store, and the port of --rdzv-endpoint cannot be
            opened.
    """
    served: list[TCPStore] = []

    def serve(port: int) -> int:
        try:
            store = _open_store(rendezvous.address, port, serves=True)
        except DistError as error:
            if not port:
                raise
            raise InputError(
                f"--rdzv-endpoint: port {port} cannot be opened here", "another port"
            ) from error
        served.append(store)
        return store.port

    generation = rendezvous.join(serve, check)
    check()  # if the launch has ended, its store may be gone
    host, port = generation.host, generation.port
    if served:
        store = served[0]
    else:
        store = wait_interruptibly(lambda: _open_store(host, port, serves=False), check)
    _set_connection_timeouts(port)
    return make_rendezvous(
        store,
        f"generation-{generation.number}",
        nodes,
        rendezvous.address,
        {"join_timeout": rendezvous.timeout},
        load_or_make_secret(rendezvous.run_dir / SECRET_FILE),
    )


def _open_store(host: str, port: int, serves: bool) -> TCPStore:
    """Serve a store, or connect to one and wait until it is served.

    Args:
        host: The address of the node that serves the store.
        port: The port of the store; 0 serves it at any free port.
        serves: Whether this process serves the store.

    Returns:
        The store, whose operations fail after STORE_TIMEOUT_S seconds.
    """
    return TCPStore(
        host,
        port,
        is_master=serves,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
    )


def make_rendezvous(
    store: TCPStore,
    name: str,
    nodes: tuple[int, int],
    address: str,
    limits: Mapping[str, float],
    secret: str,
) -> OpenRendezvous:
    """Make a rendezvous of agents over a store.

    Args:
        store: Holds the state of the rendezvous.
        name: Distinguishes the rendezvous from others in the same store.
        nodes: The smallest and the largest number of agents.
        address: The address at which other nodes reach this one.
        limits: The limits of torchelastic, in seconds. `join_timeout`, the time for enough agents
            to join, is required.
        secret: The secret of the launch, which signs the state.

    Returns:
        The rendezvous, which this agent has not joined yet.
    """
    limits = RENDEZVOUS_LIMITS | dict(limits)
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
    return OpenRendezvous(handler, secret, address, nodes[0], store)


def _set_connection_timeouts(port: int) -> None:
    """Let the kernel end this process's connections to the store when its node falls silent.

    Without this torch waits for ever.
    """
    for info in psutil.Process().net_connections("tcp"):
        if not info.raddr or info.raddr.port != port:
            continue
        # torch may close the connection meanwhile.
        with suppress(OSError), socket.socket(fileno=os.dup(info.fd)) as connection:
            for (level, option), value in CONNECTION_OPTIONS.items():
                connection.setsockopt(level, option, value)
