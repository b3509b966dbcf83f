"""The loops of a script: over epochs, over batches, and over steps."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from itertools import islice

from stepladder.tools.check.script_source import last_name
from stepladder.tools.convert.conversion import Conversion
from stepladder.tools.convert.facts import LoaderFacts, Use
from stepladder.tools.convert.source import CannotConvert, Loop, SourceText


def find_epoch_loops(conversion: Conversion) -> Iterator[tuple[SourceText, ast.For]]:
    """Yield the `for` loops in which a training loader is iterated again."""
    found: dict[tuple[SourceText, Loop], None] = {}
    for loader in conversion.facts.loaders:
        for loops in find_training_loops(conversion, loader):
            found |= dict.fromkeys(loops[:1])
    for file, loop in found:
        if isinstance(loop, ast.For):
            yield file, loop


def find_loops_that_train(conversion: Conversion) -> Iterator[tuple[SourceText, Loop]]:
    """Yield the loops over epochs, and those over steps of a training without loaders."""
    yield from find_epoch_loops(conversion)
    yield from find_loops_by_hand(conversion)


def find_training_loops(
    conversion: Conversion, loader: LoaderFacts
) -> Iterator[list[tuple[SourceText, Loop]]]:
    """Yield the loops around each loop over a training loader, the innermost first.

    What is listed in the source, such as ["train", "val"], is done in each epoch.
    """
    for uses in loader.training_uses:
        loops = islice(_loops_around(conversion, uses), loader.is_by_hand, None)
        yield [item for item in loops if not getattr(getattr(item[1], "iter", 0), "elts", [])]


def find_loops_by_hand(conversion: Conversion) -> Iterator[tuple[SourceText, Loop]]:
    """Yield the innermost loops around the steps of a script that trains without a loader."""
    for loader in conversion.facts.loaders:
        for uses in loader.uses * (loader.is_training and loader.is_by_hand):
            yield from islice(_loops_around(conversion, uses), 1)


def arguments_of_range(loop: Loop | None) -> list[ast.expr]:
    """Return the arguments of the range that a loop is over, as `tqdm(range(10))` is; [] of others.

    What shows the progress of a range has it first. Python's own functions, as `reversed`, change
    its turns.
    """
    turns = getattr(loop, "iter", None)
    while isinstance(turns, ast.Call):
        name = last_name(turns.func)
        if name in ("range", "trange"):
            return turns.args
        turns = turns.args[0] if turns.args and not hasattr(builtins, name) else None
    return []


def counter_of(loop: Loop) -> str:
    """Return the variable that a loop counts up in each turn; empty if there is none."""
    for item in loop.body:
        match item:
            case ast.AugAssign(ast.Name(id=name), ast.Add(), ast.Constant(value=1)):
                return name
    return ""


def _loops_around(
    conversion: Conversion, uses: tuple[Use, ...]
) -> Iterator[tuple[SourceText, Loop]]:
    for depth, use in enumerate(uses):
        if conversion.is_known(use.location):
            file = conversion.file(use.location)
            for loop in file.loops_around(conversion.statement(use.location)):
                if depth or not iterates_at(loop, use.location.line):
                    yield file, loop


def iterates_at(loop: Loop, line: int) -> bool:
    return isinstance(loop, ast.For) and loop.iter.lineno <= line <= (loop.iter.end_lineno or 0)


def name_of_epoch(file: SourceText, loop: ast.For) -> str:
    """Return the variable of a loop over epochs; one without a name gets one.

    Raises:
        CannotConvert: The loop has several variables.
    """
    if not isinstance(loop.target, ast.Name):
        raise CannotConvert(f"{file.name}:{loop.lineno} has no variable for the epoch")
    return "epoch" if loop.target.id == "_" else loop.target.id
