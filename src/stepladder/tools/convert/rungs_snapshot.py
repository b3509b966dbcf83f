"""The rungs that let a training go on where it was stopped."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import indent

from stepladder.tools.check.events import OBJECT_OF, NamesInUse
from stepladder.tools.check.script_source import dotted_name, find_nodes, last_name, stored_names
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.loops import (
    arguments_of_range,
    counter_of,
    find_epoch_loops,
    find_loops_by_hand,
    find_training_loops,
    name_of_epoch,
)
from stepladder.tools.convert.rungs import assigned_before, statements_after
from stepladder.tools.convert.source import INDENT, CannotConvert, Edit, Loop, SourceText

FORMS_OF_PARTS = {"model": "inner_model({})", "generator": "GeneratorState({})"}
FORM_OF_OBJECTS = "Attributes({})"
STEPS_BETWEEN_SNAPSHOTS = "steps_between_snapshots = 100  # of a training without epochs"
# What comes before the loop over epochs, and at the end of an epoch.
STOP_FORMS = {
    False: ("watch_for_stop()", "exit_if_asked()"),
    True: (
        "stop_signals = StopSignals().__enter__()",
        "if stop_signals.agreed():\n    sys.exit(75)",
    ),
}


@dataclass(frozen=True)
class _SavingLoop:
    """The loop that saves snapshots: over epochs, or over steps where there are none.

    Args:
        file: Its file.
        loop: The loop.
        turn: An expression of the number of turns that are over, at the end of one.
        is_of_steps: Whether it saves every some turns.
    """

    file: SourceText
    loop: Loop
    turn: str
    is_of_steps: bool

    def insert_at_end(self, text: str) -> Edit:
        """Return the edit that does something at the end of those turns that save."""
        if self.is_of_steps:
            text = f"if {self.turn} % steps_between_snapshots == 0:\n{indent(text, INDENT)}"
        return self.file.insert_after(self.loop.body[-1], text)


def _find_saving_loop(conversion: Conversion) -> _SavingLoop:
    """Return the loop that saves snapshots.

    Raises:
        CannotConvert: There is none, or another loop repeats it.
    """
    for loader in conversion.facts.loaders:
        for loops in find_training_loops(conversion, loader):
            for file, loop in loops[1:]:
                raise CannotConvert(
                    f"{file.name}:{loop.lineno} repeats the loop over epochs: a snapshot would have"
                    " to know in which turn it was saved"
                )
    by_hand = list(find_loops_by_hand(conversion))
    over_epochs = list(find_epoch_loops(conversion))
    for file, loop in over_epochs[1:]:
        raise CannotConvert(
            f"{file.name}:{loop.lineno} trains after another loop over epochs: a snapshot would"
            " have to know in which of them it was saved"
        )
    for file, loop in [*over_epochs, *by_hand]:
        if isinstance(loop, ast.For):
            turn = f"({name_of_epoch(file, loop)} + 1)"
            return _SavingLoop(file, loop, turn, is_of_steps=(file, loop) in by_hand)
        if isinstance(loop, ast.While) and (counter := counter_of(loop)):
            return _SavingLoop(file, loop, counter, is_of_steps=True)
    raise CannotConvert("no loop over epochs, and none that counts steps: when is it to save?")


def parts_of(conversion: Conversion, file: SourceText, loop: Loop) -> dict[str, str]:
    """Return what has a state to save: its name in the function of a loop, and its form.

    Raises:
        CannotConvert: A model, an optimizer, a schedule or a scaler has no name there.
    """
    scope, facts = file.scope_of(loop), conversion.facts
    forms = dict.fromkeys(("optimizer", "schedule", "scaler"), "{}") | FORMS_OF_PARTS
    forms |= dict.fromkeys(_classes_that_change(conversion), FORM_OF_OBJECTS)
    kinds: dict[int, str] = {}
    # A model may be an object of the user's, too.
    for event in sorted(facts.log.select(NamesInUse), key=lambda e: e.what.startswith(OBJECT_OF)):
        if event.what in forms and (event.what != "model" or event.object in facts.trained_models):
            kinds.setdefault(event.object, event.what)
    names: dict[int, str] = {}
    for event in facts.log.select(NamesInUse):
        for location, _, name in facts.uses_in(event):
            if name and conversion.is_known(location) and conversion.scope(location) is scope:
                names.setdefault(event.object, name)
    without = {kind for item, kind in kinds.items() if item not in names}
    if any(kind != "generator" and not kind.startswith(OBJECT_OF) for kind in without):
        raise CannotConvert(
            f"{file.name}:{loop.lineno} has no name for a model, an optimizer or a schedule"
        )
    named = [(name, kinds[item]) for item, name in names.items() if item in kinds]
    return {name: forms[kind].format(name) for name, kind in named}


def _changing_values(file: SourceText, loop: Loop) -> list[str]:
    """Return the variables that have a value before a loop, which it assigns, or adds to."""
    changed = dict.fromkeys([*stored_names(loop), *_names_with_items_changed(loop)])
    before = assigned_before(file, loop) | _declared_globals(file, loop)
    return [name for name in changed if name in before]


def _names_with_items_changed(loop: Loop) -> Iterator[str]:
    """Yield the variables of lists and dictionaries that grow, or get other items."""
    for node in ast.walk(loop):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="append" | "extend")):
                yield _owner_of_items(owner)
            case ast.Subscript(value=owner, ctx=ast.Store()):
                yield _owner_of_items(owner)


def _owner_of_items(node: ast.expr) -> str:
    """Return `history` of `history["loss"][0]`; empty where it is no variable's item."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return getattr(node, "id", "")


def _declared_globals(file: SourceText, loop: Loop) -> set[str]:
    """Return the variables of the module that the function of a loop assigns."""
    items = file.nodes(ast.Global, file.scope_of(loop))
    return {name for item in items for name in item.names}


def _values_of_some_turns(file: SourceText, loop: Loop) -> list[str]:
    """Return the variables that only some turns assign, as those of the best, and later lines read.

    They need not have a value before the loop.
    """
    choices = [item for item in loop.body if isinstance(item, ast.If)]
    named = {name for item in choices for name in stored_names(item)}
    named -= {name for item in {*loop.body} - {*choices} for name in stored_names(item)}
    read = chain.from_iterable(file.nodes(ast.Name, s) for s in statements_after(file, loop))
    return sorted(named.intersection(node.id for node in read) - assigned_before(file, loop))


def _globals_changed_by(file: SourceText, loop: Loop) -> list[str]:
    """Return the variables of the module that functions change which a loop calls."""
    functions = {item.name: item for item in file.nodes(ast.FunctionDef)}
    callers: list[ast.AST] = [loop]
    for caller in callers:  # which grows
        called = {last_name(call.func) for call in file.nodes(ast.Call, caller)}
        callers += [functions.pop(name) for name in sorted(called & functions.keys())]
    declared = chain.from_iterable(file.nodes(ast.Global, item) for item in callers)
    changed = set(chain.from_iterable(item.names for item in declared))
    of_module = (node for node in file.nodes(ast.Name) if file.scope_of(node) is file.tree)
    return sorted(changed & {node.id for node in of_module if isinstance(node.ctx, ast.Store)})


def _classes_that_change(conversion: Conversion) -> set[str]:
    """Return what the objects of the user's are recorded as that change their own attributes."""
    classes = chain.from_iterable(f.nodes(ast.ClassDef) for f in conversion.files.values())
    return {
        f"{OBJECT_OF}{item.name}"
        for item in classes
        if any(_changes_itself(method) for method in find_nodes(item, ast.FunctionDef))
    }


def _changes_itself(method: ast.FunctionDef) -> bool:
    """Return whether a method that does not make its object assigns to one of its attributes."""
    return method.name != "__init__" and any(
        isinstance(node.ctx, ast.Store) and dotted_name(node).startswith("self.")
        for node in find_nodes(method, ast.Attribute)
    )


def save_and_resume(conversion: Conversion) -> Edits:
    """Save everything at the end of each epoch, or every some steps, and go on from there."""
    saving = _find_saving_loop(conversion)
    file, loop = saving.file, saving.loop
    changing, of_some_turns = _changing_values(file, loop), _values_of_some_turns(file, loop)
    scope, of_module = file.scope_of(loop), _globals_changed_by(file, loop)
    changing = list(dict.fromkeys([*changing, *of_module]))
    declared = _declared_globals(file, loop)
    if not isinstance(scope, ast.Module) and (missing := sorted({*of_module} - declared)):
        yield file.insert_before(scope.body[0], f"global {', '.join(missing)}")
    forms = parts_of(conversion, file, loop)
    parts = ", ".join(f'"{name.removeprefix("self.")}": {form}' for name, form in forms.items())
    path = _free_name(conversion)
    lines = [f"saved_parts = {{{parts}}}", f'last_saved = load_snapshot("{path}", saved_parts)']
    lines += [f'{name} = last_saved.get("{name}", {name})' for name in changing]
    lines += [f'{name} = last_saved.get("{name}")' for name in of_some_turns]
    lines += [STEPS_BETWEEN_SNAPSHOTS] * saving.is_of_steps
    yield file.insert_before(loop, "\n".join(lines))
    values = "".join(f", {name}={name}" for name in [*changing, *of_some_turns])
    if isinstance(loop, ast.For):
        yield _begin_at(file, loop)
        values = f", epoch={saving.turn.strip('()')}{values}"
        epoch = name_of_epoch(file, loop)
        if file.text_of(loop.target) != epoch:
            yield file.replace(loop.target, epoch)
    yield saving.insert_at_end(f'save_snapshot("{path}", saved_parts{values})')


def _begin_at(file: SourceText, loop: ast.For) -> Edit:
    """Return the edit that begins a loop over a range at the epoch of the snapshot.

    Raises:
        CannotConvert: It is over something else.
    """
    match arguments_of_range(loop):
        case [end]:
            return file.replace(end, f'last_saved.get("epoch", 0), {file.text_of(end)}')
        case [first, _]:
            return file.replace(first, f'last_saved.get("epoch", {file.text_of(first)})')
    raise CannotConvert(f"{file.name}:{loop.lineno} is no loop over a range")


def _free_name(conversion: Conversion) -> str:
    """Return the name of a snapshot that no file of the folder has."""
    folder = Path(conversion.facts.recording.original)
    stem = Path(conversion.main).stem
    names = (f"{stem}_snapshot{suffix}.pt" for suffix in ("", *range(2, 100)))
    return next(name for name in names if not (folder / name).exists())


def stop_when_asked(conversion: Conversion) -> Edits:
    """End with exit code 75 after the next snapshot once SIGTERM has come."""
    saving = _find_saving_loop(conversion)
    before, after = STOP_FORMS[conversion.imports_stepladder]
    yield saving.file.insert_before(saving.loop, before)
    yield saving.insert_at_end(after)
