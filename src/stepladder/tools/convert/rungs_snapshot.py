"""The rungs that let a training go on where it was stopped."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from stepladder.tools.check.events import NamesInUse
from stepladder.tools.check.script_source import dotted_name, find_nodes, stored_names
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.loops import (
    counter_of,
    find_epoch_loops,
    find_loops_by_hand,
    find_training_loops,
    name_of_epoch,
)
from stepladder.tools.convert.rungs import added_to, assigned_before
from stepladder.tools.convert.source import INDENT, CannotConvert, Edit, Loop, SourceText

FORMS_OF_PARTS = {"model": "inner_model({})", "generator": "GeneratorState({})"}
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
    kinds = {
        event.object: event.what
        for event in facts.log.select(NamesInUse)
        if event.what != "loader"
        and (event.what != "model" or event.object in facts.trained_models)
    }
    names: dict[int, str] = {}
    for event in facts.log.select(NamesInUse):
        for location, _, name in facts.uses_in(event):
            if name and conversion.is_known(location) and conversion.scope(location) is scope:
                names.setdefault(event.object, name)
    if any(kind != "generator" for item, kind in kinds.items() if item not in names):
        raise CannotConvert(
            f"{file.name}:{loop.lineno} has no name for a model, an optimizer or a schedule"
        )
    named = [(name, kinds[item]) for item, name in names.items() if item in kinds]
    return {name: FORMS_OF_PARTS.get(kind, "{}").format(name) for name, kind in named}


def _changing_values(file: SourceText, loop: Loop) -> list[str]:
    """Return the variables that are assigned before a loop, and again or added to in it."""
    changed = dict.fromkeys([*stored_names(loop), *added_to(loop)])
    before = assigned_before(file, loop)
    return [name for name in changed if name in before]


def _owners_in(conversion: Conversion, file: SourceText, loop: Loop) -> Iterator[str]:
    """Yield the names of objects of the user's that change their own attributes in training."""
    trees = (item.tree for item in conversion.files.values())
    changing = {
        item.name
        for tree in trees
        for item in find_nodes(tree, ast.ClassDef)
        if any(_changes_itself(method) for method in find_nodes(item, ast.FunctionDef))
    }
    scope = file.scope_of(loop)
    holder = next((item for item in file.parents_of(loop) if isinstance(item, ast.ClassDef)), None)
    if holder and holder.name in changing:
        yield "self"
    for node in find_nodes(holder or scope, ast.Assign):
        match node:
            case ast.Assign(targets=[target], value=ast.Call(func=function)):
                is_attribute = dotted_name(target).startswith("self.")
                is_known = is_attribute or (
                    file.scope_of(node) is scope and node.lineno < loop.lineno
                )
                if dotted_name(function).rpartition(".")[2] in changing and is_known:
                    yield file.text_of(target)


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
    changing = _changing_values(file, loop)
    forms = parts_of(conversion, file, loop)
    for name in _owners_in(conversion, file, loop):
        forms.setdefault(name, f"Attributes({name})")
    parts = ", ".join(f'"{name.removeprefix("self.")}": {form}' for name, form in forms.items())
    path = _free_name(conversion)
    lines = [f"saved_parts = {{{parts}}}", f'last_saved = load_snapshot("{path}", saved_parts)']
    lines += [f'{name} = last_saved.get("{name}", {name})' for name in changing]
    lines += [STEPS_BETWEEN_SNAPSHOTS] * saving.is_of_steps
    yield file.insert_before(loop, "\n".join(lines))
    values = "".join(f", {name}={name}" for name in changing)
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
    match loop.iter:
        case ast.Call(func=ast.Name(id="range"), args=[end], keywords=[]):
            return file.replace(end, f'last_saved.get("epoch", 0), {file.text_of(end)}')
        case ast.Call(func=ast.Name(id="range"), args=[first, _], keywords=[]):
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
