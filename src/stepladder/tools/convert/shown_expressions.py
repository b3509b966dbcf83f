"""Which expression of a line has shown a number."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection
from contextlib import suppress

from stepladder.tools.check.relations.shown import SHOWN_NUMBER
from stepladder.tools.check.script_source import dotted_name, find_nodes, stored_names
from stepladder.tools.convert.source import Edit, SourceText

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
            pieces = _pieces_of_call(call, _assigned_once(file.scope_of(call)))
    pattern = "".join(re.escape(p) if isinstance(p, str) else "(.*?)" for p in pieces)
    expressions = [piece for piece in pieces if isinstance(piece, ast.expr)]
    number = list(SHOWN_NUMBER.finditer(text))[position]
    if match := re.fullmatch(pattern, text, re.DOTALL):
        for index, expression in enumerate(expressions, 1):
            if match.start(index) <= number.start() < match.end(index):
                return expression
    return None


def find_deciding_value(
    file: SourceText, shown: ast.expr, objects: Collection[str]
) -> ast.expr | None:
    """Return what a shown variable has by which the script decides what to do next.

    Each process must decide alike, so the value itself is that of all, and not only what is shown:
    what is assigned to a variable, or an attribute.

    Args:
        file: The file.
        shown: What is shown.
        objects: The names of objects that may decide by what they are given, as one that stops
            early.
    """
    scope = file.scope_of(shown)
    tested = {text for test in _tests_in(scope) for text in _names_in(test)}
    for call in find_nodes(scope, ast.Call):
        owner, _, name = dotted_name(call.func).rpartition(".")
        if name == "step" or owner in objects or name in objects:
            tested.update(text for argument in call.args for text in _names_in(argument))
    known = _assigned_once(scope)
    for node in find_nodes(scope, ast.Attribute):
        if node.attr == "backward":  # the loss, of which each process has its own
            known.pop(dotted_name(node.value), None)
    value: ast.expr | None = shown
    while isinstance(value, ast.Name):
        value = known.pop(value.id, None) if value.id in tested else None
    is_decided = value is not shown or ast.unparse(shown) in tested
    return value if is_decided else None


def find_given(file: SourceText, shown: ast.expr, objects: Collection[str]) -> list[ast.expr]:
    """Return what a function gives first to an object that it shows, as to a meter of a mean.

    Args:
        file: The file.
        shown: What is shown.
        objects: The names of objects; nothing else is given something.
    """
    return [
        item.value.args[0]
        for item in file.nodes(ast.Expr, file.scope_of(shown))
        if isinstance(item.value, ast.Call) and item.value.args
        if dotted_name(item.value.func).rpartition(".")[0] == file.text_of(shown)
        if file.text_of(shown) in objects
    ]


def _assigned_once(scope: ast.AST) -> dict[str, ast.expr]:
    """Return the values of variables that one statement assigns."""
    stored = stored_names(scope)
    return {
        target.id: item.value
        for item in find_nodes(scope, ast.Assign)
        for target in item.targets[:1]
        if isinstance(target, ast.Name) and stored.count(target.id) == len(item.targets) == 1
    }


def _tests_in(scope: ast.AST) -> list[ast.expr]:
    tests = [item.test for item in find_nodes(scope, ast.If)]
    return [*tests, *(item.test for item in find_nodes(scope, ast.While))]


def _names_in(node: ast.AST) -> set[str]:
    """Return the variables, attributes and items in an expression."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    return {ast.unparse(item) for kind in kinds for item in find_nodes(node, kind)}


def take_of_all(file: SourceText, node: ast.expr, helper: str) -> list[Edit]:
    """Return the edits that make a value that of all processes.

    An attribute or an item by which the script decides gets it before the first statement that
    reads it.
    """
    text, shown = ast.unparse(node), file.statement_at(node.lineno)
    tests = [test for test in _tests_in(file.scope_of(node)) if text in _names_in(test)]
    if not isinstance(node, ast.Attribute | ast.Subscript) or not tests:
        return file.wrap(node, f"{helper}(")
    tested = {item for test in tests for item in file.parents_of(test)}
    block = file.block_of(shown)
    first = next(item for item in block if item is shown or item in tested)
    return [file.insert_before(first, f"{text} = {helper}({text})")]


def _pieces_of_call(call: ast.Call, assigned: dict[str, ast.expr]) -> list[Piece]:
    match call:
        case ast.Call(ast.Attribute(), [ast.Constant(str() as text), _, *_]) if "%" in text:
            # Of logging.
            return _fill(FIELD_OF_PERCENT, text, lambda _, index: call.args[index + 1])
    pieces: list[Piece] = []
    for argument in (*call.args, *(item.value for item in call.keywords)):
        message = assigned.get(getattr(argument, "id", ""), argument)
        parts = _parts_of_sum(message)
        own = [piece for part in parts for piece in _pieces_of(part)]
        if own == parts:  # a number
            own = [argument]
        pieces += [" "] * bool(pieces) + own
    return pieces


def _parts_of_sum(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_parts_of_sum(node.left), *_parts_of_sum(node.right)]
    return [node]


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
