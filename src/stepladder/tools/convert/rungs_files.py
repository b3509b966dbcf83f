"""The rung by which one process writes files, and what no proof judges."""

from __future__ import annotations

import ast
from itertools import chain

from stepladder.tools.check.script_source import last_name, locations_of
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.rungs import RANK_0, calls_of, find_lines_not_judged
from stepladder.tools.convert.source import Edit, SourceText
from stepladder.tools.findings.finding import Location


def write_once(conversion: Conversion, save: str = "save_once") -> Edits:
    """Let one process write files, each whole or not at all."""
    found = _find_other_writes(conversion)
    places = [(conversion.file(location), conversion.statement(location)) for location in found]
    guarded = {node for _, statement in places for node in ast.walk(statement)}
    for file, call in calls_of(conversion, "torch.save"):
        if call not in guarded:  # to a file that is open
            yield file.replace(call.func, save)
    yield from _let_all_make_folders(conversion)
    for file, statement in places:
        if isinstance(statement, ast.Assign):  # a writer, which other lines use
            yield from file.wrap(statement.value, "", f" if {RANK_0} else Nothing()")
        elif isinstance(statement, ast.With) and _reads_loaders(conversion, file, statement):
            for item in statement.items:
                otherwise = f' if {RANK_0} else open(os.devnull, "w")'
                yield from file.wrap(item.context_expr, "", otherwise)
        else:
            yield from file.guard(statement, RANK_0)
            yield from _write_whole(file, statement, save)


def _write_whole(file: SourceText, statement: ast.stmt, save: str) -> Edits:
    """Let a file have its name once it is whole, and let all wait for weights that are in it."""
    for item in getattr(statement, "items", []):
        match item.context_expr:
            case ast.Call(ast.Name("open"), [_, ast.Constant("w" | "wb"), *_]) as call:
                yield file.replace(call.func, "open_whole")
    calls = file.nodes(ast.Call, statement)
    if save == "save_once" and any(file.qualified_name(c.func) == "torch.save" for c in calls):
        yield file.insert_after(statement, "dist.barrier()")


def _reads_loaders(conversion: Conversion, file: SourceText, statement: ast.stmt) -> bool:
    """Return whether loaders are read within a statement, which is for all processes then."""
    uses = (uses for loader in conversion.facts.loaders for uses in loader.uses)
    locations = {use.location for use in chain.from_iterable(uses)}
    return not locations.isdisjoint(locations_of(file, statement))


def _let_all_make_folders(conversion: Conversion) -> Edits:
    """Let each process make a folder that another one may have made since it asked for it.

    What remembers that the folder was there is done by one process.
    """
    for file, call in conversion.all_calls():
        name, text = file.qualified_name(call.func), file.text_of(call)
        is_made = bool(locations_of(file, call).intersection(conversion.facts.folders))
        is_known = is_made and last_name(call.func) in ("mkdir", "makedirs")
        if "exist_ok" in text or not (is_known or name in ("os.mkdir", "os.makedirs")):
            continue
        if any(isinstance(item, ast.Try) for item in file.parents_of(call)):
            if is_made:
                yield from file.guard(file.statement_at(call.lineno), RANK_0)
            continue
        if name == "os.mkdir":
            yield file.replace(call.func, "os.makedirs")
        end = file.end(call) - 1
        is_first = text[:-1].rstrip()[-1] in "(,"
        yield Edit(file.name, end, end, f"{', ' * (not is_first)}exist_ok=True")


def _find_other_writes(conversion: Conversion) -> list[Location]:
    """Return the lines that write, rename or remove files, but for those of torch.save."""
    calls = calls_of(conversion, "torch.save")
    saves = {location for file, call in calls for location in locations_of(file, call)}
    writes = filter(conversion.is_known, conversion.facts.writes)
    return [location for location in writes if location not in saves]


def describe_not_judged(conversion: Conversion, letter: str) -> list[str]:
    """Return a line for each place that the proof of a rung cannot judge."""
    if letter == "c":
        seen = {*conversion.facts.backwards}
        return [
            f"{file.name}:{call.lineno} computes gradients, and no run has come to it"
            for file, call in conversion.all_calls()
            if last_name(call.func) == "backward" and not seen & locations_of(file, call)
        ]
    if letter == "e":
        return [
            f"{file.name}:{call.lineno} prints what runs have shown seldom or never, or as 0"
            for file, call in find_lines_not_judged(conversion)
        ]
    if letter == "f":
        return [
            f"{location.file}:{location.line} is done on process 0, perhaps with its share alone"
            for location in _find_other_writes(conversion)
        ]
    return []
