"""`stepladder data`: fetch data sets with checksums, write them as shards, and inspect them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from stepladder.cli.suggest import SuggestingGroup
from stepladder.cli.types import AsJson, Count, PathName
from stepladder.core.console import echo, echo_json
from stepladder.core.errors import InputError
from stepladder.core.flag import Flag
from stepladder.core.numbers import format_count, parse_whole_number
from stepladder.core.terminal import make_console
from stepladder.data.local_files import Feedback

if TYPE_CHECKING:
    from stepladder.data.readers.damage import Damage
    from stepladder.data.readers.file_rows import OpenedSource

# Reads the text of an argument of open_data; the names are those that --set takes.
SETTINGS: dict[str, Callable[[str], Any]] = {
    "block": lambda text: parse_whole_number(text, 1),
    **dict.fromkeys(("columns", "header"), lambda text: tuple(text.split(","))),
    **dict.fromkeys(("dtype", "format"), str),
}
SETTING_EXAMPLES = {
    "block": "1024",
    "columns": "x,y",
    "dtype": "uint32",
    "header": "x,y",
    "format": "csv",
}
UNCHECKED = ("npz", "text")  # which nothing but a training reads whole
# A setting in a HINT, as Python has it.
SETTING = re.compile(rf"\b({'|'.join(SETTINGS)})=(\[.*?\]|\".*?\"|)")
SetTexts = Annotated[
    tuple[str, ...],
    Flag(
        "An argument of open_data, such as block=1024, dtype=uint32, header=x,y or format=csv.",
        metavar="NAME=VALUE",
    ),
    "--set",
]


@click.group(name="data", cls=SuggestingGroup)
def command() -> None:
    """Fetch data sets with checksums, write them as shards, and inspect them."""


@command.command()
def get(
    name: str,
    *,
    data_dir: Path | None = None,
    source: Annotated[Path | None, "--from"] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the data set NAME and check its SHA-256 sums.

    NAME is mnist, movielens-small, movielens-1m or shakespeare.

    Args:
        data_dir: Where to put the files.  [default: data/NAME]
        source: Read the files from this folder, zip or tar archive, or file, not from the network.
    """
    from stepladder.data.fetch import download
    from stepladder.data.fetch.catalog import find_dataset

    dataset = find_dataset(name)
    target = data_dir or Path("data") / name
    with _on_stderr() as feedback:
        paths = download.fetch_dataset(dataset, target, source, feedback)
    size = sum(file.bytes for file in dataset.files)
    echo(f"{name}: {len(paths)} files, {size:,} bytes, checked, in {target}")
    for file in dataset.files:
        if file.unpack:
            echo(f"unpacked: {download.unpacked_folder(file, target)}")
    echo(f"licence: {dataset.licence}")
    echo(f"cite: {dataset.citation}")
    if as_json:
        files = [file.name for file in dataset.files]
        echo_json({"dataset": name, "path": str(target), "files": files, "bytes": size})


@command.command()
def info(
    path_or_name: PathName, *, check: bool = False, settings: SetTexts = (), as_json: AsJson = False
) -> None:
    """Show what a data folder or file contains.

    It prints shapes, label counts, pixel statistics, ratings or chunks. PATH_OR_NAME is a folder of
    MNIST files, one IDX file, a folder or zip of movielens-small, a folder of shards or an HDF5
    file, what open_data opens, such as Parquet files or a URL of them, or the name of a data set
    that is in data/NAME.

    Args:
        check: Read all samples too, as data check does.
    """
    from stepladder.data.describe import describe_data, describe_source, open_described

    with _parse_settings(settings) as given:
        if "://" in path_or_name:
            facts = describe_source(path_or_name, given)
        else:
            facts = describe_data(_locate(path_or_name), check, given)
        if check and facts["dataset"] in UNCHECKED:
            problem = f"--check: {path_or_name} is {facts['dataset']}, which has no check"
            raise InputError(problem, f"stepladder data info {path_or_name}")
        damages = []
        if check and "num_files" in facts:
            damages = _list_damage(open_described(facts["path"], given))
    _show(facts, as_json)
    if check:
        _end_check(facts, damages, as_json)


@command.command()
def check(path: PathName, *, settings: SetTexts = (), as_json: AsJson = False) -> None:
    """Read all samples of the data at PATH, and list those that cannot be read.

    PATH is a folder of shards, or a file, folder, pattern or URL that open_data opens. Each line
    has a file and the numbers of records in it. The exit code is 2 if there are some.
    """
    from stepladder.data.describe import describe_shards, find_shard_folders, open_described

    with _parse_settings(settings) as given:
        if find_shard_folders(Path(path)):
            facts = describe_shards(Path(path), True, given)
            _show(facts, as_json)
            _end_check(facts, [], as_json)
            return
        source = open_described(path, given)
    damages = _list_damage(source)
    facts = {"dataset": source.format, "path": path, "rows": len(source)}
    if as_json:
        echo_json({**facts, "damaged": [vars(damage) for damage in damages]})
    _end_check(facts, damages)


def _list_damage(source: OpenedSource) -> list[Damage]:
    """Read all samples; print those that cannot be read, and return them."""
    damages = []
    for damage in source.find_damage():
        echo(str(damage))
        damages.append(damage)
    return damages


def _end_check(facts: dict[str, Any], damages: list[Damage], as_json: bool = False) -> None:
    """Print how many samples were read, all of them.

    Raises:
        InputError: Some cannot be read.
    """
    path = facts["path"]
    if "files" in facts:
        total = format_count(len(facts["files"]), "file")
    else:
        total = f"{facts['rows']:,} records"
    if damages:
        count = sum(damage.count for damage in damages)
        raise InputError(
            f"{path}: {count:,} of {total} cannot be read",
            "correct these files, or copy them again",
        )
    if not as_json:
        echo(f"{path}: {total} of {facts['dataset']}, all can be read")


@command.command()
def index(
    path: PathName, *, beside: bool = False, settings: SetTexts = (), as_json: AsJson = False
) -> None:
    """Find where the records of JSON Lines, CSV or tar files begin, before a run needs it.

    PATH is a file, folder, pattern or URL that open_data opens. Other formats need no index.

    Args:
        beside: Write each index beside its file, not into the user's cache.
    """
    from stepladder.core.folders import get_cache_folder
    from stepladder.data.describe import open_described
    from stepladder.data.readers.files import is_url
    from stepladder.data.readers.open_data import INDEXED_FORMATS

    if beside and is_url(path):
        raise InputError(f"--beside {path}", f"stepladder data index {path}, for the user's cache")
    with _parse_settings(settings) as given:
        source = open_described(path, given, index_beside=beside)
    files = format_count(source.num_files, "file")
    text = f"{path}: {len(source):,} records of {source.format} in {files}"
    folder = "beside the files" if beside else f"in {get_cache_folder() / 'indexes'}"
    if source.format in INDEXED_FORMATS:
        echo(f"{text}; indexes are {folder}")
    else:
        echo(f"{text}, which need no index")
    if as_json:
        echo_json({"dataset": source.format, "path": path, "rows": len(source)})


@command.command()
def shard(
    source: PathName,
    *,
    out: Path,
    chunk_rows: Count | None = None,
    rows_per_shard: Count | None = None,
    columns: str | None = None,
    dtypes: Annotated[tuple[str, ...], "--dtype"] = (),
    settings: SetTexts = (),
    compress: bool = False,
    as_json: AsJson = False,
) -> None:
    """Write INPUT as chunked HDF5 shards with an index and checksums, for streaming.

    INPUT is a file, folder, pattern or URL that open_data opens, such as CSV, JSON Lines, Parquet,
    MDS or tar files; or an .npz, HDF5 or IDX file, or a folder of the four MNIST files, which
    becomes train and test. Its columns are numbers, arrays or lists of numbers. After a stop, a
    kill or a full disk, the same command continues where it was.

    Args:
        source (INPUT): Data to read.
        out: The folder of the shards.
        chunk_rows: Rows that are read at once.  [default: about 0.4 MB]
        rows_per_shard: Rows of one file.  [default: about 64 MB]
        columns: Only these columns, separated by commas.
        dtypes (COLUMN=TYPE): Type of a CSV column.
        compress: Compress the chunks with gzip: they are smaller, and slower to read.
    """
    from stepladder.data.describe import describe_shards
    from stepladder.data.shards.inputs import open_tables
    from stepladder.data.shards.writer import write_table

    types = _parse_dtypes(dtypes)
    column_names = _parse_columns(columns)
    with _parse_settings(settings) as given:
        column_names = given.pop("columns", column_names)
        tables = open_tables(source, column_names, types, given)
    for part, table in tables.items():
        with _on_stderr() as feedback:
            write_table(
                table,
                out / part,
                feedback=feedback,
                chunk_rows=chunk_rows,
                rows_per_shard=rows_per_shard,
                compress=compress,
            )
    facts = describe_shards(out)
    for line in shard_lines(facts):
        echo(line)
    if as_json:
        echo_json(facts)


@contextmanager
def _parse_settings(texts: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of open_data in --set; a HINT of the block says how to type them."""
    given = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in SETTINGS:
            problem = f"--set {text}: there is no setting {name!r}"
            raise InputError(problem, f"--set NAME=VALUE, of {', '.join(SETTINGS)}")
        given[name] = SETTINGS[name](value) if value else None
        if given[name] is None:
            raise InputError(
                f"--set {text}: {value!r} is no {name}", f"--set {name}={SETTING_EXAMPLES[name]}"
            )
    try:
        yield given
    except InputError as error:
        hint = SETTING.sub(
            lambda match: f"--set {match[1]}=" + re.sub(r"[]['\" ]", "", match[2]), error.hint
        )
        hint = hint.replace("decode=FUNCTION", "open_data(PATH, decode=FUNCTION)")
        raise InputError(error.problem, hint) from error


def _parse_dtypes(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the types of --dtype by column."""
    for text in texts:
        if "=" not in text:
            raise InputError(f"--dtype {text} names no type", f"--dtype {text}=float32")
    return dict(text.rsplit("=", 1) for text in texts)


def _parse_columns(text: str | None) -> tuple[str, ...]:
    """Return the names of --columns, none for all columns."""
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InputError(
            f"--columns {text!r} names no column", "--columns NAME,NAME, or leave it out for all"
        )
    return names


@contextmanager
def _on_stderr() -> Iterator[Feedback]:
    """Show progress on stderr: bars on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield Feedback(on_message=partial(echo, err=True))
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=make_console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield Feedback(
            advance, partial(bars.console.print, markup=False, highlight=False, soft_wrap=True)
        )


def _locate(path_or_name: str) -> Path:
    """Return the path, or the default folder of the data set of that name.

    Raises:
        InputError: There is neither.
    """
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
    path = Path("data") / path_or_name
    if not path.exists():
        raise InputError(f"{path_or_name} is not in {path}", f"stepladder data get {path_or_name}")
    return path


def _show(facts: dict[str, Any], as_json: bool) -> None:
    """Print facts about data."""
    if as_json:
        echo_json(facts)
        return
    echo(f"{facts['path']}: {facts['dataset']}, {facts['bytes']:,} bytes")
    for file in facts.get("files", []):
        echo(_file_line(file))
    if "parts" in facts:
        for line in shard_lines(facts):
            echo(line)
    if "num_files" in facts:
        echo(_source_line(facts))
    if "users" in facts:
        echo(f"{facts['rows']:,} ratings, {facts['users']:,} users, {facts['items']:,} items")


def _file_line(file: dict[str, Any]) -> str:
    """Return the lines about one file."""
    text = (
        f"{file['name']}: {' x '.join(map(str, file['shape']))} {file['dtype']},"
        f" {file['bytes']:,} bytes"
    )
    if "labels" in file:
        return text + "\n  labels " + ", ".join(f"{k}: {n}" for k, n in enumerate(file["labels"]))
    if file["mean"] is None:
        return text
    return text + f"\n  pixels (of 0 to 1) mean {file['mean']:.4f}, std {file['std']:.4f}"


def _source_line(facts: dict[str, Any]) -> str:
    """Return the line about data that open_data opens."""
    chunks = "" if facts["chunks"] is None else f", {format_count(facts['chunks'], 'chunk')}"
    columns = ", ".join(f"{name} ({kind})" for name, kind in facts["columns"].items())
    return (
        f"{facts['rows']:,} rows in {format_count(facts['num_files'], 'file')}{chunks}: {columns}"
    )


def shard_lines(facts: dict[str, Any]) -> list[str]:
    """Return the lines about shards."""
    text = []
    for part in facts["parts"]:
        columns = ", ".join(f"{name} ({column})" for name, column in part["columns"].items())
        name = facts["path"] if part["name"] == "." else part["name"]
        text.append(f"{name}: {part['rows']:,} rows of {columns}")
        text.append(
            f"  {part['bytes']:,} bytes; files: {part['shards']:,}; chunks: {part['chunks']:,},"
            f" each of {part['chunk_rows']:,} rows and {part['chunk_bytes']:,} bytes"
        )
        advised = part["advised_chunk_rows"]
        if not advised / 4 <= part["chunk_rows"] <= advised * 4:
            text.append(
                "  better: chunks of about 0.4 MB, stepladder data shard ..."
                f" --chunk-rows {advised}"
            )
        else:
            text.append("  a good chunk size: about 0.4 MB is advised")
    return text
