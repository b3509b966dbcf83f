"""`stepladder data`: fetch data sets with checksums, bring them into shards, and look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from stepladder.cli.feedback import on_stderr
from stepladder.cli.shard import shard, shard_lines
from stepladder.core.errors import InputError


@click.group(name="data")
def command() -> None:
    """Fetch data sets with checksums, bring them into shards, and look at them."""


@command.command()
@click.argument("name")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where to put the files [data/NAME].")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="Take the files from this folder, zip or tar archive, or file, not from the network.",
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object.")
def get(name: str, data_dir: Path | None, source: Path | None, as_json: bool) -> None:
    """Fetch the data set NAME (mnist, movielens-small, movielens-1m) and check its sha256 sums."""
    from stepladder.data.fetch import fetch
    from stepladder.data.fetch.catalog import find

    dataset = find(name)
    target = data_dir or default_dir(name)
    with on_stderr() as feedback:
        paths = fetch.get(dataset, target, source, feedback)
    size = sum(file.bytes for file in dataset.files)
    click.echo(f"{name}: {len(paths)} files, {size:,} bytes, checked, in {target}")
    for file in dataset.files:
        if file.unpack:
            click.echo(f"unpacked: {fetch.unpacked_folder(file, target)}")
    click.echo(f"licence: {dataset.licence}")
    click.echo(f"cite: {dataset.citation}")
    if as_json:
        files = [file.name for file in dataset.files]
        echo_json({"dataset": name, "path": str(target), "files": files, "bytes": size})


@command.command()
@click.argument("path_or_name")
@click.option("--check", is_flag=True, help="Read all shards and compare them with their checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def info(path_or_name: str, check: bool, as_json: bool) -> None:
    """Show what a data folder or file holds: shapes, label counts, pixel statistics, ratings, chunks.

    PATH_OR_NAME is a folder of MNIST files, one IDX file, a folder or zip of movielens-small, a folder
    of shards or an HDF5 file, or the name of a data set that is in data/NAME.
    """
    from stepladder.data.facts import describe

    path = locate(path_or_name)
    facts = describe(path, check)
    if as_json:
        echo_json(facts)
    else:
        show(facts)


def default_dir(name: str) -> Path:
    return Path("data") / name


def echo_json(facts: dict[str, Any]) -> None:
    click.echo(json.dumps({"schema": 1, **facts}))


def locate(path_or_name: str) -> Path:
    """The path given, or the default folder of the data set of that name. InputError for neither."""
    from stepladder.data.fetch.catalog import CATALOG

    path = Path(path_or_name)
    if path.exists():
        return path
    if path_or_name not in CATALOG:
        known = ", ".join(CATALOG)
        raise InputError(
            f"there is no file, folder or data set {path_or_name!r}, the data sets are: {known}",
            "stepladder data get mnist",
        )
    path = default_dir(path_or_name)
    if not path.exists():
        raise InputError(f"{path_or_name} is not in {path}", f"stepladder data get {path_or_name}")
    return path


def show(facts: dict[str, Any]) -> None:
    """The same facts as lines for people."""
    click.echo(f"{facts['path']}: {facts['dataset']}, {facts['bytes']:,} bytes")
    for file in facts.get("files", []):
        click.echo(file_line(file))
    if "parts" in facts:
        for line in shard_lines(facts):
            click.echo(line)
    if "users" in facts:
        click.echo(f"{facts['rows']:,} ratings, {facts['users']:,} users, {facts['items']:,} items")


def file_line(file: dict[str, Any]) -> str:
    text = f"{file['name']}: {' x '.join(map(str, file['shape']))} {file['dtype']}, {file['bytes']:,} bytes"
    if "labels" in file:
        return text + "\n  labels " + ", ".join(f"{k}: {n}" for k, n in enumerate(file["labels"]))
    if file["mean"] is None:
        return text
    return text + f"\n  pixels (of 0 to 1) mean {file['mean']:.4f}, std {file['std']:.4f}"


command.add_command(shard)
