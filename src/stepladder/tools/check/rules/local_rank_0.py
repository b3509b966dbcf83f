"""Patterns in the source: the lines that only local rank 0 of each node comes to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from stepladder.tools.check.script_source import (
    ScriptSource,
    SourceFile,
    find_nodes,
    last_name,
    lines_of,
)
from stepladder.tools.findings.finding import Location

CHOOSES_LOCAL_RANK_0 = re.compile(
    r"local_?rank\W*(?:== 0|in [\[(]-1, 0)|not (?:\w+\.)*local_?rank|is_local_(?:main|master)"
)
IS_LOCAL_RANK = re.compile(
    r"(?:int\()?(?:[\w.]+\.|(?:os\.)?(?:environ(?:\.get)?|getenv)[\[(]['\"])?local_?rank\b[^=]*"
)


def lines_of_local_rank_0(source: ScriptSource) -> set[Location]:
    """Return the lines that only local rank 0 comes to: under an `if`, and in functions called."""
    lines: set[Location] = set()
    names = names_of_local_rank(source)
    for file, node in source.nodes(ast.If):
        if chooses_local_rank_0(node.test, names):
            for statement in node.body:
                lines |= locations_of(file, statement)
                lines = lines.union(*called_functions(source, statement))
    return lines


def names_of_local_rank(source: ScriptSource) -> dict[str, str]:
    """Return what the script's own names stand for.

    `gpu = int(os.environ["LOCAL_RANK"])` gives `{"gpu": "local_rank"}`, and `is_main = gpu == 0`
    gives `{"is_main": "local_rank == 0"}`.
    """
    names: dict[str, str] = {}
    for _, node in source.nodes(ast.Assign):
        if meaning := meaning_of(node.value, names):
            targets = filter(None, map(last_name, node.targets))
            names |= {name.lower(): meaning for name in targets}
    return names


def meaning_of(value: ast.expr, names: dict[str, str]) -> str:
    """Return "local_rank" or "local_rank == 0" if a value is that, else nothing."""
    text = ast.unparse(value).lower()
    if IS_LOCAL_RANK.fullmatch(text):
        return "local_rank"
    if isinstance(value, ast.Compare) and chooses_local_rank_0(value, names):
        return "local_rank == 0"
    return ""


def chooses_local_rank_0(test: ast.expr, names: dict[str, str]) -> bool:
    """Return whether the test of an `if` is true for local rank 0 alone."""
    text = ast.unparse(test).lower()
    for name, meaning in names.items():
        text = re.sub(rf"\b{name}\b", meaning, text)
    return CHOOSES_LOCAL_RANK_0.search(text) is not None


def locations_of(file: SourceFile, node: ast.stmt) -> set[Location]:
    return {Location(file.name, line) for line in lines_of(node)}


def called_functions(source: ScriptSource, statement: ast.stmt) -> Iterator[set[Location]]:
    """Yield the lines of the script's functions that a statement calls, also through others."""
    known: set[str] = set()
    nodes: list[ast.AST] = [statement]
    while nodes:
        calls = find_nodes(nodes.pop(), ast.Call)
        called = {last_name(call.func) for call in calls} - known
        known |= called
        for file, function in source.nodes(ast.FunctionDef):
            if function.name in called:
                nodes.append(function)
                yield locations_of(file, function)
