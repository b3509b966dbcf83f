"""`stepladder train RECIPE|FILE.py`: flags from the job's Config, read as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click

from stepladder.cli.flags import make_command, make_field_options
from stepladder.cli.help_all import make_help_all
from stepladder.cli.options import TRACEBACK_FLAG, JobCommand, TrainFlags
from stepladder.cli.types import AsJson, ExplainAfter, Hosts, JobPath, MemorySize, Natural, Ssh
from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.flag import FAULTS, MEMORY, OUTPUT, PROCESSES, TRAINING
from stepladder.core.settings import Settings, TrainRequest
from stepladder.launcher.allocation import start_elsewhere
from stepladder.launcher.entry import Launch, start
from stepladder.launcher.topology import Topology


class _TrainCommand(JobCommand):
    """`train`, whose --help shows first what a newcomer needs."""

    sections = (TRAINING, MEMORY, PROCESSES, FAULTS, OUTPUT)
    first_flags = (
        "nproc",
        "epochs",
        "global_batch",
        "lr",
        "sync",
        "run_dir",
        "fresh",
        "device",
        "precision",
        "dry_run",
        "help_all",
    )


@make_command(
    _TrainCommand, *make_field_options(TrainFlags), TRACEBACK_FLAG, make_help_all("flags")
)
def command(
    job: JobPath,
    *,
    nproc: str = "",
    nodes: Annotated[str, PROCESSES] = "",
    hosts: Hosts = "",
    ssh: Ssh = "ssh",
    rdzv_endpoint: Annotated[str, PROCESSES] = "",
    local_addr: Annotated[str, PROCESSES] = "",
    max_restarts: Annotated[Natural, FAULTS] = 3,
    on_loss: Annotated[Literal["continue", "restart", "stop"], FAULTS] = "continue",
    explain_after: ExplainAfter = None,
    dry_run: bool = False,
    device_memory: Annotated[int | None, MemorySize(), MEMORY] = None,
    as_json: AsJson = False,
    **flags: Any,
) -> int:
    """Train a recipe or your own job file, on any number of processes.

    An interrupted run resumes from its run directory. A job file has a dataclass Config, whose
    fields become flags, and a function build(config) -> stepladder.Job.

    Args:
        job (RECIPE|FILE.py): Name of a recipe, or a job file.
        nproc (N|A:B|auto|gpu|cpu): Processes on this machine. A:B starts B, and continues with as
            few as A.  [default: 1]
        nodes (N|A:B): Machines. Type the same command on each of them, with one shared run
            directory.  [default: 1]
        rdzv_endpoint (HOST:PORT): Address at which the machines first meet.  [default: anywhere]
        local_addr: Address under which other machines reach this one.  [default: its host name]
        max_restarts: How often all processes may restart from the last snapshot.
        on_loss: When a process is lost: the others continue in place while a new one starts (on
            GPUs, all restart); or all restart from the last snapshot; or the run stops.
        dry_run: Only show the run's plan, and the memory that a process needs with each --shard.
            Trains nothing.
        device_memory (SIZE): With --dry-run: memory of a device, for example 80GB.  [default:
            memory of the GPU here]
    """
    request = _make_request(flags, as_json)
    typed = Topology(nodes, nproc, rdzv_endpoint, local_addr, hosts=hosts)
    topology = typed.with_cluster_variables()
    _validate_device_memory(device_memory, dry_run)
    if dry_run:
        from stepladder.tools.dry_run import dry_run as estimate  # late: torch

        return estimate(request, topology, device_memory)
    if (code := start_elsewhere(_get_typed_arguments(), hosts, ssh, topology)) is not None:
        return code
    _show_note(topology)
    return start(request, Launch(topology, max_restarts, explain_after, on_loss))


def _validate_device_memory(device_memory: int | None, dry_run: bool) -> None:
    """Raise InputError for --device-memory of a training."""
    if device_memory is not None and not dry_run:
        raise InputError("--device-memory without --dry-run", "--dry-run, which trains nothing")


def _get_typed_arguments() -> list[str]:
    """Return the command line's arguments, with which other machines start."""
    typed_arguments: list[str] = click.get_current_context().obj
    return typed_arguments


def _show_note(topology: Topology) -> None:
    """Print where the number of machines comes from, if no flag says it."""
    if topology.note:
        print_message(topology.note)


def _make_request(flags: dict[str, Any], as_json: bool) -> TrainRequest:
    """Return the training that the flags describe."""
    config, job_settings = command.sort_flags(flags)
    settings = Settings(**{"run_dir": Path("runs") / command.job.stem, **job_settings})
    return TrainRequest(command.job, config, settings, as_json)
