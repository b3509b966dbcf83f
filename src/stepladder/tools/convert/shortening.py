"""A script whose runs make a few epochs, and come to all lines."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from stepladder.tools.check.script_source import parameters_of, stored_names
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.loops import (
    arguments_of_range,
    counter_of,
    find_epoch_loops,
    find_loops_by_hand,
)
from stepladder.tools.convert.rungs import find_lines_not_judged
from stepladder.tools.convert.source import Edit, Loop, SourceText

SELDOM = 10  # numbers of a line, in a run of perhaps more epochs than those that follow
TURNS_BY_HAND = 9  # as of a loader
FIRST_STEPS = 4  # enough for a mean, and few where the script evaluates in these steps


def shorten_epochs(conversion: Conversion, epochs: int) -> Edits:
    """Return the edits of a run that is to come to all lines: it makes a few epochs.

    What prints in each hundredth step, say, and has shown nothing, prints in the first steps, too.
    """
    by_hand = dict.fromkeys(find_loops_by_hand(conversion))
    for file, loop in find_epoch_loops(conversion):
        if (file, loop) not in by_hand:  # the loop of one optimizer may be around another's
            yield from _take_first(file, loop, epochs)
    yield from _shorten_loops_by_hand(by_hand, max(TURNS_BY_HAND, epochs))
    conditions = {
        (file, node.test): None
        for file, call in find_lines_not_judged(conversion, SELDOM)
        for node in file.parents_of(call)
        if isinstance(node, ast.If)
    }
    for file, test in conditions:
        for node in file.nodes(ast.Compare, test):
            if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Mod):
                text = f" or {file.text_of(node.left)} < {FIRST_STEPS})"
                yield from file.wrap(node, "(", text)


def _shorten_loops_by_hand(loops: Iterable[tuple[SourceText, Loop]], turns: int) -> Edits:
    for file, by_hand in loops:
        if isinstance(by_hand, ast.For):
            yield from _take_first(file, by_hand, turns)
        elif isinstance(by_hand, ast.While):
            has_turns = f"{counter_of(by_hand)} < {turns}"
            if not counter_of(by_hand):
                counted = f'setdefault("turns", iter(range({turns}, 0, -1)))'
                has_turns = f'next(vars(__import__("builtins")).{counted}, 0)'
            yield from file.wrap(by_hand.test, f"{has_turns} and (", ")")


def _take_first(file: SourceText, loop: ast.For, turns: int) -> list[Edit]:
    """Return the edits by which a loop makes its first turns. No line is added: runs tell lines.

    A loop over a range ends at the same number where a later rung begins it at another one.
    """
    begin, end = "islice(", f", {turns})"
    args = arguments_of_range(loop)
    if len(args) in (1, 2):
        first = file.text_of(args[0]) if len(args) > 1 else "0"
        begin, end = f"takewhile(({first} + {turns}).__gt__, ", ")"
    lowered = f"[{_lower_end(file, loop, turns)}, "
    return file.wrap(loop.iter, f'__import__("itertools").{begin}{lowered}', f"][1]{end}")


def _lower_end(file: SourceText, loop: ast.For, turns: int) -> str:
    """Return an expression that lowers the end of the range of a loop, which later lines use."""
    args = arguments_of_range(loop)
    end = next(iter(args[1:2] or args), None)
    if isinstance(end, ast.BinOp):
        end = end.left
    if not isinstance(end, ast.Name | ast.Attribute | ast.Subscript):
        return "None"
    name = file.text_of(end)
    excess = f"max(0, len(range({', '.join(map(file.text_of, args))})) - {turns})"
    scope = file.scope_of(loop)
    own = stored_names(scope)
    if not isinstance(scope, ast.Module):
        own += parameters_of(scope)
    if name in own:
        return f"({name} := {name} - {excess})"
    is_global = f"global {name}; " * isinstance(end, ast.Name)
    lines = f"{is_global}\ntry: {name} -= {excess}\nexcept Exception: pass"  # it may be frozen
    return f"exec({lines!r})"
