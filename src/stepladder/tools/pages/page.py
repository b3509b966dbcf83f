"""Make a self-contained HTML page from a template: no script, no network, fit for a phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepladder.core.errors import InputError, as_input_error

if TYPE_CHECKING:
    from jinja2 import Environment

GENERATOR = b'content="stepladder"'  # in the head of every page
HEAD_BYTES = 512


def validate_own_page(path: Path) -> None:
    """Raise InputError if a file is there that is no page of ours, so that none is replaced."""
    if not path.exists():
        return
    head = b""
    if path.is_file():  # a FIFO would be waited for
        with as_input_error(f"{path} cannot be read", "-o FILE"), path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    if GENERATOR not in head:
        raise InputError(f"{path} is there already, and is no page of stepladder", "-o FILE")


def render_page(template: str, **values: object) -> str:
    """Return a template of this folder as text; the values are escaped."""
    return make_environment().get_template(template).render(values)


def make_environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # late: 50 ms

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
