"""The command `slurm-lab`: a real Slurm cluster on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from slurm_lab import LabError, __version__, get_lab_folder

if TYPE_CHECKING:
    from slurm_lab import Lab

DONE = 0
BAD_INPUT = 2
INTERRUPTED = 130
DESCRIPTION = """\
Start a real Slurm cluster on this machine. As root every node has its own network, host name and
address; with --plain all nodes are on the loopback address, and no root is needed. Needs the
packages slurm-wlm and munge.
"""


class _LabParser(argparse.ArgumentParser):
    """A parser whose errors are one line with a hint, as all errors of the command."""

    def error(self, message: str) -> NoReturn:
        """Raise LabError about arguments that the command does not have."""
        raise LabError(message, f"{self.prog} --help")


def main(args: list[str] | None = None) -> int:
    """Run a command line.

    Args:
        args: The arguments, by default those of this process.

    Returns:
        The exit code.
    """
    try:
        options = _make_parser().parse_args(args)
        options.run(options)
        sys.stdout.flush()
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as in `slurm-lab status | head -1`
        # The interpreter flushes stdout once more at its end, and would report the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, whose result has the function to call in `run`."""
    parser = _LabParser(prog="slurm-lab", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"slurm-lab {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start the cluster, and print the line that a shell needs")
    up.set_defaults(run=_start)
    up.add_argument("--nodes", type=int, default=2, help="number of nodes: n1, n2, ... [2]")
    up.add_argument("--cpus", type=int, default=4, help="CPUs that each node claims to have [4]")
    up.add_argument("--gpus", type=int, default=0, help="GPUs that each node claims to have [0]")
    up.add_argument("--plain", action="store_true", help="all nodes on the loopback address")
    up.add_argument(
        "--accounting", action="store_true", help="slurmdbd and its database, for sacct"
    )

    status = commands.add_parser("status", help="show each node's state, address and processes")
    status.set_defaults(run=_show_status)
    status.add_argument("--json", action="store_true", help="as one JSON object")

    execute = commands.add_parser("exec", help="run a command with SLURM_CONF set")
    execute.set_defaults(run=_execute_command)
    execute.add_argument("--node", help="on this node, with its network, host name and address")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD...")

    node_commands = {
        "fail": (_fail_node, "kill everything on a node, as a loss of power does"),
        "cut": (_cut_node, "cut a node off the network; its processes continue"),
        "heal": (_heal_node, "connect a node again, and start its slurmd if it was killed"),
    }
    for name, (function, text) in node_commands.items():
        node_command = commands.add_parser(name, help=text)
        node_command.set_defaults(run=function)
        node_command.add_argument("node")

    down = commands.add_parser("down", help="end the cluster and all its jobs, remove its files")
    down.set_defaults(run=_stop)
    return parser


def _start(options: argparse.Namespace) -> None:
    """Start a cluster."""
    from slurm_lab import LabSize, prepare_lab, validate_system

    validate_system()
    size = LabSize(
        nodes=options.nodes,
        cpus=options.cpus,
        gpus=options.gpus,
        plain=options.plain,
        accounting=options.accounting,
    )
    lab = prepare_lab(size, get_lab_folder())
    lab.up()
    recording = "on, for sacct" if size.accounting else "off; --accounting starts slurmdbd"
    print(f"lab: {lab.layout.describe()}", file=sys.stderr)
    print(f"accounting: {recording}", file=sys.stderr)
    print("next: slurm-lab status; slurm-lab down removes everything", file=sys.stderr)
    print(lab.layout.export_line)


def _show_status(options: argparse.Namespace) -> None:
    """Print the state of the nodes."""
    lab = _find_lab()
    if options.json:
        print(json.dumps({"schema": 1, **lab.status()}))
        return
    for line in lab.describe_nodes():
        print(line)
    print(lab.layout.export_line)


def _execute_command(options: argparse.Namespace) -> None:
    """Replace this process by a command."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LabError("exec has no command", "slurm-lab exec -- srun -N2 hostname")
    _find_lab().run_command(command, options.node)


def _fail_node(options: argparse.Namespace) -> None:
    """Kill all processes of a node."""
    print(f"{options.node}: {_find_lab().fail(options.node)} processes killed")


def _cut_node(options: argparse.Namespace) -> None:
    """Pull the network cable of a node."""
    _find_lab().cut(options.node)
    print(f"{options.node}: cut off")


def _heal_node(options: argparse.Namespace) -> None:
    """Restore the power and the network cable of a node."""
    _find_lab().heal(options.node)
    print(f"{options.node}: cable in, slurmd running")


def _stop(options: argparse.Namespace) -> None:
    """End the cluster."""
    _find_lab().down()
    print("lab: down")


def _find_lab() -> Lab:
    """Return this user's lab."""
    from slurm_lab import Lab, validate_system

    validate_system()
    return Lab.load_running(get_lab_folder())
