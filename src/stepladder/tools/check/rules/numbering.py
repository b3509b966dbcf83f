"""Numbers that each rank gives to values: rows of an embedding, classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stepladder.tools.check.rules.base import Faults, Seen
from stepladder.tools.check.tree import CodeFile, last_name


def own_index(seen: Seen) -> Faults:
    """The same values, numbered by the same line, with other numbers on two ranks."""
    if not seen.many:
        return
    lines = {(file.name, line) for file in seen.source.files for line in numbering_lines(file)}
    each = [log.of("numbered") for log in seen.run.ranks[:2]]
    for one, other in zip(*each, strict=False):
        place = seen.place(one["at"])
        if (
            one["at"] != other["at"]
            or one["digest"] == other["digest"]
            or (place.file, place.line) not in lines
        ):
            continue
        numbers = [
            {value: number for number, value in enumerate(e["values"])} for e in (one, other)
        ]
        for value, number in numbers[0].items():
            if numbers[1].get(value, number) != number:
                said = f"{value} is number {number} on rank 0 and number {numbers[1][value]} on rank 1; "
                said += f"rank 0 has numbered {one['count']} values and rank 1 {other['count']}"
                yield seen.fault("own-index", one["at"], said)
                return


def numbering_lines(file: CodeFile) -> Iterator[int]:
    """Lines with an `enumerate` whose numbers become a dict's values, with what they number as
    keys.
    """
    for node in ast.walk(file.tree):
        if isinstance(node, ast.DictComp) and is_numbering(
            node.generators[0].target, node.key, node.value
        ):
            yield from lines_of(node.generators[0].iter)
        elif isinstance(node, ast.For):
            for part in node.body:
                target = part.targets[0] if isinstance(part, ast.Assign) else None
                if (
                    isinstance(part, ast.Assign)
                    and isinstance(target, ast.Subscript)
                    and is_numbering(node.target, target.slice, part.value)
                ):
                    yield from lines_of(node.iter)


def is_numbering(target: ast.expr, key: ast.expr, value: ast.expr) -> bool:
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return False
    return [ast.unparse(part) for part in target.elts] == [ast.unparse(value), ast.unparse(key)]


def lines_of(call: ast.expr) -> Iterator[int]:
    if isinstance(call, ast.Call) and last_name(call.func) == "enumerate":
        yield from range(call.lineno, (call.end_lineno or call.lineno) + 1)
