"""Edits of a file by lines and columns, and the patch of them."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass

from stepladder.tools.check.script_source import SourceFile


@dataclass(frozen=True)
class Edit:
    """A change of one file.

    Args:
        line: The first line, counted from 1.
        column: Where the change begins, in bytes.
        end_line: The last line.
        end_column: Where it ends.
        text: What stands there afterwards.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


Edits = list[Edit]


def overlap(first: Edit, second: Edit) -> bool:
    """Return whether two edits change the same place; two insertions at one place do not."""
    if first == second:
        return True
    starts_before = (first.line, first.column) < (second.end_line, second.end_column)
    ends_after = (second.line, second.column) < (first.end_line, first.end_column)
    return starts_before and ends_after


def apply_edits(text: str, edits: Edits) -> str:
    lines = text.encode().splitlines(keepends=True)
    for edit in sorted(edits, key=lambda edit: (edit.line, edit.column), reverse=True):
        before = lines[edit.line - 1][: edit.column]
        after = lines[edit.end_line - 1][edit.end_column :]
        lines[edit.line - 1 : edit.end_line] = [before + edit.text.encode() + after]
    return b"".join(lines).decode()


def format_diff(file: SourceFile, text: str) -> str:
    lines = difflib.unified_diff(
        file.text.splitlines(keepends=True),
        text.splitlines(keepends=True),
        f"a/{file.name}",
        f"b/{file.name}",
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def replace_node(node: ast.expr, text: str) -> Edit:
    end_line = node.end_lineno or node.lineno
    end_column = node.end_col_offset or node.col_offset
    return Edit(node.lineno, node.col_offset, end_line, end_column, text)


def insert_before(file: SourceFile, line: int, statement: str) -> Edit:
    """Return the edit that puts a statement before a line, as deep as that line."""
    indent = indentation(file, line)
    return Edit(line, 0, line, 0, f"{indent}{statement}\n")


def insert_after(file: SourceFile, statement: ast.stmt, text: str) -> Edit:
    indent = indentation(file, statement.lineno)
    end_line = statement.end_lineno or statement.lineno
    end_column = statement.end_col_offset or 0
    return Edit(end_line, end_column, end_line, end_column, f"\n{indent}{text}")


def indentation(file: SourceFile, line: int) -> str:
    text = file.line(line)
    return text[: len(text) - len(text.lstrip())]
