"""`stepladder recipe`: use the model that a recipe has trained."""

from __future__ import annotations

import json
from pathlib import Path

import click

from stepladder.cli.suggest import SuggestingGroup
from stepladder.cli.types import COUNT, PATH, RealNumber, WholeNumber
from stepladder.core.console import echo


@click.group(name="recipe", cls=SuggestingGroup)
def command() -> None:
    """Use a model that a recipe has trained: recommend movies (movielens), write text (gpt)."""


@command.command()
@click.argument("run_dir", type=PATH)
@click.option(
    "--user",
    type=WholeNumber(None),
    required=True,
    help="Number of the user, as in the data's files.",
)
@click.option(
    "--top",
    type=COUNT,
    default=10,
    show_default=True,
    help="Number of items to show.",
)
@click.option(
    "--titles",
    type=PATH,
    help="A movies.csv, or a folder or zip that contains one.",
)
@click.option(
    "--data-dir",
    type=PATH,
    help="Folder with the data.  [default: as trained]",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object on stdout.",
)
def recommend(
    run_dir: Path, user: int, top: int, titles: Path | None, data_dir: Path | None, as_json: bool
) -> None:
    """Show what the run of recipe movielens in RUN_DIR recommends to a user.

    Items that the user has rated are not shown. A user without ratings in the training data gets
    the items with most ratings. Titles come from --titles, or from a movies.csv in the folder of
    the data.
    """
    from stepladder.tools import recommend as recommender

    result = recommender.recommend(run_dir, user, top, titles, data_dir)
    if as_json:
        echo(json.dumps(result))
        return
    order = "not rated yet, best first"
    if result["popular"]:
        order = "has no rating in the training data; most rated"
    echo(f"user {user} (model after step {result['step']}): {order}")
    for position, item in enumerate(result["items"], 1):
        title = item["title"] or f"movie {item['movie_id']}"
        echo(f"{position:3}  {title}  ({item['score']:.2f})")


@command.command()
@click.argument("run_dir", type=PATH)
@click.option("--prompt", required=True, help="Text to continue.")
@click.option(
    "--tokens", type=COUNT, default=500, show_default=True, help="Number of tokens to write."
)
@click.option(
    "--temperature",
    type=RealNumber(),
    default=1.0,
    show_default=True,
    help="Below 1 likelier tokens are preferred; 0 always takes the likeliest.",
)
@click.option(
    "--seed",
    type=WholeNumber(),
    default=0,
    show_default=True,
    help="Seed of the tokens that are drawn.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object on stdout.",
)
def sample(
    run_dir: Path, prompt: str, tokens: int, temperature: float, seed: int, as_json: bool
) -> None:
    """Print the text with which the run of recipe gpt in RUN_DIR continues a prompt.

    The model is read from the newest good snapshot. The training data is not needed.
    """
    from stepladder.tools import sample as writer

    result = writer.sample(run_dir, prompt, tokens, temperature, seed)
    echo(json.dumps(result) if as_json else result["text"])
