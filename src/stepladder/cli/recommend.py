"""stepladder recommend RUN_DIR --user 42: titles that a trained recommender would show this user."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(short_help="What a trained recommender would show a user.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--user", type=int, required=True, help="As the data's files number them.")
@click.option("--top", type=int, default=10, show_default=True, help="How many items.")
@click.option("--titles", type=click.Path(path_type=Path), help="A movies.csv, or a folder or zip with one.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where the data is now.  [default: as trained]")
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
def command(run_dir: Path, user: int, top: int, titles: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """Show what the run of recipe movielens in RUN_DIR would recommend to a user.

    Items that the user has rated are left out. A user without ratings in the training data is shown what most
    users rated. Titles come from --titles, or from a movies.csv beside the data.
    """
    from stepladder.tools.recommend import recommend

    shown = recommend(run_dir, user, top, titles, data_dir)
    if as_json:
        click.echo(json.dumps(shown.as_json()))
        return
    why = "has no rating in the training data; most rated" if shown.popular else "not rated yet, best first"
    click.echo(f"user {user} (model after step {shown.step}): {why}")
    for place, item in enumerate(shown.items, 1):
        click.echo(f"{place:3}  {item.title or f'movie {item.movie_id}'}  ({item.score:.2f})")
