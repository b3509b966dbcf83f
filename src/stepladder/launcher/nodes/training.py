"""One node of several that train a job: an agent, anew for each generation of the rendezvous.

The loss of the node that serves the rendezvous' store, which would end torchelastic, begins a generation here.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

from stepladder.core.console import say
from stepladder.core.errors import InputError
from stepladder.core.exit_codes import FAILED
from stepladder.launcher.nodes.agent import Agent
from stepladder.launcher.nodes.own_node import OwnNode
from stepladder.launcher.nodes.policy import GIVEN_UP
from stepladder.launcher.nodes.rendezvous import Moved, Rendezvous
from stepladder.launcher.nodes.store import handler_over, limit_silence, open_store
from stepladder.launcher.nodes.waiting import interruptible


def train_on_nodes(node: OwnNode, rendezvous: Rendezvous, nodes: tuple[int, int]) -> int:
    """`node`'s part of a launch on nodes[0] to nodes[1] nodes. Returns the exit code. Raises InputError."""
    try:
        while node.restarts_left >= 0:
            allowed = node.restarts_left
            try:
                return Agent(node, rendezvous, lambda check: open_generation(rendezvous, nodes, check)).run()
            except RendezvousTimeoutError:
                return give_up(rendezvous, f"fewer than {nodes[0]} nodes came within {rendezvous.timeout:g} s")
            except (Moved, RendezvousError, DistError):
                say(f"the rendezvous of generation {rendezvous.number} is lost")
                node.restarts_left = min(allowed - 1, node.restarts_left)
        return give_up(rendezvous, GIVEN_UP)
    finally:
        rendezvous.leave()


def give_up(rendezvous: Rendezvous, text: str) -> int:
    rendezvous.end(FAILED, text)
    say(text)
    return FAILED


def open_generation(
    rendezvous: Rendezvous, nodes: tuple[int, int], check: Callable[[], None]
) -> RendezvousHandler:
    """The rendezvous of the generation to belong to; its store may be served here. check: may raise meanwhile."""
    served: list[TCPStore] = []

    def serve(port: int) -> int:
        try:
            served.append(open_store(rendezvous.address, port, serves=True))
        except DistError as error:
            if not port:
                raise
            raise InputError(f"--rdzv-endpoint: port {port} cannot be opened here", "another port") from error
        return served[0].port

    generation = rendezvous.join(serve, check)
    check()  # for one whose launch has ended, nobody may answer
    host, port = generation.host, generation.port
    store = served[0] if served else interruptible(lambda: open_store(host, port, serves=False), check)
    limit_silence(port)
    name, limits = f"generation-{generation.number}", {"join_timeout": rendezvous.timeout}
    return handler_over(store, name, nodes, rendezvous.address, limits)
