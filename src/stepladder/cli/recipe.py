"""`stepladder recipe`: use the model that a recipe has trained."""

from __future__ import annotations

import json
from pathlib import Path

import click

from stepladder.cli.suggest import SuggestingGroup
from stepladder.cli.types import COUNT, PATH, Real, Whole
from stepladder.core.console import echo


@click.group(name="recipe", cls=SuggestingGroup)
def command() -> None:
    """Use the model that a recipe has trained: recommendations of movielens, text of gpt."""


@command.command()
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


@command.command()
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
