"""Commands about a run directory, of a run that goes on or is over: audit, diff, watch, report and
others.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from stepladder.cli.options import (
    json_flag,
    name_job_file,
    print_tables,
    traceback_flag,
    trust_flag,
)
from stepladder.cli.types import COUNT, NAME, PATH, Real, Whole
from stepladder.core.console import echo, say
from stepladder.core.terminal import rich_console

MOST_SHOWN = 20  # changes of processes, of which a run on a bad machine may have thousands


@click.command()
@click.argument("run_dir", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def audit(run_dir: Path, as_json: bool) -> int:
    """Prove from the ledger of RUN_DIR that every sample was trained exactly once per epoch.

    Exit code 1 if samples were lost or repeated, or if the ledger was altered.
    """
    from stepladder.storage import audit as audits

    found = audits.audit(run_dir)
    if as_json:
        echo(json.dumps(found.as_json()))
        return int(not found.ok)
    for epoch in found.epochs:
        echo(
            f"epoch {epoch.epoch + 1}: lost {epoch.lost}, repeated {epoch.repeated}, never seen {epoch.never_seen}"
        )
    for problem in found.problems:
        echo(f"problem: {problem}")
    for change in found.history[:MOST_SHOWN]:
        echo(f"attempt {change.attempt}, {change.sentence}")
    changes = (
        f", {found.changes} change{'s' * (found.changes != 1)} of processes"
        if found.changes
        else ""
    )
    echo(
        f"{'ok' if found.ok else 'NOT ok'}: lost {found.lost}, repeated {found.repeated}"
        f" ({found.attempts} attempt{'s' * (found.attempts != 1)}{changes}, {found.superseded} steps superseded)"
    )
    return int(not found.ok)


@click.command()
@click.argument("first", metavar="RUN_DIR", type=PATH)
@click.argument("second", metavar="RUN_DIR", type=PATH)
@trust_flag
@traceback_flag
@json_flag
def diff(first: Path, second: Path, trust_job_file: bool, as_json: bool) -> int:
    """Find the first step at which two runs differ, and why.

    Compares settings, versions, losses, learning rates, samples and snapshots. Where these do not
    say why, it trains both runs again up to that step, on one process, and names what differs
    first: data, an operation, a gradient, the optimizer. Of runs with --sync exact every bit
    counts, of others losses to 1e-5. Exit code 1 if something differs."""
    from stepladder.tools.diff.compare import compare
    from stepladder.tools.diff.verdict import table_of
    from stepladder.train.job_file import stored_job

    def may_run(run_dir: Path) -> None:
        name_job_file(stored_job(run_dir)[0], run_dir, trust_job_file, f"diff {first} {second}")

    found = compare(first, second, may_run, say)
    if as_json:
        echo(json.dumps(found.as_json()))
    else:
        if found.records:
            print_tables([table_of(found)], 115)
        echo(found.sentence)
    return int(found.step is not None)


@click.command()
@click.argument("target", metavar="RUN_DIR|JOB", type=NAME)
@click.option("--once", is_flag=True, help="Print once and end, instead of following the run.")
def watch(target: str, once: bool) -> None:
    """Show position, loss, throughput and slow ranks of the run of RUN_DIR until it has finished.

    JOB: the number of a batch job; also whether it waits, and until it is over. Of a
    script the last line that it printed, and under `stepladder run --run-dir` its optimizer steps.
    """
    from stepladder.tools.report import live

    live.watch(target, once, rich_console())


@click.command()
@click.argument("run_dir", type=PATH)
@click.option("-o", "--output", type=PATH, default=Path("report.html"), show_default=True)
def report(run_dir: Path, output: Path) -> None:
    """Write one self-contained page about the run of RUN_DIR, finished or not: open it in any
    browser.

    A script has one under `stepladder run --run-dir`; its curves and samples are its own.
    """
    from stepladder.tools.report.report import write_report

    write_report(run_dir, output)
    echo(f"written: {output}")


@click.command()
@click.argument("run_dir", type=PATH)
@click.option(
    "--user", type=Whole(None), required=True, help="Number of the user, as in the data's files."
)
@click.option("--top", type=COUNT, default=10, show_default=True, help="Number of items to show.")
@click.option("--titles", type=PATH, help="A movies.csv, or a folder or zip with one.")
@click.option("--data-dir", type=PATH, help="Folder with the data.  [default: as trained]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def recommend(
    run_dir: Path, user: int, top: int, titles: Path | None, data_dir: Path | None, as_json: bool
) -> None:
    """Show what the run of recipe movielens in RUN_DIR would recommend to a user.

    Items that the user has rated are left out. A user without ratings in the training data is shown
    what most users rated. Titles come from --titles, or from a movies.csv beside the data."""
    from stepladder.tools import recommend as recommender

    shown = recommender.recommend(run_dir, user, top, titles, data_dir)
    if as_json:
        echo(json.dumps(shown))
        return
    why = (
        "has no rating in the training data; most rated"
        if shown["popular"]
        else "not rated yet, best first"
    )
    echo(f"user {user} (model after step {shown['step']}): {why}")
    for place, item in enumerate(shown["items"], 1):
        title = item["title"] or f"movie {item['movie_id']}"
        echo(f"{place:3}  {title}  ({item['score']:.2f})")


@click.command()
@click.argument("run_dir", type=PATH)
@click.option("--prompt", required=True, help="Text to go on with.")
@click.option(
    "--tokens", type=COUNT, default=500, show_default=True, help="Number of tokens to write."
)
@click.option(
    "--temperature",
    type=Real(),
    default=1.0,
    show_default=True,
    help="Below 1 it writes what is likelier; with 0 always the likeliest.",
)
@click.option(
    "--seed", type=Whole(), default=0, show_default=True, help="Seed of the tokens that are drawn."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def sample(
    run_dir: Path, prompt: str, tokens: int, temperature: float, seed: int, as_json: bool
) -> None:
    """Print a text that the run of recipe gpt in RUN_DIR writes after a prompt.

    The model is that of the newest good snapshot. The data that it was trained on is not needed.
    """
    from stepladder.tools import sample as writer

    shown = writer.sample(run_dir, prompt, tokens, temperature, seed)
    echo(json.dumps(shown) if as_json else shown["text"])
