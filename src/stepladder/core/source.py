"""Python files, looked at without being run."""

from __future__ import annotations

import ast
from pathlib import Path

from stepladder.core.errors import naming
from stepladder.core.stored import read

NO_SOURCE = (
    SyntaxError,
    ValueError,
    MemoryError,
    RecursionError,
)  # the last two: nested too deeply


def source_of(path: Path) -> bytes:
    """Raises InputError for what is no file, or one that is larger than any source."""
    with naming(f"{path.name} cannot be read", f"ls -l {path}", (OSError, ValueError)):
        return read(path)


def parsed(path: Path) -> ast.Module:
    """Raises InputError for what is no Python, or cannot be read."""
    text = source_of(path)
    with naming(f"{path.name} is not valid Python", f"python -m py_compile {path}", NO_SOURCE):
        return ast.parse(text, str(path))
