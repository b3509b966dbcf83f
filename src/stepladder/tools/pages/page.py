"""Make a self-contained HTML page from a template: no script, no network, fit for a phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

GENERATOR = b'content="stepladder"'  # in the head of every page


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
