"""`stepladder scale JOB|SCRIPT.py`: the speed-up on more processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stepladder.cli.flags import format_flag, make_command, make_field_options
from stepladder.cli.options import TRACEBACK_FLAG, JobOrScript, TrainFlags, print_tables
from stepladder.cli.types import AsJson, Count, Counts, JobPath, SbatchArgs, ScriptArgs, WholeNumber
from stepladder.core.console import echo, echo_json
from stepladder.core.errors import InputError
from stepladder.core.numbers import parse_whole_number
from stepladder.core.output_file import validate_writable, write_output
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.terminal import get_table_width
from stepladder.slurm.batch_job import BatchJob, make_batch_job
from stepladder.slurm.site_defaults import find_site_defaults
from stepladder.tools.pages.page import GENERATOR

if TYPE_CHECKING:
    from stepladder.tools.scaling.measure import TimedJob, TimedScript
    from stepladder.tools.scaling.scaling_report import Scaling

SLURM_FLAGS = ("gpus_per_node", "partition", "time", "sbatch_args")
OUTPUT_MARKS = {"csv": b"nproc,", "html": GENERATOR}  # of earlier outputs
DEFAULT_NPROC = (1, 2)


class _ScaleFlags:
    """The flags of `scale` besides those of a job.

    Args:
        steps: Optimizer steps per measurement.
        warmup: Steps to run before the measurement begins.
        rounds: Measurements per number of processes, one of each number in turn.
        weak: Weak: the batch grows with the processes; strong: it does not.  [default: strong; weak
            for a script]
        global_batch: Samples per optimizer step; with --weak, on one process.
        threads: Intra-op threads of torch per process.
        gpus_per_node ([TYPE:]N): GPUs per node for the Slurm jobs, as for `submit`.
        partition (P): Partition of the Slurm jobs.
        time (T): Time limit of each Slurm job.
        csv: File for the table.
        html: File for a page with plots.
    """

    steps: Annotated[int, WholeNumber(5)] = 60
    warmup: Count = 10
    rounds: Count = 3
    weak: Annotated[bool | None, "--weak/--strong"] = None
    global_batch: int | None = None
    threads: int = 1
    gpus_per_node: str | None = None
    partition: str | None = None
    time: str | None = None
    sbatch_args: SbatchArgs = ()
    csv: Path | None = None
    html: Path | None = None


@make_command(
    JobOrScript,
    *make_field_options(_ScaleFlags),
    *make_field_options(
        TrainFlags, "microbatch", "device", "precision", "compile", "capture", "data_dir", "sync"
    ),
    TRACEBACK_FLAG,
)
def command(
    job: JobPath,
    args: ScriptArgs = (),
    *,
    nproc: Counts | None = None,
    nodes: Counts | None = None,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Time training steps on several numbers of processes, and explain the lost efficiency.

    The numbers of processes are measured in turn. Every process gets as many threads as one alone,
    so that N processes could be N times as fast. A script is run unmodified, and ended after its
    optimizer's steps; flags that are not listed here, and all after `--`, are the script's.

    Args:
        job (RECIPE|FILE.py|SCRIPT.py): Name of a recipe, a job file, or a script.
        nproc: Numbers of processes.  [default: 1,2; with --nodes one number, per node]
        nodes: Submit Slurm jobs on these numbers of nodes.
    """
    _validate_flags(nproc, nodes, flags)
    for name, mark in OUTPUT_MARKS.items():
        if flags[name] is not None:
            validate_writable(flags[name], f"--{name}", mark)
    from stepladder.tools.scaling.scaling_report import Scaling

    subject = _make_subject(args, flags)
    rounds = flags["rounds"]
    report = (lambda _: None) if as_json else partial(echo, err=True)
    if nodes:
        from stepladder.tools.scaling.batch_jobs import measure_on_nodes

        batch_job = _make_measurement_job(nproc, flags)
        sizes = measure_on_nodes(subject, batch_job, sorted(nodes), rounds, report)
    else:
        from stepladder.tools.scaling.measure import measure_locally

        sizes = measure_locally(subject, sorted(nproc or DEFAULT_NPROC), rounds, report)
    scaling = Scaling(subject.name, subject.weak, sizes, command.is_script)
    _show_scaling(scaling, flags["csv"], flags["html"], as_json)


def _make_subject(args: tuple[str, ...], flags: dict[str, Any]) -> TimedJob | TimedScript:
    """Return what is timed: the job with its flags, or the script with its arguments."""
    from stepladder.tools.scaling.measure import TimedJob, TimedScript

    weak = flags["weak"]
    if weak is None:
        weak = command.is_script
    script = command.script(args)
    if script:
        return TimedScript(script, flags["steps"], flags["warmup"], weak, flags["threads"])
    own_flags = {name: flags[name] for name in ("steps", "threads", "global_batch")}
    config, job_settings = command.sort_flags(flags, **own_flags)
    settings = Settings(run_dir=Path("runs"), **job_settings)
    return TimedJob(TrainRequest(command.job, config, settings), flags["warmup"], weak)


def _validate_flags(
    nproc: list[int] | None, nodes: list[int] | None, flags: dict[str, Any]
) -> None:
    """Raise InputError where flags contradict each other."""
    if nodes and nproc and len(nproc) > 1:
        text = ",".join(map(str, nproc))
        raise InputError(
            f"--nproc {text} with --nodes: only one of them can be a list", "--nproc N, per node"
        )
    typed = next((name for name in SLURM_FLAGS if flags[name]), None)
    if typed and not nodes:
        flag = format_flag(typed).removesuffix("s")
        raise InputError(f"{flag} without --nodes: it is for batch jobs", "--nodes 1,2")


def _make_measurement_job(nproc: list[int] | None, flags: dict[str, Any]) -> BatchJob:
    """Return what all batch jobs of the measurements have in common."""
    if nproc:
        ranks_per_node = nproc[0]
    else:
        gpus = (flags["gpus_per_node"] or "").rpartition(":")[2]
        ranks_per_node = parse_whole_number(gpus) or 1
    return make_batch_job(
        {name: flags[name] for name in SLURM_FLAGS} | {"nproc": str(ranks_per_node)},
        find_site_defaults(),
        command=(),
        job_dir="",
        name="scale",
        max_requeues=0,
        cpus_per_task=ranks_per_node * flags["threads"],
    )


def _show_scaling(scaling: Scaling, csv: Path | None, html: Path | None, as_json: bool) -> None:
    """Print the measurements, and write the files of --csv and --html."""
    from stepladder.tools.scaling.scaling_report import format_csv, make_tables, render_scaling_page

    if csv is not None:
        write_output(csv, format_csv(scaling), "--csv")
    if html is not None:
        write_output(html, render_scaling_page(scaling), "--html")
    if as_json:
        echo_json(scaling.as_json())
        return
    width = get_table_width()
    print_tables(make_tables(scaling, width), width)
    for line in scaling.verdicts():
        echo(line)
