"""`stepladder lab`: a real Slurm cluster on this machine, for practice."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from stepladder.cli.suggest import SuggestingGroup
from stepladder.cli.types import AsJson, Natural, Words
from stepladder.core.console import echo, echo_json
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

    As root every node has its own network, host name and address; with --plain all nodes are on the
    loopback address, and no root is needed. Needs the packages slurm-wlm and munge.
    """


@command.command()
def up(*, nodes: Natural = 2, cpus: Natural = 4, gpus: Natural = 0, plain: bool = False) -> None:
    """Start the cluster, and print the line that a shell needs for Slurm's own commands.

    eval "$(stepladder lab up --nodes 2)"

    Args:
        nodes: Number of nodes. They are called n1, n2, ...
        cpus: CPUs that each node claims to have.
        gpus: GPUs that each node claims to have.
        plain: Put all nodes on the loopback address; needs no root.
    """
    _validate_system()
    from stepladder.slurm.lab.prepare import prepare_lab

    lab = prepare_lab(nodes=nodes, cpus=cpus, gpus=gpus, plain=plain)
    lab.up()
    layout = lab.layout
    names = ", ".join(node.name for node in layout.all_nodes)
    echo(f"lab: {names} with {layout.cpus} CPUs and {layout.gpus} simulated GPUs each", err=True)
    echo("next: stepladder lab status; stepladder lab down removes everything", err=True)
    echo(_export_line(lab))


@command.command()
def status(*, as_json: AsJson = False) -> None:
    """Show the nodes: state, address, processes, and whether their network is cut."""
    lab = _find_lab()
    state = lab.status()
    if as_json:
        echo_json(state)
        return
    for node in state["nodes"]:
        cut = ", cut off" if node["cut"] else ""
        echo(
            f"{node['name']}  {node['state']:<10} {node['address']}"
            f"  {node['processes']} processes{cut}"
        )
    echo(_export_line(lab))


@command.command(context_settings={"ignore_unknown_options": True})
def exec(command_line: Words, *, node: str | None = None) -> None:
    """Run CMD with SLURM_CONF set, in place of this process.

    Args:
        command_line (-- CMD...): The command to run.
        node: Run on this node, with its network, host name and address.  [default: outside, as a
            user]
    """
    _find_lab().run_command(list(command_line), node)


@command.command()
def fail(node: str) -> None:
    """Kill NODE's slurmd and everything else on it, as a loss of power does."""
    echo(f"{node}: {_find_lab().fail(node)} processes killed")


@command.command()
def cut(node: str) -> None:
    """Cut NODE off the network; its processes continue."""
    _find_lab().cut(node)
    echo(f"{node}: cut off")


@command.command()
def heal(node: str) -> None:
    """Connect NODE to the network again, and start its slurmd if it was killed."""
    _find_lab().heal(node)
    echo(f"{node}: cable in, slurmd running")


@command.command()
def down() -> None:
    """End the cluster and everything that runs on it, and remove its files."""
    _find_lab().down()
    echo("lab: down")


def _validate_system() -> None:
    """Raise InputError where this machine cannot run a lab."""
    if sys.platform != "linux":
        raise InputError(
            f"a lab needs Linux, and this is {sys.platform}",
            "a virtual machine with Debian or Ubuntu",
        )


def _find_lab() -> Lab:
    """Return the lab that runs on this machine."""
    _validate_system()
    from stepladder.slurm.lab.lab import Lab

    return Lab.load_running()


def _export_line(lab: Lab) -> str:
    """Return the shell command that Slurm's own commands need."""
    return f"export SLURM_CONF={lab.layout.conf}"
