"""stepladder explain TEXT|FILE: what an error message means."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from stepladder.core.console import echo
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.typed_file import open_to_read

LONGEST_LINE = 1 << 16  # bytes, of a log that may be anything
MOST_GIB = 64  # of a log; a hole in a file may be any size, and reads as zeros
MORE = "stepladder explain --list prints all that are known; of a log, look at the earliest error of all ranks"


@click.command()
@click.argument("text", metavar="TEXT|FILE", required=False)
@click.option("--list", "as_list", is_flag=True, help="Print all messages that are known.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def command(text: str | None, as_list: bool, as_json: bool) -> int:
    """Say what an error message of PyTorch, NCCL, gloo, CUDA, Slurm or SSH means, and what to type.

    TEXT: the message, a part of it, or some of its words. FILE: a log, in which all known messages
    are looked for. Without either, a log on standard input. Exit code 1 where nothing in it is
    known."""
    from stepladder.tools.explain.explain import explain, known_errors, nearest

    if as_list:
        for error in known_errors():
            for message in error.texts:
                echo(f"{error.source}: {message}")
        return 0
    found = list(explain(lines_of(text)))
    if not found and text is not None and not is_file(text):
        found = list(nearest(text))
    if as_json:
        about = [
            {"line": one.number, "text": one.line, "cause": one.error.cause, "do": one.error.do}
            for one in found
        ]
        echo(json.dumps({"schema": 1, "found": about}))
        return int(not found)
    for one in found:
        echo(
            f"line {one.number}: {click.unstyle(one.line)[:200]}"
            if one.is_literal
            else f"perhaps: {one.line}"
        )
        echo(f"  cause: {one.error.cause}")
        echo(f"  do:    {one.error.do}")
    if not found:
        echo(f"stepladder: no known error message is in it. HINT: {MORE}", err=True)
    return int(not found)


def is_file(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # longer than a name may be
        return False


def lines_of(text: str | None) -> Iterator[str]:
    """Of the argument, the file that it names, or standard input."""
    if text == "" or (text is None and (sys.stdin is None or sys.stdin.isatty())):
        raise InputError(
            "no text to explain", "stepladder explain 'Address already in use', or a log file"
        )
    if text is None:
        yield from decoded(sys.stdin.buffer)
    elif is_file(text):
        hint = f"a text file of at most {MOST_GIB} GiB"
        with (
            as_input_error(f"{text} cannot be read", hint, (OSError, ValueError)),
            open_to_read(Path(text)) as file,
        ):
            if os.fstat(file.fileno()).st_size > MOST_GIB << 30:
                raise ValueError("it is larger than any log")
            yield from decoded(file)
    else:
        yield from text.splitlines()


def decoded(file: BinaryIO) -> Iterator[str]:
    for line in iter(lambda: file.readline(LONGEST_LINE), b""):
        yield line.decode(errors="replace")
