"""`stepladder data`: fetch data sets with checksums, bring them into shards, and look at them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepladder.cli.shard import shard_command
from stepladder.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from stepladder.data.fetch.fetch import Progress, Say


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
    from stepladder.data.fetch import catalog, fetch

    dataset = catalog.find(name)
    target = data_dir or default_dir(name)
    with reporting() as (progress, say):
        paths = fetch.get(dataset, target, source, progress, say)
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


@contextmanager
def reporting() -> Iterator[tuple[Progress | None, Say]]:
    """How to report a fetch, on stderr: bars on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield None, partial(click.echo, err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield advance, partial(bars.console.print, markup=False, highlight=False, soft_wrap=True)


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


def describe(path: Path, check: bool = False) -> dict[str, Any]:
    """The facts about a folder or file, as `info --json` prints them. check: read all shards too."""
    from stepladder.data.formats import idx
    from stepladder.data.movielens import count as ratings
    from stepladder.data.shards import info as shardinfo

    if shardinfo.parts_of(path):
        return shardinfo.describe(path, check)
    if not path.is_dir():
        if ratings.is_zip(path):
            return ratings.describe(path)
        return files_facts("idx", path, [(path, idx.read_idx(path))])
    if ratings.is_folder(path):
        return ratings.describe(path)
    if idx.has_mnist(path):
        arrays = vars(idx.read_mnist(path))
        return files_facts("mnist", path, [(p, arrays[k]) for k, p in idx.mnist_paths(path).items()])
    raise InputError(f"{path} holds neither MNIST files nor ratings.csv nor shards", idx.get_hint(path))


def files_facts(dataset: str, path: Path, arrays: list[tuple[Path, np.ndarray]]) -> dict[str, Any]:
    files = [array_facts(file, array) for file, array in arrays]
    return {
        "dataset": dataset,
        "path": str(path),
        "files": files,
        "bytes": sum(facts["bytes"] for facts in files),
    }


def array_facts(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Rows, shape, dtype and size on disk; label counts, or mean and deviation of pixels of 0..1."""
    import numpy as np

    facts: dict[str, Any] = {
        "name": path.name,
        "rows": len(array),
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "bytes": path.stat().st_size,
    }
    if array.ndim == 1:
        return facts | {"labels": np.bincount(array, minlength=10).tolist()}
    return facts | pixel_facts(array)


def pixel_facts(images: np.ndarray) -> dict[str, float | None]:
    import numpy as np

    if not images.size:
        return {"mean": None, "std": None}
    # By histogram, in pieces: images.std() would make a float copy, eight times the size.
    parts = np.array_split(images, 1 + len(images) // 1000)
    counts = sum(np.bincount(part.ravel(), minlength=256) for part in parts)
    values = np.arange(256) / 255
    mean = float(np.average(values, weights=counts))
    variance = float(np.average((values - mean) ** 2, weights=counts))
    return {"mean": round(mean, 6), "std": round(variance**0.5, 6)}


def show(facts: dict[str, Any]) -> None:
    """The same facts as lines for people."""
    click.echo(f"{facts['path']}: {facts['dataset']}, {facts['bytes']:,} bytes")
    for file in facts.get("files", []):
        click.echo(file_line(file))
    if "parts" in facts:
        from stepladder.data.shards import info as shardinfo

        for line in shardinfo.lines(facts):
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


command.add_command(shard_command(reporting))
