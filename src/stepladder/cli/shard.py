"""`stepladder data shard`: bring a data set into chunked HDF5 files that training streams from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from stepladder.cli.feedback import on_stderr
from stepladder.core.errors import InputError


@click.command(name="shard")
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder of the shards.")
@click.option("--chunk-rows", type=int, help="Rows that are read at once [about 0.4 MB].")
@click.option("--rows-per-shard", type=int, help="Rows of one file [about 64 MB].")
@click.option("--columns", help="Only these columns, separated by commas.")
@click.option("--dtype", "dtypes", multiple=True, metavar="COLUMN=TYPE", help="Type of a CSV column.")
@click.option("--compress", is_flag=True, help="gzip the chunks: smaller, and slower to read.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object.")
def shard(
    source: Path,
    out: Path,
    chunk_rows: int | None,
    rows_per_shard: int | None,
    columns: str | None,
    dtypes: tuple[str, ...],
    compress: bool,
    as_json: bool,
) -> None:
    """Write INPUT as chunked HDF5 shards with an index and checksums, for training that streams.

    INPUT is a CSV (.csv, .tsv), Parquet, .npz or HDF5 file, an IDX file, or a folder of the four MNIST
    files, which becomes train and test. Stopped, killed or out of disk, it goes on where it was when
    typed again.
    """
    from stepladder.data.facts import describe_shards
    from stepladder.data.formats.inputs import open_tables
    from stepladder.data.shards.writing import write_table

    for part, table in open_tables(source, named(columns), typed(dtypes)).items():
        with on_stderr() as feedback:
            write_table(table, out / part, chunk_rows, rows_per_shard, compress, feedback)
    facts = describe_shards(out)
    for line in shard_lines(facts):
        click.echo(line)
    if as_json:
        click.echo(json.dumps({"schema": 1, **facts}))


def named(columns: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in columns.split(",") if name.strip()) if columns else ()


def typed(dtypes: tuple[str, ...]) -> dict[str, str]:
    """{column: type} of the --dtype options."""
    for text in dtypes:
        if "=" not in text:
            raise InputError(f"--dtype {text} names no type", f"--dtype {text}=float32")
    return dict(text.rsplit("=", 1) for text in dtypes)


def shard_lines(facts: dict[str, Any]) -> list[str]:
    """What `describe_shards` says, for a person."""
    text = []
    for part in facts["parts"]:
        columns = ", ".join(f"{name} ({column})" for name, column in part["columns"].items())
        text.append(f"{part['name']}: {part['rows']:,} rows of {columns}")
        text.append(
            f"  {part['bytes']:,} bytes; files: {part['shards']:,}; chunks: {part['chunks']:,}, each of"
            f" {part['chunk_rows']:,} rows and {part['chunk_bytes']:,} bytes"
        )
        advised = part["advised_chunk_rows"]
        if not advised / 4 <= part["chunk_rows"] <= advised * 4:
            text.append(f"  better: chunks of about 0.4 MB, stepladder data shard ... --chunk-rows {advised}")
        else:
            text.append("  a good chunk size: about 0.4 MB is advised")
    return text
