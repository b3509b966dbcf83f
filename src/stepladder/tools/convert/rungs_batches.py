"""The rung by which each process trains on its share of each batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

from stepladder.tools.check.script_source import parameters_of, stored_names
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.rungs import is_model, wrap_loaders
from stepladder.tools.convert.source import CannotConvert, SourceText
from stepladder.tools.findings.finding import Location


def share_training_samples(conversion: Conversion, divides: bool = False) -> Edits:
    """Give each process its share of each training batch.

    If more than the loader is made with a batch size, what holds it is divided, too.
    """
    if carried := conversion.facts.carried:
        raise CannotConvert(
            f"{carried[0].file}:{carried[0].line} gives the model what it has returned a step"
            " before: each process would continue from samples of another one"
        )
    conversion.gathered.clear()
    if conversion.facts.coupled and not divides:
        with suppress(CannotConvert):
            conversion.gathered.extend(_gather_outputs(conversion))
    yield from conversion.gathered
    yield from wrap_loaders(conversion, True, "share_samples", divides)
    if any(loader.is_training and loader.is_by_hand for loader in conversion.facts.loaders):
        yield from _share_rows(conversion)


def _share_rows(conversion: Conversion) -> Edits:
    """Give each process its rows of the batches that the script cuts, before a model is called.

    A call that reads no such rows, where others do, gets what has been made of shares.
    """
    names_of_rows = conversion.facts.names_of_rows
    calls = [location for location in names_of_rows if location not in conversion.shared_before]
    reading = []
    for location in calls:
        file, statement = conversion.file(location), conversion.statement(location)
        names = {node.id for node in file.nodes(ast.Name, statement)}
        if names & names_of_rows[location] or any(_slices_with(conversion, location)):
            reading.append(location)
    for location in reading or calls:
        yield from _share_rows_of_call(conversion, location, names_of_rows[location])


def _share_rows_of_call(conversion: Conversion, location: Location, having_rows: set[str]) -> Edits:
    """Share the rows that have names before a call of a model.

    Raises:
        CannotConvert: The rows have no name that gets a new value for each batch.
    """
    file, statement = conversion.file(location), _first_with(conversion, location, having_rows)
    around, scope = file.loops_around(statement), file.scope_of(statement)
    named = stored_names(around[0] if around else scope)
    if not around and not isinstance(scope, ast.Module):
        named += parameters_of(scope)
    used = [name for name in _read_after(file, statement) if name in having_rows]
    slices = list(_slices_with(conversion, location))
    if names := [name for name in used if name in named]:
        text = ", ".join(names)
        yield file.insert_before(statement, f"{text} = share_rows({text})")
    elif slices:
        for node in slices:
            yield from file.wrap(node, "share_rows(")
    elif used and around:  # all samples in each step
        text = ", ".join(used)
        yield file.insert_before(around[-1], f"{text} = share_rows({text})")
    else:
        raise CannotConvert(
            f"{location.file}:{location.line} calls the model with rows that have no name:"
            " write `x = ...` and `y = ...` before it in the loop"
        )


def _read_after(file: SourceText, statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a function reads from a statement on, before it assigns to them."""
    lines: dict[tuple[str, bool], int] = {}
    for node in file.nodes(ast.Name, file.scope_of(statement)):
        key = node.id, isinstance(node.ctx, ast.Load)
        if node.lineno >= statement.lineno:
            lines[key] = min(node.lineno, lines.get(key, node.lineno))
    for (name, is_read), line in lines.items():
        if is_read and line <= lines.get((name, False), line):
            yield name


def _first_with(conversion: Conversion, location: Location, names: set[str]) -> ast.stmt:
    """Return the statement of a line, the first that reads one of these names if there are more."""
    file, last = conversion.file(location), conversion.statement(location)
    for item in file.block_of(last):
        loads = [node for node in file.nodes(ast.Name, item) if isinstance(node.ctx, ast.Load)]
        if item.lineno == last.lineno and names.intersection(node.id for node in loads):
            return item
    return last


def _slices_with(conversion: Conversion, location: Location) -> Iterator[ast.Subscript]:
    """Yield what a loop cuts as it cuts what a call on a line gets: `X[i:j]` and `Y[i:j]`."""
    file = conversion.file(location)
    around = file.loops_around(conversion.statement(location))
    cut = {
        file.text_of(argument.slice)
        for call in file.nodes_at(ast.Call, location.line)
        for argument in call.args
        if isinstance(argument, ast.Subscript)
    }
    for node in chain.from_iterable(file.nodes(ast.Subscript, loop) for loop in around[:1]):
        if file.text_of(node.slice) in cut and isinstance(node.ctx, ast.Load):
            yield node


def _gather_outputs(conversion: Conversion) -> Edits:
    """Let a loss that compares the samples of a batch see the rows of all processes.

    Raises:
        CannotConvert: A call of a model is not known by its name.
    """
    for location in conversion.facts.coupled_calls:
        having_rows = conversion.facts.names_of_rows.get(location, set())
        file, statement = conversion.file(location), conversion.statement(location)
        calls = [
            call
            for call in file.nodes_at(ast.Call, location.line)
            if is_model(conversion, file, call.func)
        ]
        given = {node for call in calls for node in ast.walk(call)}
        if not calls or hasattr(statement, "body"):
            raise CannotConvert(f"{location.file}:{location.line} calls no model by its name")
        for call in calls:
            yield from file.wrap(call, "gather_rows(")
        for node in file.nodes(ast.Name, statement):
            if node.id in having_rows and isinstance(node.ctx, ast.Load) and node not in given:
                yield from file.wrap(node, "gather_rows(")
        block = file.block_of(statement)
        later = block[block.index(statement) + 1 :]
        names = (
            [name for name in _read_after(file, later[0]) if name in having_rows] if later else []
        )
        text = "\n".join(f"{name} = gather_rows({name})" for name in dict.fromkeys(names))
        if text:
            yield file.insert_after(statement, text)
