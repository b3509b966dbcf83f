"""`stepladder lab`: a real Slurm cluster on this machine, for practice; a front of slurm_lab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stepladder.cli.suggest import SuggestingGroup
from stepladder.cli.types import AsJson, Natural, Words
from stepladder.core.console import echo, echo_json
from stepladder.slurm.own_lab import LAB_COMMAND, as_stepladder_error, get_lab_folder

if TYPE_CHECKING:
    from slurm_lab import Lab


class _LabGroup(SuggestingGroup):
    """A group whose commands raise the errors of a lab as stepladder's."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was typed."""
        with as_stepladder_error():
            return super().invoke(ctx)


@click.group(
    name="lab", cls=_LabGroup, short_help="Start and break a real Slurm cluster on this machine."
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
    from slurm_lab import LabSize, prepare_lab, validate_system

    validate_system()
    lab = prepare_lab(LabSize(nodes, cpus, gpus, plain), get_lab_folder())
    lab.up()
    echo(f"lab: {lab.layout.describe()}", err=True)
    echo(f"next: {LAB_COMMAND} status; {LAB_COMMAND} down removes everything", err=True)
    echo(lab.layout.export_line)


@command.command()
def status(*, as_json: AsJson = False) -> None:
    """Show the nodes: state, address, processes, and whether their network is cut."""
    lab = _find_lab()
    if as_json:
        echo_json(lab.status())
        return
    for line in lab.describe_nodes():
        echo(line)
    echo(lab.layout.export_line)


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


def _find_lab() -> Lab:
    """Return the lab that runs on this machine."""
    from slurm_lab import Lab, validate_system

    validate_system()
    return Lab.load_running(get_lab_folder())
