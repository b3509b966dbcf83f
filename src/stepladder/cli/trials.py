"""Commands that run a job, or a script, in order to look at it: verify, scale and profile."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepladder.cli.options import COUNT, PATH, JobCommand, JobOrScript, json_flag, numbers, train_flags
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.world import World
from stepladder.rank.lifecycle import work_and_leave
from stepladder.slurm.job import BatchJob, batch_job, find_site
from stepladder.storage.rundir import CONFIG
from stepladder.train.job_file import stored_job

if TYPE_CHECKING:
    from rich.table import Table

    from stepladder.tools.profiler.profile import Found
    from stepladder.tools.scaling.measure import TimedJob, TimedScript
    from stepladder.tools.scaling.scale import Scaling

OF_SLURM = {
    "gpus_per_node": "--gpus-per-node", "partition": "--partition", "time": "--time", "sbatch_args": "--sbatch-arg"
}  # fmt: skip


class VerifyCommand(JobCommand):
    """`verify`, with the flags of the job that the arguments, or a run directory, name."""

    stored: Sequence[dict[str, Any]] = ({}, {})  # the Config and the settings of a run directory

    def find(self, name: str) -> Path:
        self.stored = {}, {}
        if not (Path(name) / CONFIG).exists():
            return super().find(name)
        path, *self.stored = stored_job(Path(name))
        return path


@click.command(cls=VerifyCommand)
@click.argument("job", metavar="RECIPE|FILE.py|RUN_DIR")
@click.option("--nproc", callback=numbers, metavar="N,N,...", help="Numbers of processes.  [default: 1,2,3]")
@click.option("--steps", type=int, help="Optimizer steps, at most the job's.  [default: about 12]")
@click.option("--sync", type=click.Choice(["exact", "ddp"]), help="[default: exact, or as in RUN_DIR]")
@train_flags(
    "epochs", "global-batch", "microbatch", "device", "precision", "data-dir", "lr", "warmup-steps", "seed"
)
@click.option("--threads", type=int, help="Intra-op threads per process.  [default: 1]")
@json_flag
def verify(job: str, nproc: list[int] | None, steps: int | None, **flags: Any) -> int:
    """Prove that a job gives the same losses and weights on any number of processes, through a stop and resume.

    Trains some steps on each number of processes, in temporary run directories that hold a snapshot per
    step, and compares every bit (with --sync ddp losses to 1e-5, weights to 1e-3). Exit code 1 if something
    differs: the first step and tensor are named, and the likely cause.
    """
    config, own = verify.sort(flags)
    stored_config, stored_settings = verify.stored
    settings = Settings(**{"run_dir": Path("runs"), "sync": "exact", **stored_settings, **own})
    from stepladder.tools.verify.proof import prove, verdict

    as_json = flags["as_json"]
    say = (lambda _: None) if as_json else click.echo
    proof = prove(verify.job, stored_config | config, settings, nproc, steps, say)
    click.echo(json.dumps(proof.as_json()) if as_json else verdict(proof, settings.sync == "exact"))
    return int(proof.difference is not None)


@click.command(cls=JobOrScript)
@click.argument("job", metavar="RECIPE|FILE.py|SCRIPT.py")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT'S ARGS]")
@click.option(
    "--nproc", callback=numbers, metavar="N,N,...", help="[default: 1,2; with --nodes one number, per node]"
)
@click.option("--nodes", callback=numbers, metavar="N,N,...", help="Batch jobs for Slurm on so many nodes.")
@click.option(
    "--steps", type=click.IntRange(5), default=60, show_default=True, help="Optimizer steps per measurement."
)
@click.option("--warmup", type=COUNT, default=10, show_default=True, help="Steps left out before them.")
@click.option("--rounds", type=COUNT, default=3, show_default=True, help="Measurements per size, in turns.")
@click.option(
    "--weak/--strong",
    default=None,
    help="The global batch grows with the processes, or stays.  [default: strong; weak for a script]",
)
@click.option("--global-batch", type=int, help="Samples per optimizer step; with --weak, on one process.")
@train_flags("microbatch", "device", "precision", "data-dir", "sync")
@click.option("--threads", type=COUNT, default=1, show_default=True, help="Intra-op threads per process.")
@click.option("--gpus-per-node", default="", metavar="[TYPE:]N", help="With --nodes, as `submit` has it.")
@click.option("--partition", metavar="P", help="The same.")
@click.option("--time", default="", metavar="T", help="The same.")
@click.option("--sbatch-arg", "sbatch_args", multiple=True, metavar="STR", help="The same.")
@click.option("--csv", "csv_file", type=PATH, help="Write the table here.")
@click.option("--html", "html_file", type=PATH, help="Write a page with plots here.")
@json_flag
def scale(args: tuple[str, ...], nproc: list[int] | None, nodes: list[int] | None, **flags: Any) -> None:
    """Time training steps on several numbers of processes, in turns, and say where the lost efficiency went.

    Every process gets as many threads as one alone, so that N processes could be N times as fast. A script is run
    as it is, and ended when its optimizer has made the steps; flags that are not listed here are its own, and all
    that stand behind `--`.
    """
    refuse_contradictions(nproc, nodes, flags)
    for file in filter(None, (flags["csv_file"], flags["html_file"])):
        if not file.absolute().parent.is_dir():
            raise InputError(f"{file} cannot be written: there is no such folder", f"mkdir -p {file.parent}")
        if file.is_dir():
            raise InputError(f"{file} cannot be written: it is a folder", f"{file / 'scale.html'}")
    from stepladder.tools.scaling.scale import Scaling

    subject, rounds = subject_of(args, flags), flags["rounds"]
    say = (lambda _: None) if flags["as_json"] else partial(click.echo, err=True)
    if nodes:
        from stepladder.tools.scaling.batch_jobs import measured_on_nodes

        like = job_like(nproc, flags)
        sizes = measured_on_nodes(subject, like, sorted(nodes), rounds, say)
    else:
        from stepladder.tools.scaling.measure import measured_here

        sizes = measured_here(subject, sorted(nproc or [1, 2]), rounds, say)
    show_scaling(Scaling(subject.name, subject.weak, sizes, scale.is_script), flags)


def refuse_contradictions(nproc: list[int] | None, nodes: list[int] | None, flags: dict[str, Any]) -> None:
    if nodes and nproc and len(nproc) > 1:
        text = ",".join(map(str, nproc))
        raise InputError(f"--nproc {text} with --nodes: only one of them can be a list", "--nproc N, per node")
    given = next((flag for name, flag in OF_SLURM.items() if flags[name]), None)
    if given and not nodes:
        raise InputError(f"{given} without --nodes: it is for batch jobs", "--nodes 1,2")


def subject_of(args: tuple[str, ...], flags: dict[str, Any]) -> TimedJob | TimedScript:
    """The job with its flags, or the script with its arguments."""
    from stepladder.tools.scaling.measure import TimedJob, TimedScript

    weak = scale.is_script if flags["weak"] is None else flags["weak"]
    if script := scale.script(args):
        return TimedScript(script, flags["steps"], flags["warmup"], weak, flags["threads"])
    config, own = scale.sort(flags)
    request = TrainRequest(scale.job, config, Settings(run_dir=Path("runs"), **own))
    return TimedJob(request, flags["warmup"], weak)


def job_like(nproc: list[int] | None, flags: dict[str, Any]) -> BatchJob:
    """What all batch jobs of the measurements have in common."""
    per_node = nproc[0] if nproc else int(flags["gpus_per_node"].rpartition(":")[2] or 1)
    given = {name: flags[name] for name in OF_SLURM} | {"nproc": str(per_node)}
    cpus = per_node * flags["threads"]
    return batch_job(given, find_site(), command=(), job_dir="", name="scale", max_requeues=0, cpus_per_task=cpus)


def show_scaling(scaling: Scaling, flags: dict[str, Any]) -> None:
    from stepladder.tools.pages.page import write_whole
    from stepladder.tools.scaling.scale import as_csv, as_page, as_table

    for file, text in ((flags["csv_file"], as_csv), (flags["html_file"], as_page)):
        if file is not None:
            write_whole(file, text(scaling))
    if flags["as_json"]:
        click.echo(json.dumps(scaling.as_json()))
        return
    print_tables([as_table(scaling)], 165)
    for line in scaling.verdicts():
        click.echo(line)


@click.command(cls=JobOrScript)
@click.argument("job", metavar="RECIPE|FILE.py|SCRIPT.py")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT'S ARGS]")
@click.option("--nproc", type=COUNT, default=1, show_default=True, help="Processes.")
@click.option("--steps", type=COUNT, default=3, show_default=True, help="Optimizer steps to record.")
@click.option("--warmup", type=COUNT, default=5, show_default=True, help="Steps left out before them.")
@click.option("--out", type=PATH, metavar="DIR", help="[default: profiles/NAME]")
@train_flags("global-batch", "microbatch", "device", "precision", "data-dir", "sync", "threads")
@json_flag
def profile(args: tuple[str, ...], nproc: int, steps: int, warmup: int, out: Path | None, **flags: Any) -> int:
    """Record some optimizer steps under torch.profiler on all ranks, and say where their time goes and what is
    worth doing.

    A script is run as it is, and ended when the steps are recorded; flags that are not listed here are its own,
    and all that stand behind `--`. DIR gets a trace per rank, and one of all ranks on one time axis.
    """
    script, as_json = profile.script(args), flags["as_json"]
    config, own = profile.sort(flags)
    settings = Settings(run_dir=Path("runs"), **own)
    from stepladder.tools.profiler.profile import record
    from stepladder.tools.profiler.subjects import profile_job, profile_script

    name = profile.job.stem
    out, world = out or Path("profiles") / name, World.detect()
    if script:
        run = partial(profile_script, script, settings.threads, warmup, steps, nproc)
    else:
        run = partial(profile_job, TrainRequest(profile.job, config, settings), warmup, steps, nproc)
    if world.world_size > 1:
        work_and_leave(lambda: show_profile(record(name, run, out, world), as_json))
    return show_profile(record(name, run, out, world), as_json)


def show_profile(found: Found | int, as_json: bool) -> int:
    """The exit code; found is one already for ranks that failed, or are not the first."""
    if isinstance(found, int):
        return found
    if as_json:
        click.echo(json.dumps(found.as_json()))
        return 0
    from stepladder.tools.profiler.profile import as_tables, sentences

    print_tables(as_tables(found), 150)
    for line in sentences(found):
        click.echo(line)
    return 0


def print_tables(tables: Iterable[Table], width: int) -> None:
    """width: where there is no terminal, which has its own."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else width)
    for table in tables:
        console.print(table)
