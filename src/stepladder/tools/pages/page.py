"""Make a self-contained HTML page from a template: no script, no network, fit for a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepladder.core.extras import import_extra

GENERATOR = b'content="stepladder"'  # in the head of every page


def render_page(template: str, **values: object) -> str:
    """Return a template of this folder as text; the values are escaped."""
    page: str = make_environment().get_template(template).render(values)
    return page


def make_environment() -> Any:
    jinja2 = import_extra("jinja2", "pages need jinja2", "report")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
