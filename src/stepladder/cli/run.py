"""stepladder run SCRIPT: any script, unmodified, on one node or several; every flag of torchrun is
understood.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from stepladder.cli.types import NAME, PATH, PORT, Seconds, Whole
from stepladder.core.console import print_message
from stepladder.core.settings import validate_run_dir
from stepladder.launcher.allocation import dispatch
from stepladder.launcher.nodes.own_node import end_process_if_waiting
from stepladder.launcher.options import SIGNALS, Options
from stepladder.launcher.run import prepared
from stepladder.launcher.script import Script
from stepladder.launcher.topology import Topology
from stepladder.rank.exit_record import EndWriter
from stepladder.train.job_source import validate_not_job

NO_EFFECT = (
    "event-log-handler",
    "logs-specs",
    "numa-binding",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "monitor-interval",
)


def flag(*names: str, **about: Any) -> Callable[..., Any]:
    """A flag that torchrun has too, with its environment variable PET_NAME. The last name is
    torchrun's.
    """
    last = names[-1].lstrip("-").replace("-", "_")
    return click.option(*names, last, envvar=f"PET_{last.upper()}", **about)


def without_effect(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in NO_EFFECT:
        command = flag(f"--{name}", hidden=True)(command)
    return command


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # torchrun's second spelling
    },
)
@flag(
    "--nproc",
    "--nproc-per-node",
    metavar="N|A:B|auto|gpu|cpu",
    help="Processes per machine.  [default: 1]",
)
@flag(
    "--nodes",
    "--nnodes",
    metavar="N|A:B",
    help="Machines. Type the same command on each of them.  [default: 1]",
)
@click.option(
    "--hosts",
    default="",
    metavar="[USER@]HOST[:PORT],...",
    help="Start the job on these machines, over SSH. The first one leads.",
)
@click.option(
    "--ssh",
    default="ssh",
    metavar="COMMAND",
    help="The SSH command to use, for example 'ssh -i KEY'.  [default: ssh]",
)
@flag(
    "--rdzv-endpoint",
    default="",
    metavar="HOST:PORT",
    help="Address at which the machines meet: one of them, and a free port.",
)
@flag(
    "--local-addr",
    default="",
    help="Address under which other machines reach this one.  [default: the address that leads there]",
)
@flag("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@flag("--no-python", is_flag=True, help="SCRIPT is a command, not Python.")
@flag(
    "--max-restarts",
    type=Whole(),
    help="How often to restart all ranks after a failure.  [default: 0; 3 where a range is given]",
)
@click.option(
    "--run-dir",
    type=PATH,
    help="Folder for the times of its optimizer steps, which report and watch read, and for its logs.",
)
@flag("--log-dir", type=PATH, help="Folder for a copy of each rank's output.")
@flag(
    "--start-method",
    type=click.Choice(["forkserver", "fork", "spawn"]),
    default="forkserver",
    help="How ranks start. With spawn each is a new interpreter and imports torch itself.  [default: forkserver]",
)
@flag(
    "-r",
    "--redirects",
    default="0",
    help="Streams that go to the log only: 1 stdout, 2 stderr, 3 both; 0:1,1:2 chooses by rank.",
)
@flag("-t", "--tee", default="0", hidden=True)
@flag(
    "--local-ranks-filter",
    default="",
    metavar="0,1",
    help="Local ranks whose output is shown.  [default: all]",
)
@flag("--standalone", is_flag=True, help="Use this machine alone, whatever the --rdzv-* flags say.")
@flag(
    "--rdzv-backend",
    default="",
    help="c10d or static.  [default: c10d; static with --node-rank]",
)
@flag("--rdzv-id", default="none", help="Name of the job, where several jobs meet at one endpoint.")
@flag(
    "--rdzv-conf",
    default="",
    metavar="KEY=VALUE,...",
    help="Further rendezvous settings, as for torchrun.",
)
@flag(
    "--node-rank", type=Whole(), help="Number of this machine, from 0; use it with --master-addr."
)
@flag("--master-addr", default="", help="Address of machine 0; use it with --node-rank.")
@flag("--master-port", type=PORT, help="[default: a free one; 29500 with --master-addr]")
@flag("--role", default="default", help="Value of ROLE_NAME for the ranks.")
@flag(
    "--signals-to-handle",
    default=",".join(SIGNALS),
    help=f"Signals on which the ranks are asked to end.  [default: {','.join(SIGNALS)}]",
)
@flag(
    "--shutdown-timeout",
    type=Seconds(0),
    default=30.0,
    help="Seconds that the ranks may take to end.  [default: 30]",
)
@flag(
    "--virtual-local-rank", is_flag=True, help="Give every rank LOCAL_RANK 0 and one visible GPU."
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=600.0,
    help="Seconds that machines wait for each other.  [default: 600]",
)
@click.option(
    "--explain-after",
    type=Seconds(),
    help="Seconds without progress after which the reason is printed.  [default: 60, at most half of --timeout]",
)
@click.option(
    "--end-after",
    type=Seconds(),
    help="Seconds without progress after which the ranks are ended, or restarted.  [default: never]",
)
@click.option(
    "--pretend-gpus",
    type=Whole(1),
    metavar="N",
    help="Run a script for CUDA and NCCL on N CPU ranks: a rehearsal, without a GPU.",
)
@flag("--run-path", is_flag=True, hidden=True)
@without_effect
@click.argument("script", type=NAME)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> int:
    """Run SCRIPT, unmodified, with ARGS on every process.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set for each. All flags of
    torchrun are understood, in both spellings. In a Slurm allocation it starts itself on all nodes.
    """
    found = Script.find(
        script, args, flags["module"], flags["no_python"], flags["start_method"] == "spawn"
    )
    if found.kind == "file":
        validate_not_job(Path(found.name))
    topology = Topology(
        flags["nnodes"] or "",
        flags["nproc_per_node"] or "",
        flags["rdzv_endpoint"],
        flags["local_addr"],
    )
    if flags["pretend_gpus"]:
        topology = Topology("1", flags["nproc_per_node"] or str(flags["pretend_gpus"]))
        pretend(flags["pretend_gpus"])
    topology = Topology("1", topology.nproc) if flags["standalone"] else topology.completed()
    options = Options.read(flags, elastic=":" in topology.nodes + topology.nproc)
    for name in NO_EFFECT:
        if flags[name.replace("-", "_")]:
            print_message(f"--{name} has no effect here")
    code = dispatch(ctx.obj, flags["hosts"], flags["ssh"], topology)
    if code is not None:
        return code
    if topology.note:
        print_message(topology.note)
    if flags["run_dir"] is None:
        work = prepared(found, options, topology)
    else:
        from stepladder.tools.report.launches import launched, refuse_place

        validate_run_dir(flags["run_dir"])
        refuse_place(flags["run_dir"])
        work = partial(launched, flags["run_dir"], found.name, prepared(found, options, topology))
    with EndWriter() as end:
        end.code = work()
    return end_process_if_waiting(end.code)


def pretend(gpus: int) -> None:
    """Say so, and let every interpreter from here on take CUDA for the CPU."""
    from stepladder.tools.check.environment import pretending

    os.environ.update(pretending(gpus))
    print_message(
        f"{gpus} GPUs are pretended: CUDA is the CPU, and nccl is gloo; times and memory mean nothing"
    )
