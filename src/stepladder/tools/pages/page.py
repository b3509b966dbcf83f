"""One self-contained HTML page from a template: no script, no network, readable on a phone and in the dark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepladder.core import durable
from stepladder.core.errors import naming

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: object) -> str:
    """A template of this folder as text; what stands in `values` is escaped."""
    return environment().get_template(template).render(values)


def environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # late: 50 ms

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip


def write_whole(output: Path, text: str) -> None:
    """The file, whole or not at all. Raises InputError where it cannot be written."""
    is_there, hint = output.parent.is_dir(), "the name of a file in a folder that you can write"
    with naming(f"{output} cannot be written", hint if is_there else f"mkdir -p {output.parent}"):
        durable.write(output, text)
