"""`stepladder train RECIPE|FILE.py`: flags from the job's Config, read as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stepladder.cli.options import JobCommand, json_flag, traceback_flag, train_flags
from stepladder.cli.types import ANY_INTEGER, JOB, NAME, PATH, MemorySize, Seconds, WholeNumber
from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings, TrainRequest
from stepladder.launcher.allocation import start_elsewhere
from stepladder.launcher.entry import Launch, start
from stepladder.launcher.topology import Topology
from stepladder.rank.preemption import parse_fail_at


@click.command(cls=JobCommand)
@click.argument("job", metavar="RECIPE|FILE.py", type=JOB)
@click.option(
    "--nproc",
    default="",
    metavar="N|A:B|auto|gpu|cpu",
    help="Processes on this machine. A:B starts B, and continues with as few as A.  [default: 1]",
)
@click.option(
    "--nodes",
    default="",
    metavar="N|A:B",
    help="Machines. Type the same command on each of them, with one shared run directory."
    "  [default: 1]",
)
@click.option(
    "--hosts",
    default="",
    metavar="HOST,...",
    help="Start the job on these machines, over SSH. The first one leads.",
)
@click.option(
    "--ssh",
    default="ssh",
    metavar="COMMAND",
    help="The SSH command to use, for example 'ssh -i KEY'.  [default: ssh]",
)
@click.option(
    "--rdzv-endpoint",
    default="",
    metavar="HOST:PORT",
    help="Address at which the machines first meet.  [default: anywhere]",
)
@click.option(
    "--local-addr",
    default="",
    help="Address under which other machines reach this one.  [default: its host name]",
)
@train_flags(
    "epochs",
    "global-batch",
    "microbatch",
    "lr",
    "warmup-steps",
    "seed",
)
@train_flags(
    "sync",
    "shard",
    "shard-copies",
    "checkpoint-blocks",
    "device",
    "precision",
    "compile",
    "capture",
)
@train_flags("threads", "data-dir")
@click.option(
    "--steps",
    type=ANY_INTEGER,
    help="Stop after this many optimizer steps, if --epochs would be longer.",
)
@click.option(
    "--batch-per-rank",
    type=ANY_INTEGER,
    help="Samples per process, instead of --global-batch;"
    " the global batch then grows with the processes.",
)
@click.option(
    "--lr-scale",
    type=click.Choice(["none", "sqrt", "linear"]),
    help="With --batch-per-rank: multiply the learning rate by the processes, or by their root.",
)
@click.option(
    "--run-dir",
    type=PATH,
    help="Folder for everything that the run writes.  [default: runs/RECIPE]",
)
@click.option(
    "--fresh", is_flag=True, default=None, help="Move an earlier run in that directory aside first."
)
@click.option(
    "--init-from",
    type=NAME,
    metavar="RUN_DIR",
    help="Start from the weights of that run's newest snapshot.",
)
@click.option(
    "--snapshot-every",
    type=ANY_INTEGER,
    metavar="STEPS",
    help="Steps between snapshots.  [default: each epoch's end and every 60 s]",
)
@click.option(
    "--keep",
    type=ANY_INTEGER,
    help="Number of newest snapshots to keep, besides the best one.  [default: 3]",
)
@click.option(
    "--guard-every",
    type=ANY_INTEGER,
    metavar="STEPS",
    help="Check every STEPS steps that all processes have the same weights.  [default: never]",
)
@click.option(
    "--replay-every",
    type=ANY_INTEGER,
    metavar="STEPS",
    help="Recompute a microbatch of each process on another one every STEPS steps,"
    " and compare the bits.  [default: never]",
)
@click.option(
    "--log-to",
    multiple=True,
    metavar="NAME",
    help="Also log the curves to wandb, mlflow, or a logger of another package, besides"
    " TensorBoard.",
)
@click.option(
    "--max-restarts",
    type=WholeNumber(),
    default=3,
    show_default=True,
    help="How often all processes may restart from the last snapshot.",
)
@click.option(
    "--on-loss",
    type=click.Choice(["continue", "restart", "stop"]),
    default="continue",
    show_default=True,
    help="When a process is lost: the others continue in place while a new one starts (on GPUs, all"
    " restart); or all restart from the last snapshot; or the run stops.",
)
@click.option(
    "--timeout",
    type=Seconds(),
    metavar="SECONDS",
    help="Seconds that processes wait for each other before they give up.  [default: 600]",
)
@click.option(
    "--explain-after",
    type=Seconds(),
    metavar="SECONDS",
    help="Seconds without progress after which the reason is printed."
    "  [default: 60, at most half of --timeout]",
)
@click.option(
    "--fail-at",
    multiple=True,
    metavar="RANK:STEP",
    help="Kill this rank at this step, once, to watch a recovery.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only show the run's plan, and the memory that a process needs with each --shard."
    " Trains nothing.",
)
@click.option(
    "--device-memory",
    type=MemorySize(),
    metavar="SIZE",
    help="With --dry-run: memory of a device, for example 80GB.  [default: memory of the GPU here]",
)
@click.option("--lock-wait", type=Seconds(0), hidden=True)
@traceback_flag
@json_flag
@click.pass_context
def command(ctx: click.Context, /, job: str, **flags: Any) -> int:
    """Train a recipe or your own job file, on any number of processes.

    An interrupted run resumes from its run directory. A job file has a dataclass Config, whose
    fields become flags, and a function build(config) -> stepladder.Job.
    """
    config, job_settings = command.sort_flags(flags)
    job_settings["fail_at"] = tuple(map(parse_fail_at, flags["fail_at"]))
    path = command.job
    settings = Settings(**{"run_dir": Path("runs") / path.stem, **job_settings})
    request = TrainRequest(path, config, settings, flags["as_json"])
    topology = Topology(
        flags["nodes"],
        flags["nproc"],
        flags["rdzv_endpoint"],
        flags["local_addr"],
        hosts=flags["hosts"],
    ).with_cluster_variables()
    if flags["device_memory"] is not None and not flags["dry_run"]:
        raise InputError("--device-memory without --dry-run", "--dry-run, which trains nothing")
    if flags["dry_run"]:
        from stepladder.tools.dry_run import dry_run  # late: torch

        return dry_run(request, topology, flags["device_memory"])
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
    launch = Launch(
        topology,
        flags["max_restarts"],
        flags["explain_after"],
        flags["on_loss"],
    )
    return start(request, launch)
