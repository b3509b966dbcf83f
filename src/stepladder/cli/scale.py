"""`stepladder scale JOB|SCRIPT.py`: the speed-up on more processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepladder.cli.options import (
    JobOrScript,
    json_flag,
    parse_counts,
    print_tables,
    traceback_flag,
    train_flags,
)
from stepladder.cli.types import ANY_INTEGER, COUNT, JOB, PATH, WholeNumber
from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.numbers import parse_whole_number
from stepladder.core.output_file import validate_writable, write_output
from stepladder.core.settings import Settings, TrainRequest
from stepladder.slurm.batch_job import BatchJob, make_batch_job
from stepladder.slurm.site_defaults import find_site_defaults

if TYPE_CHECKING:
    from stepladder.tools.scaling.measure import TimedJob, TimedScript
    from stepladder.tools.scaling.scaling_report import Scaling

SLURM_FLAGS = {
    "gpus_per_node": "--gpus-per-node",
    "partition": "--partition",
    "time": "--time",
    "sbatch_args": "--sbatch-arg",
}
OUTPUT_FORMATS = ("csv", "html")
SCALING_TABLE_WIDTH = 165
DEFAULT_NPROC = (1, 2)


@click.command(cls=JobOrScript)
@click.argument("job", metavar="RECIPE|FILE.py|SCRIPT.py", type=JOB)
@click.argument(
    "args",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[SCRIPT'S ARGS]",
)
@click.option(
    "--nproc",
    callback=parse_counts,
    metavar="N,N,...",
    help="Numbers of processes.  [default: 1,2; with --nodes one number, per node]",
)
@click.option(
    "--nodes",
    callback=parse_counts,
    metavar="N,N,...",
    help="Submit Slurm jobs on these numbers of nodes.",
)
@click.option(
    "--steps",
    type=WholeNumber(5),
    default=60,
    show_default=True,
    help="Optimizer steps per measurement.",
)
@click.option(
    "--warmup",
    type=COUNT,
    default=10,
    show_default=True,
    help="Steps to run before the measurement begins.",
)
@click.option(
    "--rounds",
    type=COUNT,
    default=3,
    show_default=True,
    help="Measurements per number of processes, one of each number in turn.",
)
@click.option(
    "--weak/--strong",
    default=None,
    help="Weak: the batch grows with the processes; strong: it does not."
    "  [default: strong; weak for a script]",
)
@click.option(
    "--global-batch",
    type=ANY_INTEGER,
    help="Samples per optimizer step; with --weak, on one process.",
)
@train_flags(
    "microbatch",
    "device",
    "precision",
    "compile",
    "capture",
    "data-dir",
    "sync",
)
@click.option(
    "--threads",
    type=ANY_INTEGER,
    default=1,
    show_default=True,
    help="Intra-op threads of torch per process.",
)
@click.option(
    "--gpus-per-node",
    default="",
    metavar="[TYPE:]N",
    help="GPUs per node for the Slurm jobs, as for `submit`.",
)
@click.option(
    "--partition",
    metavar="P",
    help="Partition of the Slurm jobs.",
)
@click.option(
    "--time",
    default="",
    metavar="T",
    help="Time limit of each Slurm job.",
)
@click.option(
    "--sbatch-arg", "sbatch_args", multiple=True, metavar="STR", help="Any other option of sbatch."
)
@click.option(
    "--csv",
    "csv_file",
    type=PATH,
    help="File for the table.",
)
@click.option(
    "--html",
    "html_file",
    type=PATH,
    help="File for a page with plots.",
)
@traceback_flag
@json_flag
def command(
    args: tuple[str, ...], nproc: list[int] | None, nodes: list[int] | None, **flags: Any
) -> None:
    """Time training steps on several numbers of processes, and explain the lost efficiency.

    The numbers of processes are measured in turn. Every process gets as many threads as one alone,
    so that N processes could be N times as fast. A script is run unmodified, and ended after its
    optimizer's steps; flags that are not listed here, and all after `--`, are the script's.
    """
    validate_flags(nproc, nodes, flags)
    for kind in OUTPUT_FORMATS:
        file = flags[f"{kind}_file"]
        if file is not None:
            validate_writable(file, f"--{kind}")
    from stepladder.tools.scaling.scaling_report import Scaling

    subject = make_subject(args, flags)
    rounds = flags["rounds"]
    report = (lambda _: None) if flags["as_json"] else partial(echo, err=True)
    if nodes:
        from stepladder.tools.scaling.batch_jobs import measure_on_nodes

        job = make_measurement_job(nproc, flags)
        sizes = measure_on_nodes(
            subject,
            job,
            sorted(nodes),
            rounds,
            report,
        )
    else:
        from stepladder.tools.scaling.measure import measure_locally

        sizes = measure_locally(
            subject,
            sorted(nproc or DEFAULT_NPROC),
            rounds,
            report,
        )
    show_scaling(
        Scaling(
            subject.name,
            subject.weak,
            sizes,
            command.is_script,
        ),
        flags,
    )


def validate_flags(
    nproc: list[int] | None,
    nodes: list[int] | None,
    flags: dict[str, Any],
) -> None:
    """Raise InputError where flags contradict each other."""
    if nodes and nproc and len(nproc) > 1:
        text = ",".join(map(str, nproc))
        raise InputError(
            f"--nproc {text} with --nodes: only one of them can be a list", "--nproc N, per node"
        )
    typed = next((flag for name, flag in SLURM_FLAGS.items() if flags[name]), None)
    if typed and not nodes:
        raise InputError(f"{typed} without --nodes: it is for batch jobs", "--nodes 1,2")


def make_subject(args: tuple[str, ...], flags: dict[str, Any]) -> TimedJob | TimedScript:
    """Return what is timed: the job with its flags, or the script with its arguments."""
    from stepladder.tools.scaling.measure import TimedJob, TimedScript

    weak = flags["weak"]
    if weak is None:
        weak = command.is_script
    script = command.script(args)
    if script:
        return TimedScript(
            script,
            flags["steps"],
            flags["warmup"],
            weak,
            flags["threads"],
        )
    config, job_settings = command.sort_flags(flags)
    settings = Settings(run_dir=Path("runs"), **job_settings)
    request = TrainRequest(command.job, config, settings)
    return TimedJob(request, flags["warmup"], weak)


def make_measurement_job(nproc: list[int] | None, flags: dict[str, Any]) -> BatchJob:
    """Return what all batch jobs of the measurements have in common."""
    if nproc:
        ranks_per_node = nproc[0]
    else:
        gpus = flags["gpus_per_node"].rpartition(":")[2]
        ranks_per_node = parse_whole_number(gpus) or 1
    job_flags = {name: flags[name] for name in SLURM_FLAGS}
    return make_batch_job(
        job_flags | {"nproc": str(ranks_per_node)},
        find_site_defaults(),
        command=(),
        job_dir="",
        name="scale",
        max_requeues=0,
        cpus_per_task=ranks_per_node * flags["threads"],
    )


def show_scaling(scaling: Scaling, flags: dict[str, Any]) -> None:
    """Print the measurements, and write the files that the flags ask for."""
    from stepladder.tools.scaling.scaling_report import format_csv, make_table, render_scaling_page

    for kind, make_text in zip(
        OUTPUT_FORMATS,
        (format_csv, render_scaling_page),
        strict=True,
    ):
        file = flags[f"{kind}_file"]
        if file is not None:
            write_output(file, make_text(scaling), f"--{kind}")
    if flags["as_json"]:
        echo(json.dumps(scaling.as_json()))
        return
    print_tables([make_table(scaling)], SCALING_TABLE_WIDTH)
    for line in scaling.verdicts():
        echo(line)
