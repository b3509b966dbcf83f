"""`stepladder run SCRIPT`: an unmodified script on one node or several, with torchrun's flags."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from stepladder.cli.types import NAME, PATH, PORT, Seconds, WholeNumber
from stepladder.core.console import print_message
from stepladder.core.settings import validate_run_dir
from stepladder.launcher.allocation import start_elsewhere
from stepladder.launcher.nodes.local_node import exit_if_threads_wait
from stepladder.launcher.options import DEFAULT_SIGNALS, Options
from stepladder.launcher.run import prepare_run
from stepladder.launcher.script import Script
from stepladder.launcher.topology import Topology
from stepladder.rank.exit_record import EndWriter
from stepladder.train.job_source import validate_not_job

FLAGS_WITHOUT_EFFECT = (
    "event-log-handler",
    "logs-specs",
    "numa-binding",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "monitor-interval",
)


def flag(*names: str, **attributes: Any) -> Callable[..., Any]:
    """Return the decorator of a flag that torchrun has too, with its environment variable PET_NAME.

    Args:
        *names: Its spellings, torchrun's last.
        **attributes: Those of `click.option`.
    """
    parameter = names[-1].lstrip("-").replace("-", "_")
    return click.option(*names, parameter, envvar=f"PET_{parameter.upper()}", **attributes)


def add_flags_without_effect(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add torchrun's flags that have no effect here."""
    for name in FLAGS_WITHOUT_EFFECT:
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
    help="Address at which the machines meet: the host is one of them, the port is free.",
)
@flag(
    "--local-addr",
    default="",
    help="Address under which other machines reach this one."
    "  [default: of the interface that leads to them]",
)
@flag(
    "-m",
    "--module",
    is_flag=True,
    help="SCRIPT is a module, as in `python -m`.",
)
@flag(
    "--no-python",
    is_flag=True,
    help="SCRIPT is a command, not Python.",
)
@flag(
    "--max-restarts",
    type=WholeNumber(),
    help="How often to restart all ranks after a failure.  [default: 0; 3 where a range is given]",
)
@click.option(
    "--run-dir",
    type=PATH,
    help="Folder for logs and for the times of optimizer steps, which `report` and `watch` read.",
)
@flag(
    "--log-dir",
    type=PATH,
    help="Folder for a copy of each rank's output.",
)
@flag(
    "--start-method",
    type=click.Choice(["forkserver", "fork", "spawn"]),
    default="forkserver",
    help="How ranks start. With spawn each is a new interpreter and imports torch itself."
    "  [default: forkserver]",
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
@flag(
    "--standalone",
    is_flag=True,
    help="Use this machine alone, whatever the --rdzv-* flags say.",
)
@flag(
    "--rdzv-backend",
    default="",
    help="c10d or static.  [default: c10d; static with --node-rank]",
)
@flag(
    "--rdzv-id",
    default="none",
    help="Name of the job, where several jobs meet at one endpoint.",
)
@flag(
    "--rdzv-conf",
    default="",
    metavar="KEY=VALUE,...",
    help="Further rendezvous settings, as for torchrun.",
)
@flag(
    "--node-rank",
    type=WholeNumber(),
    help="Number of this machine, from 0; use it with --master-addr.",
)
@flag(
    "--master-addr",
    default="",
    help="Address of machine 0; use it with --node-rank.",
)
@flag(
    "--master-port",
    type=PORT,
    help="[default: a free one; 29500 with --master-addr]",
)
@flag(
    "--role",
    default="default",
    help="Value of ROLE_NAME for the ranks.",
)
@flag(
    "--signals-to-handle",
    default=",".join(DEFAULT_SIGNALS),
    help=f"Signals on which the ranks are asked to end.  [default: {','.join(DEFAULT_SIGNALS)}]",
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
    help="Seconds without progress after which the reason is printed."
    "  [default: 60, at most half of --timeout]",
)
@click.option(
    "--end-after",
    type=Seconds(),
    help="Seconds without progress after which the ranks are ended, or restarted."
    "  [default: never]",
)
@click.option(
    "--simulate-gpus",
    "--pretend-gpus",
    "pretend_gpus",
    type=WholeNumber(1),
    metavar="N",
    help="Run a script for CUDA and NCCL on N CPU ranks, without a GPU.",
)
@flag("--run-path", is_flag=True, hidden=True)
@add_flags_without_effect
@click.argument("script", type=NAME)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> int:
    """Run SCRIPT, unmodified, with ARGS on every process.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set for each process. All flags of
    torchrun are accepted, in both spellings. In a Slurm allocation the command starts itself on all
    nodes.
    """
    to_run = Script.from_arguments(
        script, args, flags["module"], flags["no_python"], flags["start_method"] == "spawn"
    )
    if to_run.kind == "file":
        validate_not_job(Path(to_run.name))
    if flags["pretend_gpus"]:
        simulate_gpus(flags["pretend_gpus"])
    topology = make_topology(flags)
    options = Options.from_flags(flags, elastic=":" in topology.nodes + topology.nproc)
    for name in FLAGS_WITHOUT_EFFECT:
        if flags[name.replace("-", "_")]:
            print_message(f"--{name} has no effect here")
    code = start_elsewhere(
        ctx.obj,
        flags["hosts"],
        flags["ssh"],
        topology,
    )
    if code is not None:
        return code
    if topology.note:
        print_message(topology.note)
    if flags["run_dir"] is None:
        work = prepare_run(to_run, options, topology)
    else:
        from stepladder.tools.report.launches import run_recorded, validate_script_run_dir

        validate_run_dir(flags["run_dir"])
        validate_script_run_dir(flags["run_dir"])
        run_ranks = prepare_run(to_run, options, topology)
        work = partial(
            run_recorded,
            flags["run_dir"],
            to_run.name,
            run_ranks,
        )
    with EndWriter() as end:
        end.code = work()
    return exit_if_threads_wait(end.code)


def make_topology(flags: dict[str, Any]) -> Topology:
    """Return the nodes and processes that flags or a rented cluster's variables describe."""
    nproc = flags["nproc_per_node"] or ""
    if flags["pretend_gpus"]:
        nproc = nproc or str(flags["pretend_gpus"])
    if flags["standalone"] or flags["pretend_gpus"]:
        return Topology("1", nproc)
    nodes = flags["nnodes"] or ""
    topology = Topology(
        nodes,
        nproc,
        flags["rdzv_endpoint"],
        flags["local_addr"],
        hosts=flags["hosts"],
    )
    return topology.with_cluster_variables()


def simulate_gpus(gpus: int) -> None:
    """Print it, and let every Python process started from here simulate CUDA on the CPU."""
    from stepladder.tools.check.startup_variables import simulated_gpu_variables

    os.environ.update(simulated_gpu_variables(gpus))
    print_message(
        f"{gpus} GPUs are simulated: CUDA is the CPU, and nccl is gloo;"
        " times and memory mean nothing"
    )
