"""Which expression of a line has shown a number."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from contextlib import suppress

from stepladder.tools.check.relations.shown import SHOWN_NUMBER
from stepladder.tools.check.script_source import dotted_name, find_nodes, stored_names
from stepladder.tools.convert.source import SourceText

FIELD_OF_PERCENT = re.compile(r"%(?P<name>)[-+#0]*[\d.]*[a-zA-Z]")
FIELD_OF_FORMAT = re.compile(r"\{(?P<name>\w*)[^{}]*\}")
Piece = str | ast.expr  # a text, or what is shown between texts


def find_shown_expression(file: SourceText, line: int, text: str, position: int) -> ast.expr | None:
    """Return the expression that has shown a number; None if it is not known.

    Args:
        file: The file.
        line: The line that shows it.
        text: What the line has shown.
        position: Which of the numbers in the text.
    """
    pieces: list[Piece] = []
    with suppress(IndexError, ValueError):  # a text that is no plain format
        for call in file.nodes_at(ast.Call, line)[-1:]:
            pieces = _pieces_of_call(call)
    pattern = "".join(re.escape(p) if isinstance(p, str) else "(.*?)" for p in pieces)
    expressions = [piece for piece in pieces if isinstance(piece, ast.expr)]
    number = list(SHOWN_NUMBER.finditer(text))[position]
    if match := re.fullmatch(pattern, text, re.DOTALL):
        for index, expression in enumerate(expressions, 1):
            if match.start(index) <= number.start() < match.end(index):
                return expression
    return None


def find_deciding_value(file: SourceText, shown: ast.expr) -> ast.expr | None:
    """Return what is assigned to a shown variable by which the script decides what to do next.

    Each process must decide alike, so the value itself is that of all, and not only what is shown.
    """
    scope = file.scope_of(shown)
    tests = [item.test for item in find_nodes(scope, ast.If)]
    tests += [item.test for item in find_nodes(scope, ast.While)]
    tested = {node.id for test in tests for node in find_nodes(test, ast.Name)}
    stored = stored_names(scope)
    known = {
        target.id: item.value
        for item in find_nodes(scope, ast.Assign)
        for target in item.targets[:1]
        if isinstance(target, ast.Name) and stored.count(target.id) == len(item.targets) == 1
    }
    for node in find_nodes(scope, ast.Attribute):
        if node.attr == "backward":  # the loss, of which each process has its own
            known.pop(dotted_name(node.value), None)
    value: ast.expr | None = shown
    while isinstance(value, ast.Name):
        value = known.pop(value.id, None) if value.id in tested else None
    return value if value is not shown else None


def _pieces_of_call(call: ast.Call) -> list[Piece]:
    match call:
        case ast.Call(ast.Attribute(), [ast.Constant(str() as text), _, *_]) if "%" in text:
            # Of logging.
            return _fill(FIELD_OF_PERCENT, text, lambda _, index: call.args[index + 1])
    pieces: list[Piece] = []
    for argument in (*call.args, *(item.value for item in call.keywords)):
        pieces += [" "] * bool(pieces) + _pieces_of(argument)
    return pieces


def _pieces_of(node: ast.expr) -> list[Piece]:
    match node:
        case ast.Constant(value=value):
            return [str(value)]
        case ast.JoinedStr(values=values):
            return [piece for value in values for piece in _pieces_of(value)]
        case ast.FormattedValue(value=value):
            return [value]
        case ast.Dict(keys=keys, values=values):
            pieces: list[Piece] = []
            for key, value in zip(keys, values, strict=True):
                pieces += [", ", f"{ast.unparse(key or value)}: ", value]
            return ["{", *pieces[1:], "}"]
        case ast.BinOp(left=ast.Constant(value=str() as text), op=ast.Mod(), right=right):
            values = right.elts if isinstance(right, ast.Tuple) else [right]
            return _fill(FIELD_OF_PERCENT, text, lambda _, index: values[index])
        case ast.Call(func=ast.Attribute(ast.Constant(str() as text), "format")):
            named = {item.arg: item.value for item in node.keywords}
            return _fill(
                FIELD_OF_FORMAT,
                text,
                lambda name, index: named.get(name) or node.args[int(name or index)],
            )
    return [node]


def _fill(
    pattern: re.Pattern[str], text: str, value_of: Callable[[str, int], ast.expr]
) -> list[Piece]:
    """Return a text with values in place of its fields."""
    pieces: list[Piece] = []
    index = end = 0
    text = text.replace("%%", "%")
    for match in pattern.finditer(text):
        value = value_of(match["name"], index)
        index += not match["name"]
        pieces += [text[end : match.start()], value]
        end = match.end()
    return [*pieces, text[end:]]
