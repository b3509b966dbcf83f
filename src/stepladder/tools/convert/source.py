"""A script's files as text and as syntax trees, and edits of them that keep everything else."""

from __future__ import annotations

import ast
import difflib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from stepladder.tools.check.script_source import Node, SourceFile, find_nodes

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While | ast.AsyncFor
INDENT = "    "


# The order of edits at one place.
AFTER, BEFORE, AROUND, INDENTED, WITHIN, ENDED, PARTED = range(7)


class CannotConvert(Exception):
    """A step cannot be made; the text says what a person must decide or do."""


@dataclass(frozen=True)
class Edit:
    """A part of a file's text that is replaced.

    Args:
        file: The name of the file.
        start: Where it begins, as an index of the original text.
        end: Where it ends; `start` where text is inserted.
        text: What comes in its place.
        order: Which comes first of several at one place: what ends a block, what comes before a
            statement, what is put around it, its indentation, what changes within it, what ends
            the block of its line, and what parts it from the next statement of that line.
        depth: The indentation of what ends a block: inner blocks end first.
        line: The line whose statements get lines of their own.
    """

    file: str
    start: int
    end: int
    text: str
    order: int = WITHIN
    depth: int = 0
    line: int = 0


@dataclass
class EditedText:
    """A text with edits.

    Args:
        text: The new text.
        original_lines: For each of its lines, the number of the original line; None where the line
            was inserted.
    """

    text: str
    original_lines: list[int | None]


class SourceText(SourceFile):
    """One file of a script, with places and edits of its text."""

    @cached_property
    def line_starts(self) -> list[int]:
        """The index at which each line begins, and that of the end of the text."""
        starts = [0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def index(self, line: int, column: int) -> int:
        """Return the index of a position of the tree, whose columns are bytes."""
        text = self.lines[line - 1]
        return self.line_starts[line - 1] + len(text.encode()[:column].decode())

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.index(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.index(node.end_lineno, node.end_col_offset)

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        return self.text[self.start(node) : self.end(node)]

    def nodes(self, kind: type[Node], within: ast.AST | None = None) -> Iterator[Node]:
        return find_nodes(within or self.tree, kind)

    def nodes_at(self, kind: type[Node], line: int) -> list[Node]:
        """Return the nodes of a kind that cover a line, the innermost first."""
        matches = [
            node
            for node in self.nodes(kind)
            if getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)
        ]
        return sorted(matches, key=lambda node: self.end(node) - self.start(node))  # type: ignore[arg-type]

    def statement_at(self, line: int) -> ast.stmt:
        """Return the innermost statement of a line, the last of several; or the `with` of it.

        Raises:
            CannotConvert: The line has none.
        """
        statements = self.nodes_at(ast.stmt, line)
        if not statements:
            raise CannotConvert(f"{self.name}:{line} is no statement")
        block, parent = self.block_of(statements[0]), self.parents[statements[0]]
        # Of `with open(path) as file: write(file)` the head opens the file.
        if isinstance(parent, ast.With) and self.shares_line(block[0]):
            return parent
        return [item for item in block if item in statements][-1]

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function that holds a node, or the module."""
        return next(item for item in self.parents_of(node) if isinstance(item, Scope))

    def loops_around(self, node: ast.AST) -> list[Loop]:
        """Return the loops of the same function that hold a node, the innermost first."""
        loops: list[Loop] = []
        for item in self.parents_of(node):
            if isinstance(item, Scope):
                break
            if isinstance(item, Loop):
                loops.append(item)
        return loops

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block that holds a statement."""
        parent = self.parents[statement]
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and statement in value:
                return value
        raise CannotConvert(f"{self.name}:{statement.lineno} is in no block")

    def indentation(self, statement: ast.stmt) -> str:
        """Return the white space before a statement, if it has a line of its own."""
        first = self.block_of(statement)[0]
        before = self.text_before(first)
        return before[: len(before) - len(before.lstrip())] + INDENT * self.shares_line(first)

    def text_before(self, statement: ast.stmt) -> str:
        begin = self.line_starts[self.first_line(statement) - 1]
        return self.text[begin : self.start(statement)]

    def shares_line(self, statement: ast.stmt) -> bool:
        """Return whether another statement, or the head of its block, begins its line."""
        before = self.text_before(statement).strip()
        return bool(before) and not before.startswith("@")

    def next_on_line(self, statement: ast.stmt) -> ast.stmt | None:
        """Return the statement of the same block that begins where a statement ends."""
        block = self.block_of(statement)
        following = block[block.index(statement) + 1 :][:1]
        return next((item for item in following if item.lineno == statement.end_lineno), None)

    def first_line(self, statement: ast.stmt) -> int:
        """Return the line at which a statement begins, with its decorators."""
        decorators = getattr(statement, "decorator_list", [])
        return min(statement.lineno, *(int(item.lineno) for item in decorators), statement.lineno)

    def insert_before(self, statement: ast.stmt, text: str, order: int = BEFORE) -> Edit:
        indentation = self.indentation(statement)
        if self.shares_line(statement):
            edit = self.insert(self.start(statement), text, indentation, order)
            return replace(edit, line=statement.lineno)
        begin = self.line_starts[self.first_line(statement) - 1]
        return self.insert(begin, text, indentation, order)

    def insert_after(self, statement: ast.stmt, text: str) -> Edit:
        indentation = self.indentation(statement)
        if following := self.next_on_line(statement):
            return self.insert_before(following, text, AFTER)
        if self.shares_line(self.block_of(statement)[0]):
            end = self.end(statement)
            indented = "".join(f"\n{indentation}{line}" for line in text.splitlines())
            return Edit(self.name, end, end, indented, ENDED, line=statement.lineno)
        assert statement.end_lineno is not None
        at = self.line_starts[statement.end_lineno]
        if not self.text[:at].endswith("\n"):
            indented = "".join(f"\n{indentation}{line}" for line in text.splitlines())
            return Edit(self.name, at, at, indented, AFTER, len(indentation))
        return replace(self.insert(at, text, indentation, AFTER), depth=len(indentation))

    def insert(self, at: int, text: str, indentation: str, order: int) -> Edit:
        lines = [f"{indentation}{line}".rstrip() for line in text.splitlines()]
        return Edit(self.name, at, at, "".join(f"{line}\n" for line in lines), order)

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(self.name, self.start(node), self.end(node), text)

    def replace_between(self, node: ast.expr, following: ast.expr, text: str) -> Edit:
        return Edit(self.name, self.end(node), self.start(following), text)

    def insert_in_call(self, call: ast.Call, argument: str) -> Edit:
        """Return the edit that gives a call one more argument."""
        last = max([*call.args, *(item.value for item in call.keywords)], key=self.end)
        return Edit(self.name, self.end(last), self.end(last), f", {argument}")

    def wrap(self, node: ast.expr, before: str, edited: str = ")") -> list[Edit]:
        """Return the edits that put text around an expression."""
        begin, end = self.start(node), self.end(node)
        return [Edit(self.name, begin, begin, before), Edit(self.name, end, end, edited)]

    def guard(self, statement: ast.stmt, condition: str) -> list[Edit]:
        """Return the edits that put a statement below an `if`.

        Raises:
            CannotConvert: A text of several lines in it would be indented.
        """
        assert statement.end_lineno is not None
        for node in self.nodes(ast.Constant, statement):
            if isinstance(node.value, str) and node.end_lineno != node.lineno:
                raise CannotConvert(f"{self.name}:{node.lineno} is a text of several lines")
        edits = [self.insert_before(statement, f"if {condition}:", AROUND)]
        for line in range(self.first_line(statement), statement.end_lineno + 1):
            if self.lines[line - 1].strip():
                is_shared = line == statement.lineno and self.shares_line(statement)
                begin = self.start(statement) if is_shared else self.line_starts[line - 1]
                edits.append(Edit(self.name, begin, begin, INDENT, INDENTED))
        return edits

    def part_line(self, line: int) -> Iterator[Edit]:
        """Yield the edits that give each statement of a line a line of its own."""
        for statement in self.nodes(ast.stmt):
            if statement.lineno == line and self.shares_line(statement):
                start = self.start(statement)
                before = self.text_before(statement)
                end = start - len(before) + len(before.rstrip(" \t;"))
                yield Edit(self.name, end, start, "\n", PARTED)
                yield Edit(self.name, start, start, self.indentation(statement), INDENTED)

    def apply(self, edits: list[Edit]) -> EditedText:
        """Return the text with edits; those at one place in the order of the list."""
        pieces: list[tuple[str, int | None]] = []  # with the index in the original, if it has one
        position = 0
        shared = sorted({edit.line for edit in edits if edit.line})
        parted = [edit for line in shared for edit in self.part_line(line)]
        for edit in sorted(
            [*edits, *parted], key=lambda edit: (edit.start, edit.order, -edit.depth)
        ):
            if edit.start < position:
                raise CannotConvert(f"{self.name}: two changes of one place")
            pieces += [(self.text[position : edit.start], position), (edit.text, None)]
            position = edit.end
        pieces.append((self.text[position:], position))
        text = "".join(piece for piece, _ in pieces)
        return EditedText(text, self.map_lines(pieces))

    def map_lines(self, pieces: list[tuple[str, int | None]]) -> list[int | None]:
        """Return the original line of each new line: that of its first original character."""
        lines: list[int | None] = [None]
        for piece, position in pieces:
            for offset, character in enumerate(piece):
                if lines[-1] is None and position is not None and not character.isspace():
                    lines[-1] = self.line_at(position + offset)
                if character == "\n":
                    lines.append(None)
        return lines

    def line_at(self, index: int) -> int:
        """Return the number of the line of an index."""
        return bisect_right(self.line_starts, index)


def diff(name: str, before: str, edited: str) -> str:
    """Return the unified diff of a file."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), edited.splitlines(keepends=True), name, name, n=1
    )
    return "".join(lines)
