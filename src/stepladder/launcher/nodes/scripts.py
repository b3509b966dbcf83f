"""One node of several that run a script."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

from stepladder.core.address import answers, is_local
from stepladder.core.console import say
from stepladder.core.errors import InputError
from stepladder.core.exit_codes import FAILED
from stepladder.launcher.nodes.agent import Agent, Unpublished
from stepladder.launcher.nodes.own_node import OwnNode
from stepladder.launcher.nodes.rendezvous_flags import RendezvousSpec
from stepladder.launcher.nodes.store import SECONDS_TO_ANSWER, handler_over, open_store
from stepladder.launcher.nodes.waiting import interruptible


def run_on_nodes(node: OwnNode, spec: RendezvousSpec) -> int:
    """`node`'s part. Returns the exit code when all nodes have ended. Raises InputError."""
    try:
        return Agent(node, Unpublished(), lambda check: interruptible(lambda: open_handler(spec), check)).run()
    except RendezvousTimeoutError:
        say(f"fewer than {spec.nodes[0]} nodes came within {spec.timeout:g} s")
    except (RendezvousError, DistError) as error:
        say(f"the other nodes have ended, or the rendezvous is lost ({type(error).__name__})")
    return FAILED


def open_handler(spec: RendezvousSpec) -> RendezvousHandler:
    """May wait for the node that serves the store. Raises InputError where it does not answer as one."""
    if spec.backend != "c10d":
        config: dict[str, Any] = {"rank": spec.node_rank, "timeout": int(spec.timeout), **spec.conf}
        parameters = RendezvousParameters(
            spec.backend, spec.endpoint, spec.run_id, *spec.nodes, spec.local_addr, **config
        )
        return registry.get_rendezvous_handler(parameters)
    given = {name: float(value) for name, value in spec.conf.items() if value.replace(".", "", 1).isdigit()}
    limits = {"join_timeout": spec.timeout} | given
    return handler_over(find_store(spec), spec.run_id, spec.nodes, spec.local_addr, limits)


def find_store(spec: RendezvousSpec) -> TCPStore:
    """Served here if the endpoint is this machine's and nobody else on it was first."""
    if is_local(spec.host) and spec.conf.get("is_host", "true").lower() in ("true", "1"):
        with suppress(DistError):
            return open_store(spec.host, spec.port, serves=True)
    deadline = time.monotonic() + spec.timeout
    while not answers(spec.host, spec.port):
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
                f"--rdzv-endpoint: port {spec.port} of {spec.host} is in use by something else", "another port"
            )

    # torch would wait for ever for what speaks otherwise
    return interruptible(lambda: open_store(spec.host, spec.port, serves=False), check)
