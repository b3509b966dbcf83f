"""Python files, read and parsed without being run."""

from __future__ import annotations

import ast
from pathlib import Path

from stepladder.core.errors import as_input_error
from stepladder.core.typed_file import read_file

# What ast.parse raises; the last two for code that is nested too deeply.
PARSE_ERRORS = (SyntaxError, ValueError, MemoryError, RecursionError)


def read_source(path: Path) -> bytes:
    """Return the text of a Python file.

    Raises:
        InputError: It is no file, or larger than any source file.
    """
    with as_input_error(f"{path.name} cannot be read", f"ls -l {path}", (OSError, ValueError)):
        return read_file(path)


def parse_source(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file.

    Raises:
        InputError: It is not Python, or cannot be read.
    """
    text = read_source(path)
    hint = f"python -m py_compile {path}"
    with as_input_error(f"{path.name} is not valid Python", hint, PARSE_ERRORS):
        return ast.parse(text, str(path))
