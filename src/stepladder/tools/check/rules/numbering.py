"""The rule for numbers that each rank gives to values: rows of an embedding, classes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from stepladder.tools.check.events import Numbering
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule
from stepladder.tools.check.script_source import ScriptSource, SourceFile, last_name, lines_of
from stepladder.tools.findings.finding import Location


@rank_rule("own-index")
def own_index(evidence: RunEvidence) -> Findings:
    """Find values that the same line numbers differently on two ranks."""
    lines = all_numbering_lines(evidence.source)
    for first, second in align(log.select(Numbering) for log in evidence.first_ranks):
        are_different = first.at == second.at and first.digest != second.digest
        if not are_different or evidence.location(first.at) not in lines:
            continue
        value = first_renumbered_value(first, second)
        if value is not None:
            first_number = number_of_each_value(first)[value]
            second_number = number_of_each_value(second)[value]
            yield evidence.finding(
                "own-index",
                first.at,
                f"{value} is number {first_number} on rank 0 and number {second_number} on rank "
                f"1; rank 0 has numbered {first.count} values and rank 1 {second.count}",
            )
            return


def first_renumbered_value(first: Numbering, second: Numbering) -> str | None:
    """Return the first value that two ranks number differently."""
    second_numbers = number_of_each_value(second)
    for value, number in number_of_each_value(first).items():
        if second_numbers.get(value, number) != number:
            return value
    return None


def number_of_each_value(event: Numbering) -> dict[str, int]:
    return {value: number for number, value in enumerate(event.values)}


def all_numbering_lines(source: ScriptSource) -> set[Location]:
    return {Location(file.name, line) for file in source.files for line in numbering_lines(file)}


def numbering_lines(file: SourceFile) -> Iterator[int]:
    """Yield the lines of each `enumerate` whose numbers become the values of a dict.

    The keys of that dict are what is numbered.
    """
    for node in ast.walk(file.tree):
        if isinstance(node, ast.DictComp):
            generator = node.generators[0]
            if is_numbering(generator.target, node.key, node.value):
                yield from enumerate_lines(generator.iter)
        elif isinstance(node, ast.For) and any(
            fills_dict(node, statement) for statement in node.body
        ):
            yield from enumerate_lines(node.iter)


def fills_dict(loop: ast.For, statement: ast.stmt) -> bool:
    """Return whether a statement is `numbers[value] = number` for the targets of its loop."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not isinstance(statement, ast.Assign) or not isinstance(target, ast.Subscript):
        return False
    return is_numbering(loop.target, target.slice, statement.value)


def is_numbering(target: ast.expr, key: ast.expr, value: ast.expr) -> bool:
    """Return whether the target is the pair of this value (a number) and this key."""
    if not isinstance(target, ast.Tuple):
        return False
    return list(map(ast.unparse, target.elts)) == list(map(ast.unparse, (value, key)))


def enumerate_lines(call: ast.expr) -> Iterable[int]:
    is_enumerate = isinstance(call, ast.Call) and last_name(call.func) == "enumerate"
    return lines_of(call) if is_enumerate else ()
