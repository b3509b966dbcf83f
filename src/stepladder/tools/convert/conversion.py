"""A script that is being converted: its files, and what a run of it has shown."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter

from stepladder.tools.check.script_source import last_name, parameters_of, stored_names
from stepladder.tools.convert.facts import ScriptFacts
from stepladder.tools.convert.source import CannotConvert, Edit, Scope, SourceText
from stepladder.tools.findings.finding import Location

Edits = Iterator[Edit]


@dataclass(frozen=True)
class Conversion:
    """A script that is being converted.

    Args:
        main: The file that is started, by its path in the folder.
        files: The files of the script.
        facts: What a run of it has shown.
        imports_stepladder: Whether the converted script may import stepladder.
        by_accelerate: Whether it is converted to Accelerate.
        ways: The function that has made each rung so far, by the rung's letter.
        shared_before: The calls of models that get rows which are shares already.
        gathered: The edits by which losses see the outputs of all processes.
    """

    main: str
    files: dict[str, SourceText]
    facts: ScriptFacts
    imports_stepladder: bool = False
    by_accelerate: bool = False
    ways: dict[str, object] = field(default_factory=dict)
    shared_before: set[Location] = field(default_factory=set)
    gathered: list[Edit] = field(default_factory=list)

    def file(self, location: Location) -> SourceText:
        if location.file in self.files:
            return self.files[location.file]
        raise CannotConvert(f"{location.file} is no file of the script's folder")

    def is_known(self, location: Location) -> bool:
        return location.file in self.files

    def statement(self, location: Location) -> ast.stmt:
        return self.file(location).statement_at(location.line)

    def scope(self, location: Location) -> Scope:
        return self.file(location).scope_of(self.statement(location))

    def all_calls(self) -> Iterator[tuple[SourceText, ast.Call]]:
        for file in self.files.values():
            for call in file.nodes(ast.Call):
                yield file, call

    def calls(self, location: Location, name: str) -> list[ast.Call]:
        """Return the calls of a function by its last name on a line, the innermost first."""
        nodes = self.file(location).nodes_at(ast.Call, location.line)
        return [node for node in nodes if last_name(node.func) == name]

    def top_statement(self, location: Location) -> ast.stmt:
        """Return the statement of the module that holds a line."""
        statement = self.statement(location)
        for item in self.file(location).parents_of(statement):
            if isinstance(item, ast.stmt):
                statement = item
        return statement

    def statement_for(self, location: Location, name: str) -> ast.stmt:
        """Return the statement of a line, or the `if` around it that does not make a variable.

        What depends on a choice of the optimizer would not be done for another one.
        """
        file, statement = self.file(location), self.statement(location)
        for item in file.parents_of(statement):
            if not isinstance(item, ast.If) or "__name__" in ast.dump(item.test):
                break
            stored = [target for node in file.nodes(ast.Assign, item) for target in node.targets]
            if name in map(file.text_of, stored):
                break
            statement = item
        return statement

    @cached_property
    def wrappings(self) -> dict[int, tuple[Location, list[str]]]:
        """Where each trained model is wrapped, which is where its optimizer is made: its names.

        A function can give a new value to its own name for a model, and to those of `self`. It must
        be one whose name the calls of the training come to, or leaves that to its caller.
        """
        wrappings: dict[int, tuple[Location, list[str]]] = {}
        inner = self.facts.parts_of_named_models
        for model in (item for item in self.facts.trained_models if item not in inner):
            calling = list(self.scopes_that_call(model))
            # An attribute that calls it, or a global, may have it from anywhere.
            is_known_where = calling and not any(isinstance(item, ast.Module) for item in calling)
            named = []
            for location, models in self.facts.optimizer_places:
                names = [name for name, item, _ in models if item == model and name != "self"]
                if names and self.is_known(location):
                    own = [name for name in names if name.startswith("self.")]
                    names = list(dict.fromkeys([names[0], *own]))
                    is_called = bool(own) or self.scope(location) in calling
                    if is_called or not is_known_where:
                        named.append((is_called, location, names))
            if named:
                _, location, names = max(named, key=itemgetter(0))  # the first one
                wrappings[model] = location, names
        return wrappings

    def scopes_that_call(self, model: int) -> Iterator[Scope]:
        """Yield the functions whose name for a model leads to its calls in the training."""
        for uses in self.facts.uses_of("model", model, in_training=True):
            for location, _, name in uses:
                if not self.is_known(location):
                    continue
                scope = self.scope(location)
                is_parameter = not isinstance(scope, ast.Module) and name in parameters_of(scope)
                is_own = is_parameter or name in stored_names(scope)
                yield scope if is_own else self.file(location).tree  # a global
                if not is_parameter:
                    break

    @cached_property
    def wrapped_names(self) -> list[tuple[Scope, str, range]]:
        """The names of wrapped models where they are wrapped: their scopes and their lines."""
        names = []
        for location, wrapped in self.wrappings.values():
            file, scope = self.file(location), self.scope(location)
            begin = self.statement_for(location, wrapped[0]).lineno
            later = [item for item in file.nodes(ast.Assign, scope) if item.lineno > begin]
            for name in wrapped:
                ends = [item.lineno for item in later if name in map(file.text_of, item.targets)]
                names.append((scope, name, range(begin, min(ends, default=len(file.lines)) + 1)))
        return names
