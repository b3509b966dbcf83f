"""The rule for numbers that each rank gives to values: rows of an embedding, classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stepladder.tools.check.events import Numbering
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.script_source import (
    ScriptSource,
    SourceFile,
    last_name,
)


@run_rule("own-index")
def own_index(evidence: RunEvidence) -> Findings:
    """Find values that the same line numbers differently on two ranks."""
    if not evidence.has_several_ranks:
        return
    lines = all_numbering_lines(evidence.source)
    numberings = [log.select(Numbering) for log in evidence.run.ranks[:2]]
    for first, second in zip(*numberings, strict=False):
        if first.at != second.at or first.digest == second.digest:
            continue
        line = evidence.location(first.at)
        if (line.file, line.line) not in lines:
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


def all_numbering_lines(source: ScriptSource) -> set[tuple[str, int]]:
    lines = set()
    for file in source.files:
        for line in numbering_lines(file):
            lines.add((file.name, line))
    return lines


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
    if not isinstance(statement, ast.Assign):
        return False
    target = statement.targets[0]
    if not isinstance(target, ast.Subscript):
        return False
    return is_numbering(loop.target, target.slice, statement.value)


def is_numbering(
    target: ast.expr,
    key: ast.expr,
    value: ast.expr,
) -> bool:
    """Return whether the target is the pair of this value (a number) and this key."""
    if not isinstance(target, ast.Tuple):
        return False
    names = [ast.unparse(part) for part in target.elts]
    number = ast.unparse(value)
    numbered = ast.unparse(key)
    return names == [number, numbered]


def enumerate_lines(call: ast.expr) -> Iterator[int]:
    if not isinstance(call, ast.Call):
        return
    if last_name(call.func) == "enumerate":
        last_line = call.end_lineno or call.lineno
        yield from range(call.lineno, last_line + 1)
