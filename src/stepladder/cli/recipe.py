"""`stepladder recipe`: use the model that a recipe has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from stepladder.cli.suggest import SuggestingGroup
from stepladder.cli.types import AsJson, Count, Natural, WholeNumber
from stepladder.core.console import echo, echo_json


@click.group(name="recipe", cls=SuggestingGroup)
def command() -> None:
    """Use a model that a recipe has trained: recommend movies (movielens), write text (gpt)."""


@command.command()
def recommend(
    run_dir: Path,
    *,
    user: Annotated[int, WholeNumber(None)],
    top: Count = 10,
    titles: Path | None = None,
    data_dir: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Show what the run of recipe movielens in RUN_DIR recommends to a user.

    Items that the user has rated are not shown. A user without ratings in the training data gets
    the items with most ratings. Titles come from --titles, or from a movies.csv in the folder of
    the data.

    Args:
        user: Number of the user, as in the data's files.
        top: Number of items to show.
        titles: A movies.csv, or a folder or zip that contains one.
        data_dir: Folder with the data.  [default: as trained]
    """
    from stepladder.tools import recommend as recommender

    result = recommender.recommend(run_dir, user, top, titles, data_dir)
    if as_json:
        echo_json(result)
        return
    order = "not rated yet, best first"
    if result["popular"]:
        order = "has no rating in the training data; most rated"
    echo(f"user {user} (model after step {result['step']}): {order}")
    for position, item in enumerate(result["items"], 1):
        title = item["title"] or f"movie {item['movie_id']}"
        echo(f"{position:3}  {title}  ({item['score']:.2f})")


@command.command()
def sample(
    run_dir: Path,
    *,
    prompt: str,
    tokens: Count = 500,
    temperature: float = 1.0,
    seed: Natural = 0,
    as_json: AsJson = False,
) -> None:
    """Print the text with which the run of recipe gpt in RUN_DIR continues a prompt.

    The model is read from the newest good snapshot. The training data is not needed.

    Args:
        prompt: Text to continue.
        tokens: Number of tokens to write.
        temperature: Below 1 likelier tokens are preferred; 0 always takes the likeliest.
        seed: Seed of the tokens that are drawn.
    """
    from stepladder.tools import sample as writer

    result = writer.sample(run_dir, prompt, tokens, temperature, seed)
    if as_json:
        echo_json(result)
    else:
        echo(result["text"])
