"""The rungs: small changes of a script, from one process to many."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stepladder.tools.convert.facts import LoaderFacts, ScriptFacts, Use
from stepladder.tools.convert.source import CannotConvert, Edit, Scope, SourceText
from stepladder.tools.findings.finding import Location

RANK_0 = "dist.get_rank() == 0"
# What a wrapped model answers as the model does.
KEPT_BY_WRAPPER = {
    *("train", "eval", "parameters", "zero_grad", "to", "cuda", "training", "requires_grad_"),
    *("apply", "forward", "no_sync", "module"),
}
Edits = dict[str, list[Edit]]  # by file


class Conversion:
    """A script that is being converted.

    Args:
        main: The file that is started, by its path in the folder.
        files: The files of the script.
        facts: What a run of it has shown.
    """

    def __init__(self, main: str, files: dict[str, SourceText], facts: ScriptFacts) -> None:
        self.main = main
        self.files = files
        self.facts = facts

    def file(self, location: Location) -> SourceText:
        if location.file in self.files:
            return self.files[location.file]
        raise CannotConvert(f"{location.file} is no file of the script's folder")

    def is_known(self, location: Location) -> bool:
        return location.file in self.files

    def statement(self, location: Location) -> ast.stmt:
        return self.file(location).statement_at(location.line)

    def calls(self, location: Location, name: str) -> list[ast.Call]:
        """Return the calls of a function by its last name on a line, the innermost first."""
        nodes = self.file(location).nodes_at(ast.Call, location.line)
        return [node for node in nodes if last_name(node.func) == name]

    def top_statement(self, location: Location) -> ast.stmt:
        """Return the statement of the module that holds a line."""
        statement = self.statement(location)
        for item in self.file(location).ancestors(statement):
            if isinstance(item, ast.stmt):
                statement = item
        return statement

    def training_stack(self) -> tuple[Use, ...]:
        """Return the functions that were running in the first training pass, the innermost first.

        Raises:
            CannotConvert: No loader of torch was seen in a training pass.
        """
        for loader in self.facts.loaders:
            if loader.is_training and loader.uses:
                return loader.uses[0]
        raise CannotConvert(
            "the training reads no torch DataLoader: put its samples into a data set and a loader"
        )


def last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _ends_of(statement: ast.stmt) -> tuple[ast.stmt, ast.stmt]:
    """Return the first and the last statement below a guard of `__name__`, or the statement."""
    if isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test):
        return statement.body[0], statement.body[-1]
    return statement, statement


def add(edits: Edits, file: SourceText, *more: Edit) -> None:
    edits.setdefault(file.name, []).extend(more)


def join_processes(conversion: Conversion) -> Edits:
    """Join the process group before the first loader, model or optimizer is made."""
    facts = conversion.facts
    file = conversion.files[conversion.main]
    stack = conversion.training_stack()
    built = [loader.built for loader in facts.loaders]
    built += [location for location, _ in facts.optimizer_places]
    outermost = stack[-1].location
    if outermost.file != file.name:
        raise CannotConvert(f"the training does not begin in {file.name}")
    candidates = [conversion.top_statement(outermost)]
    for location in built:
        if location.file == file.name:
            scope = file.scope_of(conversion.statement(location))
            candidates += [conversion.top_statement(location)] * isinstance(scope, ast.Module)
    first = min(candidates, key=lambda item: item.lineno)
    begin, _ = _ends_of(first)
    last = conversion.top_statement(outermost)
    _, end = _ends_of(last)
    if end is last:
        end = file.tree.body[-1]
    edits: Edits = {}
    add(
        edits,
        file,
        file.insert_before(begin, "join_processes()"),
        file.insert_after(end, "dist.destroy_process_group()"),
    )
    for node in file.nodes(ast.Constant):
        if node.value == "cuda:0":
            add(edits, file, file.replace(node, '"cuda"'))
    return edits


def _wrap_loaders(conversion: Conversion, of_training: bool, helper: str) -> Edits:
    edits: Edits = {}
    for loader in conversion.facts.loaders:
        if not conversion.is_known(loader.built) or loader.is_training is not of_training:
            continue
        calls = conversion.calls(loader.built, "DataLoader")
        if not calls:
            raise CannotConvert(f"{loader.built.file}:{loader.built.line} makes no DataLoader")
        start = loader.passes[0].start
        if start.iterable:
            raise CannotConvert(
                f"{loader.built.file}:{loader.built.line} reads a stream: let each process skip "
                "the samples of the others"
            )
        if {"sampler", "batch_sampler"} & {keyword.arg for keyword in calls[0].keywords}:
            raise CannotConvert(
                f"{loader.built.file}:{loader.built.line} has a sampler of its own: it must deal "
                "other samples to each process"
            )
        file = conversion.file(loader.built)
        add(edits, file, *file.wrap(calls[0], f"{helper}("))
    return edits


def share_training_samples(conversion: Conversion) -> Edits:
    """Give each process its share of each training batch, in another order each epoch."""
    edits = _wrap_loaders(conversion, of_training=True, helper="share_samples")
    for loader in conversion.facts.loaders:
        if loader.is_training and conversion.is_known(loader.built):
            _add_epochs(conversion, loader, edits)
    return edits


def _add_epochs(conversion: Conversion, loader: LoaderFacts, edits: Edits) -> None:
    """Tell the sampler the epoch, at the begin of each."""
    epoch_loop = find_epoch_loop(conversion, loader)
    if epoch_loop is None:
        return
    file, loop, name = epoch_loop
    epoch = name_of_epoch(file, loop)
    set_epoch = file.insert_before(loop.body[0], f"{name}.sampler.set_epoch({epoch})")
    known = edits.setdefault(file.name, [])
    if file.text_of(loop.target) != epoch:
        renamed = file.replace(loop.target, epoch)
        known += [renamed] * (renamed not in known)
    known += [set_epoch] * (set_epoch not in known)


def find_epoch_loop(
    conversion: Conversion, loader: LoaderFacts
) -> tuple[SourceText, ast.For, str] | None:
    """Return the loop in which a loader is iterated again, and the loader's name there.

    Raises:
        CannotConvert: It is no `for` loop, or the loader has no name there.
    """
    for uses in loader.uses:
        for depth, use in enumerate(uses):
            if not conversion.is_known(use.location):
                continue
            file = conversion.file(use.location)
            loops = file.loops_around(conversion.statement(use.location))
            loops = [loop for loop in loops if depth or not _iterates_at(loop, use.location.line)]
            if not loops:
                continue
            loop = loops[0]
            if not use.name or not isinstance(loop, ast.For):
                raise CannotConvert(
                    f"{file.name}:{loop.lineno} is the loop over epochs: it must call set_epoch "
                    "of the sampler"
                )
            return file, loop, use.name
    return None


def _iterates_at(loop: ast.stmt, line: int) -> bool:
    return isinstance(loop, ast.For) and loop.iter.lineno <= line <= (loop.iter.end_lineno or 0)


def name_of_epoch(file: SourceText, loop: ast.For) -> str:
    """Return the variable of a loop over epochs; one without a name gets one.

    Raises:
        CannotConvert: The loop has several variables.
    """
    if not isinstance(loop.target, ast.Name):
        raise CannotConvert(f"{file.name}:{loop.lineno} has no variable for the epoch")
    return "epoch" if loop.target.id == "_" else loop.target.id


def wrap_models(conversion: Conversion, arguments: str = "") -> Edits:
    """Wrap each trained model where its optimizer is made, and name what is inside of it."""
    edits: Edits = {}
    wrapped: set[int] = set()
    before: set[ast.AST] = set()  # what comes before the line that wraps, in its function
    for location, models in conversion.facts.optimizer_places:
        for name, model in models if conversion.is_known(location) else ():
            if model in wrapped:
                continue
            file = conversion.file(location)
            statement = conversion.statement(location)
            scope = file.scope_of(statement)
            _validate_not_parameter(file, scope, name, statement)
            text = f"{name} = DistributedDataParallel({name}{arguments})"
            if conversion.facts.draws_in_models:
                text += "\ntorch.manual_seed(torch.initial_seed() + dist.get_rank())"
            add(edits, file, file.insert_before(statement, text))
            wrapped.add(model)
            before |= _nodes_before(file, scope, statement)
    if missing := set(conversion.facts.trained_models) - wrapped:
        raise CannotConvert(
            f"{len(missing)} trained models have no name where their optimizer is made"
        )
    _name_inner_models(conversion, before, edits)
    return edits


def _nodes_before(file: SourceText, scope: Scope, statement: ast.stmt) -> set[ast.AST]:
    """Return what comes before a statement in its function."""
    attributes = file.nodes(ast.Attribute, scope)
    return {
        node
        for node in attributes
        if node.lineno < statement.lineno and file.scope_of(node) is scope
    }


def _name_inner_models(conversion: Conversion, before: set[ast.AST], edits: Edits) -> None:
    """Name the model inside of the wrapper where the wrapper does not answer for it."""
    for file in conversion.files.values():
        for node in file.nodes(ast.Attribute):
            is_kept = node.attr in KEPT_BY_WRAPPER or node in before
            if not is_kept and _is_model(conversion, file, node.value):
                add(edits, file, _after_model(file, node.value))
    for file, call in _calls_of(conversion, "torch.save"):
        models = [node for node in call.args[:1] if _is_model(conversion, file, node)]
        add(edits, file, *(_after_model(file, node) for node in models))


def _after_model(file: SourceText, node: ast.expr) -> Edit:
    """Return the edit that names the model inside of a wrapper."""
    return Edit(file.end(node), file.end(node), ".module")


def _is_model(conversion: Conversion, file: SourceText, node: ast.expr) -> bool:
    is_name = isinstance(node, ast.Name | ast.Attribute)
    return is_name and file.text_of(node) in conversion.facts.model_names


def _validate_not_parameter(file: SourceText, scope: Scope, name: str, statement: ast.stmt) -> None:
    """Raise CannotConvert if a name is a parameter: its callers would keep it without a wrapper."""
    if isinstance(scope, ast.Module):
        return
    arguments = scope.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if name in {item.arg for item in parameters}:
        raise CannotConvert(
            f"{file.name}:{statement.lineno} makes the optimizer of a model that is a parameter: "
            f"make it where {name} is made"
        )


def share_evaluation(conversion: Conversion) -> Edits:
    """Give each process whole batches of the evaluation, and add the results up."""
    edits = _wrap_loaders(conversion, of_training=False, helper="share_batches")
    for location in conversion.facts.calls_without_gradient:
        if not conversion.is_known(location):
            continue
        file = conversion.file(location)
        for call in file.nodes_at(ast.Call, location.line):
            if _is_model(conversion, file, call.func):
                add(edits, file, _after_model(file, call.func))
    for loader in conversion.facts.loaders:
        if not loader.is_training:
            _add_sums(conversion, loader, edits)
    return edits


def _add_sums(conversion: Conversion, loader: LoaderFacts, edits: Edits) -> None:
    """After each loop over a loader, add up over all processes what the loop has added up."""
    done: set[ast.stmt] = set()
    for use in (uses[0] for uses in loader.uses):
        if not conversion.is_known(use.location):
            continue
        file = conversion.file(use.location)
        loops = [
            item
            for item in file.nodes(ast.For)
            if _iterates_at(item, use.location.line) and item not in done
        ]
        for loop in loops[:1]:
            done.add(loop)
            names = _accumulators(file, loop)
            following = _statements_after(file, loop)
            used = [name for name in names if any(_uses_name(item, name) for item in following)]
            sums = "\n".join(f"{name} = sum_over_processes({name})" for name in used)
            if sums:
                add(edits, file, file.insert_after(loop, sums))
            for statement in following:
                for call in file.nodes(ast.Call, statement):
                    is_length = last_name(call.func) == "len" and bool(call.args)
                    if is_length and file.text_of(call.args[0]) == use.name:
                        add(edits, file, *file.wrap(call, "sum_over_processes("))


def _accumulators(file: SourceText, loop: ast.For) -> list[str]:
    """Return the variables that a loop adds to, and that begin anew before it."""
    names = []
    for node in file.nodes(ast.AugAssign, loop):
        if isinstance(node.target, ast.Name) and isinstance(node.op, ast.Add):
            names.append(node.target.id)
    for call in file.nodes(ast.Call, loop):
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr="append" | "extend"):
                names.append(name)
    assigned_in_loop = {
        target.id
        for node in file.nodes(ast.Assign, loop)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    before = assigned_before(file, loop)
    return [name for name in dict.fromkeys(names) if name in before - assigned_in_loop]


def assigned_before(file: SourceText, loop: ast.For) -> set[str]:
    """Return the variables that are assigned before a loop, in its block or in one around it.

    Blocks beyond the next loop do not count: their variables go on from epoch to epoch.
    """
    names: set[str] = set()
    statement: ast.stmt = loop
    while True:
        for item in file.block_of(statement):
            if item is statement:
                break
            if isinstance(item, ast.Assign):
                for target in item.targets:
                    names |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
        parent = file.parents[statement]
        if not isinstance(parent, ast.With | ast.If | ast.Try):
            return names
        statement = parent


def _statements_after(file: SourceText, loop: ast.For) -> list[ast.stmt]:
    """Return the statements after a loop, in its block and in those around it."""
    following: list[ast.stmt] = []
    statement: ast.stmt = loop
    while True:
        block = file.block_of(statement)
        following += block[block.index(statement) + 1 :]
        parent = file.parents[statement]
        if not isinstance(parent, ast.With | ast.If | ast.Try):
            return following
        statement = parent


def _uses_name(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement))


def sum_numbers_of_training(conversion: Conversion) -> Edits:
    """Add up over all processes what training loops add up."""
    edits: Edits = {}
    for loader in conversion.facts.loaders:
        if loader.is_training:
            _add_sums(conversion, loader, edits)
    return edits


def print_once(conversion: Conversion) -> Edits:
    """Let one process print; all compute what is printed."""
    edits: Edits = {}
    for file, call in _calls_of(conversion, "print"):
        add(edits, file, file.replace(call.func, "print_once"))
    return edits


def _calls_of(conversion: Conversion, name: str) -> Iterator[tuple[SourceText, ast.Call]]:
    """Yield the calls of a function in all files, by the name that it has without aliases.

    A run that is cut short has not come to those after the training.
    """
    for file in conversion.files.values():
        for call in file.nodes(ast.Call):
            if file.qualified_name(call.func) == name:
                yield file, call


def write_once(conversion: Conversion) -> Edits:
    """Let one process write files, each whole or not at all."""
    edits: Edits = {}
    saves: set[Location] = set()
    for file, call in _calls_of(conversion, "torch.save"):
        add(edits, file, file.replace(call.func, "save_once"))
        saves |= {Location(file.name, line) for line in lines_of(call)}
    for location in conversion.facts.writes:
        if location not in saves and conversion.is_known(location):
            file = conversion.file(location)
            add(edits, file, *file.guard(conversion.statement(location), RANK_0))
    return edits


def lines_of(node: ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def scale_summed_loss(conversion: Conversion) -> Edits:
    """Wrap models, and multiply each loss by the number of processes: it is a sum over samples."""
    edits = wrap_models(conversion)
    for location in conversion.facts.backwards:
        if not conversion.is_known(location):
            continue
        file = conversion.file(location)
        for call in conversion.calls(location, "backward"):
            if isinstance(call.func, ast.Attribute):
                value = call.func.value
                add(edits, file, *file.wrap(value, "(", " * dist.get_world_size())"))
                break
    return edits
