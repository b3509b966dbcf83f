"""stepladder scale JOB|SCRIPT.py: how much faster on more processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepladder.cli.options import (
    JobOrScript,
    json_flag,
    numbers,
    print_tables,
    traceback_flag,
    train_flags,
)
from stepladder.cli.types import ANY, COUNT, JOB, PATH, Whole
from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.numbers import parse_whole_number
from stepladder.core.output_file import validate_writable, write_output
from stepladder.core.settings import Settings, TrainRequest
from stepladder.slurm.batch_job import BatchJob, make_batch_job
from stepladder.slurm.site_defaults import find_site_defaults

if TYPE_CHECKING:
    from stepladder.tools.scaling.measure import TimedJob, TimedScript
    from stepladder.tools.scaling.scale import Scaling

OF_SLURM = {
    "gpus_per_node": "--gpus-per-node", "partition": "--partition", "time": "--time", "sbatch_args": "--sbatch-arg"
}  # fmt: skip
OUTPUTS = ("csv", "html")


@click.command(cls=JobOrScript)
@click.argument("job", metavar="RECIPE|FILE.py|SCRIPT.py", type=JOB)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT'S ARGS]")
@click.option(
    "--nproc",
    callback=numbers,
    metavar="N,N,...",
    help="[default: 1,2; with --nodes one number, per node]",
)
@click.option(
    "--nodes",
    callback=numbers,
    metavar="N,N,...",
    help="Submit Slurm jobs on these numbers of nodes.",
)
@click.option(
    "--steps", type=Whole(5), default=60, show_default=True, help="Optimizer steps per measurement."
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
    help="Measurements per number of processes, taken in turns.",
)
@click.option(
    "--weak/--strong",
    default=None,
    help="Weak: the batch grows with the processes; strong: it stays.  [default: strong; weak for a script]",
)
@click.option(
    "--global-batch", type=ANY, help="Samples per optimizer step; with --weak, on one process."
)
@train_flags("microbatch", "device", "precision", "compile", "capture", "data-dir", "sync")
@click.option(
    "--threads",
    type=ANY,
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
@click.option("--partition", metavar="P", help="Partition of the Slurm jobs.")
@click.option("--time", default="", metavar="T", help="Time limit of each Slurm job.")
@click.option(
    "--sbatch-arg", "sbatch_args", multiple=True, metavar="STR", help="Any other option of sbatch."
)
@click.option("--csv", "csv_file", type=PATH, help="File for the table.")
@click.option("--html", "html_file", type=PATH, help="File for a page with plots.")
@traceback_flag
@json_flag
def command(
    args: tuple[str, ...], nproc: list[int] | None, nodes: list[int] | None, **flags: Any
) -> None:
    """Time training steps on several numbers of processes, in turns, and say where the lost
    efficiency went.

    Every process gets as many threads as one alone, so that N processes could be N times as fast. A
    script is run as it is, and ended when its optimizer has made the steps; flags that are not
    listed here are its own, and all that stand after `--`."""
    refuse_contradictions(nproc, nodes, flags)
    for kind in OUTPUTS:
        if (file := flags[f"{kind}_file"]) is not None:
            validate_writable(file, f"--{kind}")
    from stepladder.tools.scaling.scale import Scaling

    subject, rounds = subject_of(args, flags), flags["rounds"]
    say = (lambda _: None) if flags["as_json"] else partial(echo, err=True)
    if nodes:
        from stepladder.tools.scaling.batch_jobs import measured_on_nodes

        like = job_like(nproc, flags)
        sizes = measured_on_nodes(subject, like, sorted(nodes), rounds, say)
    else:
        from stepladder.tools.scaling.measure import measured_here

        sizes = measured_here(subject, sorted(nproc or [1, 2]), rounds, say)
    show_scaling(Scaling(subject.name, subject.weak, sizes, command.is_script), flags)


def refuse_contradictions(
    nproc: list[int] | None, nodes: list[int] | None, flags: dict[str, Any]
) -> None:
    if nodes and nproc and len(nproc) > 1:
        text = ",".join(map(str, nproc))
        raise InputError(
            f"--nproc {text} with --nodes: only one of them can be a list", "--nproc N, per node"
        )
    given = next((flag for name, flag in OF_SLURM.items() if flags[name]), None)
    if given and not nodes:
        raise InputError(f"{given} without --nodes: it is for batch jobs", "--nodes 1,2")


def subject_of(args: tuple[str, ...], flags: dict[str, Any]) -> TimedJob | TimedScript:
    """The job with its flags, or the script with its arguments."""
    from stepladder.tools.scaling.measure import TimedJob, TimedScript

    weak = command.is_script if flags["weak"] is None else flags["weak"]
    if script := command.script(args):
        return TimedScript(script, flags["steps"], flags["warmup"], weak, flags["threads"])
    config, own = command.sort(flags)
    request = TrainRequest(command.job, config, Settings(run_dir=Path("runs"), **own))
    return TimedJob(request, flags["warmup"], weak)


def job_like(nproc: list[int] | None, flags: dict[str, Any]) -> BatchJob:
    """What all batch jobs of the measurements have in common."""
    per_node = (
        nproc[0] if nproc else parse_whole_number(flags["gpus_per_node"].rpartition(":")[2]) or 1
    )
    given = {name: flags[name] for name in OF_SLURM} | {"nproc": str(per_node)}
    cpus = per_node * flags["threads"]
    return make_batch_job(
        given,
        find_site_defaults(),
        command=(),
        job_dir="",
        name="scale",
        max_requeues=0,
        cpus_per_task=cpus,
    )


def show_scaling(scaling: Scaling, flags: dict[str, Any]) -> None:
    from stepladder.tools.scaling.scale import as_csv, as_page, as_table

    for kind, text in zip(OUTPUTS, (as_csv, as_page), strict=True):
        if (file := flags[f"{kind}_file"]) is not None:
            write_output(file, text(scaling), f"--{kind}")
    if flags["as_json"]:
        echo(json.dumps(scaling.as_json()))
        return
    print_tables([as_table(scaling)], 165)
    for line in scaling.verdicts():
        echo(line)
