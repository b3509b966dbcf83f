"""A loop over the batches of a loader, and the functions that lead to it."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from stepladder.tools.check.script_source import (
    argument_of,
    find_nodes,
    last_name,
    parameters_of,
    stored_names,
)
from stepladder.tools.convert.facts import ScriptFacts, Use
from stepladder.tools.convert.job_fragments import Fragment, free_names, keep_needed
from stepladder.tools.convert.source import INDENT, CannotConvert, Loop, Scope, SourceText


@dataclass(frozen=True)
class _CalledFunction:
    """A function that runs during the training.

    Args:
        scope: The function, or the module.
        bound: What its parameters are given, by their names.
        before: The statements before the training that are done once.
        in_epoch: Those that are done in each epoch.
        is_in_epoch: Whether it is called in each epoch.
    """

    scope: Scope
    bound: dict[str, str]
    before: list[ast.stmt]
    in_epoch: list[ast.stmt]
    is_in_epoch: bool


@dataclass(frozen=True)
class MadeFunction:
    """A function of the job.

    Args:
        text: Its text.
        needed: The names that it needs from outside.
        lines: The lines of the script that it has.
    """

    text: str
    needed: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)


class BatchLoop:
    """A `for` over the batches of a loader, with the functions that lead to it.

    Args:
        file: The script.
        uses: The functions that use the loader, from the innermost outwards.
        epoch_loop: The loop over the epochs, if there is one.
        args: The arguments of the script.

    Raises:
        CannotConvert: A job cannot have such a loop.
    """

    def __init__(
        self,
        file: SourceText,
        uses: tuple[Use, ...],
        epoch_loop: ast.For | None,
        args: tuple[str, ...],
    ) -> None:
        self.file = file
        self.epoch_loop = epoch_loop
        self.args = args
        if others := [use.location.file for use in uses if use.location.file != file.name]:
            raise CannotConvert(f"the training is in {others[0]}: a job is made of one file")
        line = uses[0].location.line
        loop = file.statement_at(line)
        if not isinstance(loop, ast.For) or not uses[0].name:
            raise self.refusal(line, "is no `for` over a loader that has a name")
        self.loop = loop
        self.scope = file.scope_of(loop)
        self.frames = list(self.find_frames(uses))
        self.loader = self.resolve(uses[0].name)
        self.counters = set[str]()
        self.samples = "[1]"  # what has the length of a batch, as soon as a run has shown it
        self.target: ast.expr = loop.target
        if any(last_name(call.func) == "enumerate" for call in find_calls(loop.iter)):
            assert isinstance(loop.target, ast.Tuple)
            counter, self.target = loop.target.elts
            self.counters = set(stored_names(counter))

    def refusal(self, line: int, what: str) -> CannotConvert:
        return CannotConvert(f"{self.file.name}:{line} {what}")

    def find_frames(self, uses: tuple[Use, ...]) -> Iterator[_CalledFunction]:
        """Yield the functions that run during the loop, the module first."""
        caller: ast.stmt | None = None
        is_in_epoch = False
        for use in reversed(uses):
            statement = self.file.statement_at(use.location.line)
            scope = self.file.scope_of(statement)
            path = [statement, *self.file.parents_of(statement)]
            path = path[: path.index(scope)]
            begin = next((i for i, node in enumerate(path) if node is self.epoch_loop), 0)
            before: list[ast.stmt] = []
            in_epoch: list[ast.stmt] = []
            for depth, node in enumerate(path):
                if isinstance(node, ast.With | Loop) and depth > begin and not is_in_epoch:
                    raise self.refusal(node.lineno, "is around the training, and not in a job")
                if isinstance(node, ast.stmt):
                    block = self.file.block_of(node)
                    earlier = in_epoch if is_in_epoch or depth < begin else before
                    earlier[:0] = block[: block.index(node)]
            bound = self.bind(caller, scope)
            yield _CalledFunction(scope, bound, before, in_epoch, is_in_epoch)
            is_in_epoch |= self.epoch_loop in path
            caller = statement

    def bind(self, caller: ast.stmt | None, scope: Scope) -> dict[str, str]:
        """Return what the parameters of a function are given where it is called."""
        if caller is None or isinstance(scope, ast.Module):
            return {}
        calls = [call for call in find_calls(caller) if last_name(call.func) == scope.name]
        if len(calls) != 1:
            raise self.refusal(caller.lineno, f"does not call {scope.name} once by its name")
        [call] = calls
        positional = [item.arg for item in (*scope.args.posonlyargs, *scope.args.args)]
        of_keywords = [item.arg for item in scope.args.kwonlyargs]
        defaults = dict(zip(positional[::-1], scope.args.defaults[::-1], strict=False))
        given = dict(zip(of_keywords, scope.args.kw_defaults, strict=True)) | defaults
        names = parameters_of(scope)
        given |= {name: value for name in names if (value := argument_of(call, names, name))}
        if positional[:1] == ["self"] and isinstance(call.func, ast.Attribute):
            given["self"] = call.func.value
        return {name: self.file.text_of(value) for name, value in given.items() if value}

    def resolve(self, text: str) -> str:
        """Return the name before the first epoch of what the loop calls `text`."""
        for frame in reversed(self.frames):
            root, dot, rest = text.partition(".")
            value = frame.bound.get(root, root)
            if frame.is_in_epoch or value.replace(".", "").isidentifier():
                text = f"{value}{dot}{rest}"
        return text

    def count_by(self, samples: str) -> None:
        """Take the length of a part of the batch for the number of its samples."""
        self.samples = samples

    def name_of(self, model: int, facts: ScriptFacts) -> str:
        """Return the name of a model in the function of the loop.

        Raises:
            CannotConvert: It has none.
        """
        for use in chain(*facts.uses_of("model", model)):
            if use.location.file != self.file.name or not use.name:
                continue
            if self.file.scope_of(self.file.statement_at(use.location.line)) is self.scope:
                return use.name
        raise self.refusal(self.loop.lineno, "has no name for the model that it trains")

    def before_epochs(self) -> list[Fragment]:
        """Return what is done once, before the first epoch."""
        fragments: list[Fragment] = []
        for frame in self.frames:
            if not frame.is_in_epoch:
                fragments += [*_bindings(frame), *map(self.fragment, frame.before)]
        return fragments

    def before_loop(self) -> list[Fragment]:
        """Return what gets a name in each epoch before the loop."""
        fragments: list[Fragment] = []
        for frame in self.frames:
            fragments += _bindings(frame) * frame.is_in_epoch
            named = [item for item in frame.in_epoch if isinstance(item, ast.Assign)]
            fragments += map(self.fragment, named)
        return fragments

    def in_loop(self, body: list[ast.stmt]) -> list[Fragment]:
        """Return what is done in the loop with a batch."""
        batch = Fragment(f"{self.file.text_of(self.target).strip('()')} = batch")
        fragments = [batch] * (batch.text != "batch = batch")
        return [*fragments, *map(self.fragment, body)]

    def fragment(self, statement: ast.stmt) -> Fragment:
        """Return a statement with the comments above it, and with the script's arguments."""
        begin = self.file.first_line(statement)
        while self.file.line(begin - 1).strip().startswith("#"):
            begin -= 1
        assert statement.end_lineno is not None
        text = "\n".join(self.file.lines[begin - 1 : statement.end_lineno])
        if self.file.shares_line(statement) or self.file.next_on_line(statement):
            text = self.file.text_of(statement)
        text = textwrap.dedent(text)
        source = SourceText(self.file.path, self.file.name, ast.parse(text), text)
        edits = [
            source.replace(call, f"{source.text_of(call)[:-1]}{list(self.args)})")
            for call in source.nodes(ast.Call)
            if last_name(call.func) == "parse_args" and not (call.args or call.keywords)
        ]
        is_of_module = isinstance(self.file.scope_of(statement), ast.Module)
        return Fragment(source.apply(edits).text, statement.lineno, is_of_module)

    def make_function(
        self, name: str, model: str, fragments: list[Fragment], returned: str
    ) -> MadeFunction:
        """Return a function of a model and a batch, made of what the loop does before a place.

        Raises:
            CannotConvert: It needs what only the loop has.
        """
        parameter = "model"
        if model.isidentifier():
            parameter = model
        end = self.rename(Fragment(f"return {returned}"), model, parameter)
        fragments = [self.rename(fragment, model, parameter) for fragment in fragments]
        kept = keep_needed(fragments, end.loads, parameter)
        before = free_names([*kept, end]) - {parameter, "batch"}
        kept = [*keep_needed(self.before_loop(), before, parameter), *kept]
        needed = free_names([*kept, end]) - {parameter, "batch"}
        in_loops = {*self.counters, *stored_names(self.loop)}
        if self.epoch_loop:
            in_loops |= set(stored_names(self.epoch_loop.target))
        unknown = needed & in_loops
        if unknown - {model.partition(".")[0]}:
            what = f"needs {min(unknown)} for its {name}, which a job does not know"
            raise self.refusal(self.loop.lineno, what)
        lines = [line for fragment in kept for line in fragment.text.splitlines()]
        inner = textwrap.indent("\n".join([*lines, end.text]), INDENT)
        text = f"def {name}({parameter}, batch):\n{inner}"
        return MadeFunction(text, needed, {fragment.line for fragment in kept})

    def rename(self, fragment: Fragment, model: str, parameter: str) -> Fragment:
        """Return a statement in which the model has the name of a parameter."""
        text = fragment.text
        source = SourceText(self.file.path, self.file.name, ast.parse(text), text)
        found = [node for node in source.nodes(ast.Attribute) if source.text_of(node) == model]
        edits = [source.replace(node, parameter) for node in found]
        return replace(fragment, text=source.apply(edits).text)


def _bindings(frame: _CalledFunction) -> list[Fragment]:
    return [Fragment(f"{name} = {text}") for name, text in frame.bound.items() if name != text]


def find_calls(node: ast.AST) -> Iterator[ast.Call]:
    return find_nodes(node, ast.Call)
