"""`stepladder lab`: a real Slurm cluster on this machine, to practise on and to break."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from stepladder.cli.suggest import SuggestingGroup
from stepladder.cli.types import Whole
from stepladder.core.console import echo
from stepladder.core.errors import InputError

if TYPE_CHECKING:
    from stepladder.slurm.lab.lab import Lab


@click.group(
    name="lab",
    cls=SuggestingGroup,
    short_help="Start and break a real Slurm cluster on this machine.",
)
def command() -> None:
    """Start a real Slurm cluster on this machine, to practise on and to break.

    As root every node has its own network, host name and address; with --plain all are on the
    loopback address, and no root is needed. Needs the packages slurm-wlm and munge."""


@command.command()
@click.option(
    "--nodes",
    type=Whole(),
    default=2,
    show_default=True,
    help="Number of nodes. They are called n1, n2, ...",
)
@click.option(
    "--cpus", type=Whole(), default=4, show_default=True, help="CPUs that each node claims to have."
)
@click.option(
    "--gpus", type=Whole(), default=0, show_default=True, help="GPUs that each node claims to have."
)
@click.option("--plain", is_flag=True, help="Put all nodes on the loopback address; needs no root.")
def up(**flags: Any) -> None:
    """Start the cluster. The line on stdout is what a shell needs to use Slurm's own commands:

    eval "$(stepladder lab up --nodes 2)"
    """
    refuse_other_systems()
    from stepladder.slurm.lab.prepare import prepare_lab

    lab = prepare_lab(**flags)
    lab.up()
    layout = lab.layout
    names = ", ".join(node.name for node in layout.all_nodes)
    echo(f"lab: {names} with {layout.cpus} CPUs and {layout.gpus} pretended GPUs each", err=True)
    echo("next: stepladder lab status; stepladder lab down leaves nothing", err=True)
    echo(export_line(lab))


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def status(as_json: bool) -> None:
    """Show the nodes: state, address, processes, and whether the cable is cut."""
    lab = find()
    found = lab.status()
    if as_json:
        echo(json.dumps({"schema": 1, **found}))
        return
    for node in found["nodes"]:
        cut = ", cut off" if node["cut"] else ""
        echo(
            f"{node['name']}  {node['state']:<10} {node['address']}  {node['processes']} processes{cut}"
        )
    echo(export_line(lab))


@command.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--node",
    help="Run on this node, with its network, host name and address.  [default: outside, as a user]",
)
@click.argument("words", nargs=-1, required=True, metavar="-- CMD...", type=click.UNPROCESSED)
def exec(node: str | None, words: tuple[str, ...]) -> None:
    """Run CMD with SLURM_CONF set, in place of this process."""
    find().run_command(list(words), node)


@command.command()
@click.argument("node")
def fail(node: str) -> None:
    """Kill NODE's slurmd and everything else on it, as if the power went."""
    echo(f"{node}: {find().fail(node)} processes killed")


@command.command()
@click.argument("node")
def cut(node: str) -> None:
    """Pull NODE's network cable; its processes go on."""
    find().cut(node)
    echo(f"{node}: cut off")


@command.command()
@click.argument("node")
def heal(node: str) -> None:
    """Plug NODE's cable in, and start its slurmd if it was killed."""
    find().heal(node)
    echo(f"{node}: cable in, slurmd running")


@command.command()
def down() -> None:
    """End the cluster and everything that runs on it. Nothing is left."""
    find().down()
    echo("lab: down")


def refuse_other_systems() -> None:
    if sys.platform != "linux":
        raise InputError(
            f"a lab needs Linux, and this is {sys.platform}",
            "a virtual machine with Debian or Ubuntu",
        )


def find() -> Lab:
    refuse_other_systems()
    from stepladder.slurm.lab.lab import Lab

    return Lab.load_running()


def export_line(lab: Lab) -> str:
    return f"export SLURM_CONF={lab.layout.conf}"
