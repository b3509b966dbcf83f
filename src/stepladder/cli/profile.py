"""stepladder profile RECIPE|FILE.py|SCRIPT.py: where the time of a step goes, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepladder.cli.train import JobOrScript, job_flags
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.launcher.script import Script
from stepladder.rank.lifecycle import work_and_leave

if TYPE_CHECKING:
    from stepladder.tools.profiler.profile import Found


@click.command(cls=JobOrScript, short_help="Where the time of a step goes, on every rank.")
@click.argument("job", metavar="RECIPE|FILE.py|SCRIPT.py")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT'S ARGS]")
@click.option("--nproc", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Optimizer steps to record.")
@click.option("--warmup", type=click.IntRange(1), default=5, show_default=True, help="Steps left out before them.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="[default: profiles/NAME]")
@click.option("--global-batch", type=int, help="Samples per optimizer step.")
@job_flags
@click.option("--sync", type=click.Choice(["manual", "ddp", "exact"]), help="[default: ddp]")
@click.option(
    "--threads", type=click.IntRange(1), help="Intra-op threads per process.  [default: cores shared out]"
)
@click.option("--json", "as_json", is_flag=True, help="The last line on stdout is the result as one object.")
@click.pass_context
def command(
    ctx: click.Context,
    job: str,
    args: tuple[str, ...],
    nproc: int,
    steps: int,
    warmup: int,
    out: Path | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Record some optimizer steps under torch.profiler on all ranks, and say where their time goes and what is
    worth doing.

    A script is run as it is, and ended when the steps are recorded; flags that are not listed here are its own,
    and all that stand behind `--`. DIR gets a trace per rank, and one of all ranks on one time axis.
    """
    assert isinstance(ctx.command, JobOrScript) and ctx.command.job is not None
    path = ctx.command.job
    if args and not ctx.command.is_script:
        raise InputError(f"unexpected argument {args[0]!r}: a job has flags only", "stepladder profile JOB --help")
    config, own = ctx.command.sort(flags)
    settings = Settings(run_dir=Path("runs"), **own)
    from stepladder.tools.profiler.profile import (
        Schedule,
        of_job,
        of_rank,
        of_script,
        of_script_s_rank,
        record,
        record_as_rank,
    )

    schedule, out, world = Schedule(warmup, steps), out or Path("profiles") / path.stem, World.detect()
    in_rank = world.world_size > 1
    if ctx.command.is_script:
        script = Script.find(job, args, module=False, no_python=False, fresh=False)
        if in_rank:
            run = of_script_s_rank(script, world, schedule, settings.threads)
        else:
            run = of_script(script, nproc, schedule, settings.threads)
    elif in_rank:
        run = of_rank(path, config, settings, schedule)
    else:
        run = of_job(path, config, settings, nproc, schedule)
    if in_rank:
        work_and_leave(lambda: show(record_as_rank(path.stem, run, out, world), as_json))
    return show(record(path.stem, run, out), as_json)


def show(found: Found | int, as_json: bool) -> int:
    """The exit code; found is one already for ranks that failed, or are not the first."""
    if isinstance(found, int):
        return found
    if as_json:
        click.echo(json.dumps(found.as_json()))
        return 0
    from rich.console import Console

    from stepladder.tools.profiler.profile import as_tables, sentences

    console = Console(width=None if Console().is_terminal else 150)
    for table in as_tables(found):
        console.print(table)
    for line in sentences(found):
        click.echo(line)
    return 0
