"""The rungs: small changes of a script, from one process to many."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from stepladder.tools.check.relations.shown import Series, read_series
from stepladder.tools.check.run_summary import DEFINITIONS
from stepladder.tools.check.script_source import (
    argument_of,
    constant_value,
    last_name,
    locations_of,
    parameters_of,
    stored_names,
)
from stepladder.tools.convert.accelerate import prepare_steps
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.facts import LoaderFacts
from stepladder.tools.convert.loops import find_epoch_loops, find_loops_by_hand, iterates_at
from stepladder.tools.convert.source import CannotConvert, Edit, Loop, SourceText
from stepladder.tools.findings.finding import Location

LOGGING_METHODS = ("debug", "info", "warning", "error", "critical")
CONCATENATIONS = ("cat", "concat", "concatenate", "vstack")
BATCH_SIZE = "batch_size"
ROWS = {"0", "dim=0", "axis=0"}  # of the arguments of a concatenation
MIN_SHOWN = 3
RANK_0 = "dist.get_rank() == 0"
# What a wrapped model answers as the model does.
KEPT_BY_WRAPPER = {
    *("train", "eval", "parameters", "zero_grad", "to", "cuda", "training", "requires_grad_"),
    *("apply", "forward", "no_sync", "module"),
}


def _ends_of(statement: ast.stmt) -> tuple[ast.stmt, ast.stmt]:
    """Return the first and the last statement below a guard of `__name__`, or the statement."""
    if isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test):
        return statement.body[0], statement.body[-1]
    return statement, statement


def _first_call(file: SourceText, line: int) -> ast.stmt:
    """Return the first statement of a module with a call, after the imports before a line."""
    body = [item for item in file.tree.body if not isinstance(item, DEFINITIONS)]
    imports = [item.lineno for item in body if isinstance(item, ast.Import | ast.ImportFrom)]
    begin = max((number for number in imports if number < line), default=0)
    return next(item for item in body if item.lineno > begin and any(file.nodes(ast.Call, item)))


def _find_training(conversion: Conversion) -> tuple[SourceText, ast.stmt, ast.stmt]:
    """Return the main file, and the first and the last statement of what all processes do."""
    file = conversion.files[conversion.main]
    if not conversion.facts.training_stacks:
        raise CannotConvert("no optimizer step after a call of a model was seen")
    outermost = conversion.facts.training_stacks[0][-1].location
    if outermost.file != file.name:
        raise CannotConvert(f"the training does not begin in {file.name}")
    last = conversion.top_statement(outermost)
    begin, end = _ends_of(last)
    built = {item for loader in conversion.facts.loaders for item in loader.built_from}
    built.update(location for location, _ in conversion.facts.optimizer_places)
    tops = {conversion.top_statement(item) for item in built if item.file == file.name} - {last}
    lines = [item.lineno for item in tops if not isinstance(item, DEFINITIONS)]
    if begin is last or lines:
        begin, end = _first_call(file, min([last.lineno, *lines])), file.tree.body[-1]
    return file, begin, end


def join_processes(conversion: Conversion) -> Edits:
    """Join the process group before anything is drawn or made, and leave it in the end."""
    file, begin, end = _find_training(conversion)
    yield file.insert_before(begin, "join_processes()")
    yield file.insert_after(end, "leave_processes()")
    for node in file.nodes(ast.Constant):
        if node.value == "cuda:0":
            yield file.replace(node, '"cuda"')
    for other, call in calls_of(conversion, "torch.nn.DataParallel"):
        arguments = f"{other.text_of(call.args[0])}, device_ids=[dist.get_node_local_rank(0)]"
        yield other.replace(call, f"{other.text_of(call.func)}({arguments})")


def wrap_loaders(
    conversion: Conversion, of_training: bool, helper: str, divides: bool = False
) -> Edits:
    for loader in conversion.facts.loaders:
        if not conversion.is_known(loader.built) or loader.is_training is not of_training:
            continue
        if loader.is_by_hand:
            continue
        call, is_mixed = _find_call_of(conversion, loader)
        file = conversion.file(loader.built)
        if divides:
            yield from _divide_size(conversion, file, call, loader)
        before = f"{helper}("
        if is_mixed and loader.is_told_by_order:
            before = "share_shuffled(" if of_training else "share_ordered("
        elif is_mixed:
            before = f"{helper}_if({_find_condition(file, call, loader)}, "
        yield from file.wrap(call, before)


def _divide_size(
    conversion: Conversion, file: SourceText, call: ast.Call, loader: LoaderFacts
) -> Edits:
    """Divide the batch size of a loader once it is made, where it is no parameter of a function."""
    size = _size_of(file, call, ["dataset", BATCH_SIZE], BATCH_SIZE)
    while size and isinstance(function := file.scope_of(call), ast.FunctionDef):
        name = file.text_of(size)
        parameters = parameters_of(function)
        parent = file.parents[function]
        called = parent.name if isinstance(parent, ast.ClassDef) else function.name
        callers = [
            item
            for item in conversion.all_calls()
            if last_name(item[1].func) in (called, function.name)
            and locations_of(*item) & loader.built_from
        ]
        if name not in parameters or not callers:
            break
        given = _size_of(*callers[0], parameters, name)
        if given is None:  # by default, or by what decorates the function
            break
        file, call = callers[0]
        size = given
    if isinstance(size, ast.Name | ast.Attribute | ast.Subscript):
        text = file.text_of(size)
        statement = file.statement_at(call.lineno)
        yield file.insert_after(statement, f"{text} = share_of_batch({text})")


def _size_of(file: SourceText, call: ast.Call, parameters: list[str], name: str) -> ast.expr | None:
    """Return what a call gives for a parameter; for a dict, the batch size that it is made with."""
    value = argument_of(call, parameters, name)
    text = file.text_of(value) if value else ""
    for node in file.nodes(ast.Assign, file.scope_of(call)):
        if isinstance(node.value, ast.Dict) and text in map(file.text_of, node.targets):
            keys = map(constant_value, node.value.keys)
            return dict(zip(keys, node.value.values, strict=True)).get(BATCH_SIZE, value)
    return value


def _find_call_of(conversion: Conversion, loader: LoaderFacts) -> tuple[ast.Call, bool]:
    """Return the call that makes a loader, and whether it makes loaders for other uses, too.

    Raises:
        CannotConvert: Its samples cannot be shared.
    """
    file = conversion.file(loader.built)
    calls = sorted(conversion.calls(loader.built, "DataLoader"), key=file.start)
    of_call, others = loader.turns(len(calls))
    reason = ""
    if len(of_call) != 1:
        reason = (
            f"has {len(calls)} calls of DataLoader: each must be in a file of the folder that you"
            " start in, and make loaders for one use"
        )
    elif loader.passes[0].start.iterable:
        reason = "reads a stream: let each process skip the samples of the others"
    elif loader.is_training and any(item.arg == "batch_sampler" for item in calls[0].keywords):
        reason = "has batches of its own: each process must take a part of each"
    if reason:
        raise CannotConvert(f"{loader.built.file}:{loader.built.line} {reason}")
    (turn,) = of_call
    return calls[turn], turn in others


def _find_condition(file: SourceText, call: ast.Call, loader: LoaderFacts) -> str:
    """Return what is true where a call that is repeated for given values makes such a loader.

    Raises:
        CannotConvert: No values tell loaders for training from others.
    """
    for node in file.parents_of(call):
        loops = [node, *getattr(node, "generators", [])]
        for loop in (item for item in loops if isinstance(item, ast.For | ast.comprehension)):
            values = [ast.unparse(item) for item in getattr(loop.iter, "elts", [])]
            of_loader, others = loader.turns(len(values))
            if of_loader and not of_loader & others:
                chosen = ", ".join(values[turn] for turn in sorted(of_loader))
                return f"{file.text_of(loop.target)} in [{chosen}]"
    raise CannotConvert(
        f"{file.name}:{call.lineno} makes loaders for training and for evaluation: write a line"
        " for each"
    )


def wrap_models(
    conversion: Conversion,
    arguments: str = "",
    draws_alike: bool = False,
    averages_shares: bool = True,
) -> Edits:
    """Wrap each trained model where its optimizer is made, and name what is inside of it.

    Args:
        conversion: The script.
        arguments: Further ones of the wrapper.
        draws_alike: Whether all processes go on with the random numbers of process 0, as where
            each epoch draws its data.
        averages_shares: Whether the loss of a share is the mean over its samples, so that shares of
            other sizes count more or less.

    Raises:
        CannotConvert: A model has no name there, its dropout would be the same everywhere, or a
            loss would compare the samples of a share alone.
    """
    facts = conversion.facts
    _require_separate_samples(conversion)
    if draws_alike and any(event.drops for event in facts.training_calls):
        raise CannotConvert("dropout would be the same on all processes")
    missing = set(facts.trained_models) - conversion.wrappings.keys()
    if missing or not facts.trained_models:
        number = len(missing) or "all"
        raise CannotConvert(
            f"{number} trained models have no name of their own where their optimizer is made"
        )
    for model, (location, names) in conversion.wrappings.items():
        name = names[0]
        text = f"{' = '.join(names)} = DistributedDataParallel({name}{arguments})"
        if model in facts.models_with_batch_norm:
            text = f"{name} = torch.nn.SyncBatchNorm.convert_sync_batchnorm({name})\n{text}"
        if averages_shares and facts.has_smaller_batches and not conversion.gathered:
            text += f"\nweigh_by_rows({name})"
        file, statement = conversion.file(location), conversion.statement_for(location, name)
        yield file.insert_before(statement, text)
    if not draws_alike:
        yield from _draw_own_numbers(conversion, file, statement)
    yield from _name_inner_models(conversion)
    yield from prepare_steps(conversion)


def _require_separate_samples(conversion: Conversion) -> None:
    """Raise CannotConvert where a loss compares the samples of a share alone with each other."""
    for location in conversion.facts.coupled * (not conversion.gathered):
        raise CannotConvert(
            f"{location.file}:{location.line}: the loss compares the samples of a batch with each"
            " other, or divides one sum over them by another: of a share it is another loss. Gather"
            " the outputs of all processes before it"
        )


def _draw_own_numbers(conversion: Conversion, file: SourceText, statement: ast.stmt) -> Edits:
    # Data that are drawn before the training are the same in all processes.
    file, statement = next(find_epoch_loops(conversion), (file, statement))
    yield file.insert_before(statement, "draw_own_numbers()")


def average_by_hooks(conversion: Conversion) -> Edits:
    """Average each gradient once it is computed: no wrapper sees the call of a part of a model."""
    facts = conversion.facts
    _require_separate_samples(conversion)
    places: dict[int, tuple[Location, str]] = {}  # the outermost of each model
    inner = set[int]()
    for location, models in facts.optimizer_places:
        for name, model, parts in models * conversion.is_known(location):
            if name and {model, *parts}.intersection(facts.trained_models):
                places[model] = location, name
                inner |= {*parts} - {model}
    if not places:
        raise CannotConvert("the trained models have no name where their optimizer is made")
    for model in places.keys() - inner:
        location, name = places[model]
        file, statement = conversion.file(location), conversion.statement_for(location, name)
        text = f"average_gradients({name})"
        if facts.models_with_batch_norm:
            text = f"torch.nn.SyncBatchNorm.convert_sync_batchnorm({name})\n{text}"
        yield file.insert_before(statement, text)
    yield from _draw_own_numbers(conversion, file, statement)
    yield from prepare_steps(conversion)


def _name_inner_models(conversion: Conversion) -> Edits:
    """Name the model inside of the wrapper where the wrapper does not answer for it."""
    for file in conversion.files.values():
        for node in file.nodes(ast.Attribute):
            if node.attr not in KEPT_BY_WRAPPER and is_model(conversion, file, node.value):
                yield from _name_inner_model(conversion, file, node.value)
    for file, call in calls_of(conversion, "torch.save"):
        for value in call.args[:1]:
            if is_model(conversion, file, value):
                yield from _name_inner_model(conversion, file, value)


def _name_inner_model(conversion: Conversion, file: SourceText, node: ast.expr) -> list[Edit]:
    """Return the edits that name the model inside, and the model itself where it has no wrapper."""
    if conversion.ways.get("c") is average_by_hooks:
        return []
    names = [(scope, name) for scope, name, _ in conversion.wrapped_names]
    is_wrapped = (file.scope_of(node), file.text_of(node)) in names
    if is_wrapped and not conversion.by_accelerate:  # which wraps nothing on one process
        return file.wrap(node, "", ".module")
    return file.wrap(node, "inner_model(")


def is_model(conversion: Conversion, file: SourceText, node: ast.expr) -> bool:
    """Return whether a node names a trained model, which may be wrapped there."""
    name = file.text_of(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    return name in conversion.facts.model_names and not any(
        scope is file.scope_of(node) and name == wrapped and node.lineno not in lines
        for scope, wrapped, lines in conversion.wrapped_names
    )


def share_evaluation(conversion: Conversion) -> Edits:
    """Give each process whole batches of the evaluation, and add the results up.

    Raises:
        CannotConvert: Something is shown in each batch, of which processes have different numbers.
    """
    for file, loop, _ in _find_loops_over(conversion, of_training=False):
        for location in locations_of(file, loop) & conversion.facts.shown_lines:
            raise CannotConvert(f"{location.file}:{location.line} shows something in each batch")
    yield from wrap_loaders(conversion, False, "share_batches")
    yield from _add_sums(conversion, of_training=False)
    yield from keep_evaluation(conversion)


def keep_evaluation(conversion: Conversion) -> Edits:
    """Evaluate with the model inside of the wrapper, as often as a process likes."""
    for location in filter(conversion.is_known, conversion.facts.calls_that_train_nothing):
        file = conversion.file(location)
        for call in file.nodes_at(ast.Call, location.line):
            if is_model(conversion, file, call.func):
                yield from _name_inner_model(conversion, file, call.func)


def _add_sums(conversion: Conversion, of_training: bool) -> Edits:
    """After each loop over a loader, add up over all processes what the loop has added up."""
    summed = []
    if of_training and conversion.ways.get("d") is share_evaluation:
        summed = [loop for _, loop, _ in _find_loops_over(conversion, of_training=False)]
    for file, loop, loader_name in _find_loops_over(conversion, of_training):
        if loop in summed:  # of one loop for both
            continue
        following = statements_after(file, loop)
        known = {node.id for item in following for node in file.nodes(ast.Name, item)}
        used = [name for name in _accumulators(file, loop) if name in known]
        joined = sorted(find_joined(file, loop) & known)
        ways = dict.fromkeys(used, "sum") | dict.fromkeys(joined, "join")
        of_items = set(_added_to_items(file, loop)).intersection(used)
        _require_sums_of_items(file, loop, of_items)
        ways |= dict.fromkeys(of_items, "sum_items")
        sums = "\n".join(f"{name} = {way}_over_processes({name})" for name, way in ways.items())
        if sums:
            yield file.insert_after(loop, sums)
        inside = set(ast.walk(loop))
        loader_names = _names_of_loader(file, loop, loader_name)
        scopes = following if of_training else [file.scope_of(loop)]
        for count in _numbers_of_batches(file, loop):
            yield from file.wrap(count, "sum_over_processes(")
        for call in (call for scope in scopes for call in file.nodes(ast.Call, scope)):
            is_length = last_name(call.func) == "len" and bool(call.args)
            if is_length and call not in inside and file.text_of(call.args[0]) in loader_names:
                yield from file.wrap(call, "sum_over_processes(")


def _require_sums_of_items(file: SourceText, loop: ast.For, names: set[str]) -> None:
    """Raise CannotConvert if a loop sets an item of these, and does not only add to items."""
    targets = chain.from_iterable(item.targets for item in file.nodes(ast.Assign, loop))
    for target in targets:
        if isinstance(target, ast.Subscript) and (name := file.text_of(target.value)) in names:
            raise CannotConvert(
                f"{file.name}:{target.lineno} makes an item of {name} of one process's share:"
                " compute it after the loop, of sums"
            )


def is_of_evaluation(conversion: Conversion, file: SourceText, node: ast.expr) -> bool:
    """Return whether an expression has what loops over loaders make that train nothing.

    It names something that such a loop uses, or such a loader, and none that trains.
    """
    names = {item.id for item in file.nodes(ast.Name, node)}
    kinds = []
    for of_training in (False, True):
        loaders = [item for item in conversion.facts.loaders if item.is_training is of_training]
        uses = list(chain.from_iterable(use for loader in loaders for use in loader.uses))
        known = {use.name for use in uses}
        for use in uses:  # in a comprehension, say
            if use.location.file == file.name and not isinstance(node, ast.Call):
                statement = conversion.statement(use.location)
                if not hasattr(statement, "body"):
                    known |= {item.id for item in file.nodes(ast.Name, statement)}
        for other, loop, _ in _find_loops_over(conversion, of_training):
            if other is file and not isinstance(node, ast.Call):
                known |= {item.id for item in file.nodes(ast.Name, loop)}
        kinds.append(bool(names & known))
    return kinds == [True, False]


def _numbers_of_batches(file: SourceText, loop: ast.For) -> Iterator[ast.expr]:
    """Yield the expressions after a loop that add 1 to its index, which is counted from 0."""
    match loop.target, loop.iter:
        case ast.Tuple(elts=[ast.Name(id=index), _]), ast.Call(ast.Name("enumerate"), [_]):
            for statement in statements_after(file, loop):
                if index in stored_names(statement):  # counted anew
                    return
                for node in file.nodes(ast.BinOp, statement):
                    if ast.unparse(node) == f"{index} + 1":
                        yield node


def _find_loops_over(
    conversion: Conversion, of_training: bool
) -> Iterator[tuple[SourceText, ast.For, str]]:
    """Yield the innermost loop of each use of a loader, and the name of the loader there."""
    loaders = [item for item in conversion.facts.loaders if item.is_training is of_training]
    for use in chain.from_iterable(uses for loader in loaders for uses in loader.uses):
        if conversion.is_known(use.location):
            file = conversion.file(use.location)
            for loop in file.nodes(ast.For):
                if iterates_at(loop, use.location.line):
                    yield file, loop, use.name
    if of_training:
        for file, by_hand in dict.fromkeys(find_loops_by_hand(conversion)):
            if isinstance(by_hand, ast.For):
                yield file, by_hand, ""


def _names_of_loader(file: SourceText, loop: ast.For, name: str) -> set[str]:
    """Return a name, and those of what is made of it in the function, such as a progress bar."""
    iterated = [loop.iter, *getattr(loop.iter, "args", [])]  # in enumerate, for example
    names = {name, *map(file.text_of, iterated)}
    for node in file.nodes(ast.Assign, file.scope_of(loop)):
        if isinstance(node.value, ast.Call) and name in map(file.text_of, node.value.args):
            names.update(map(file.text_of, node.targets))
    return names


def _accumulators(file: SourceText, loop: ast.For) -> list[str]:
    """Return the variables that a loop adds to, and that begin anew before it, or after it."""
    targets = [target for node in file.nodes(ast.Assign, loop) for target in node.targets]
    begin_anew = assigned_before(file, loop)
    for item in statements_after(file, loop):
        if isinstance(item, ast.Assign):  # for the next epoch
            read = {node.id for node in file.nodes(ast.Name, item.value)}
            begin_anew.update({*stored_names(item)} - read)
    begin_anew.difference_update(map(file.text_of, targets))
    added = dict.fromkeys([*_added_to(loop), *_added_to_items(file, loop)])
    return [name for name in added if name in begin_anew]


def find_joined(file: SourceText, loop: ast.For) -> set[str]:
    """Return the variables to which a loop adds rows: `x = torch.cat((x, y))`."""
    names = {
        target.id
        for item in file.nodes(ast.Assign, loop)
        for target in item.targets
        if isinstance(target, ast.Name)
        for call in file.nodes(ast.Call, item.value)
        if last_name(call.func) in CONCATENATIONS and call.args
        if {ast.unparse(axis) for axis in [*call.args[1:], *call.keywords]} <= ROWS
        if target.id in map(file.text_of, getattr(call.args[0], "elts", []))
    }
    return names & assigned_before(file, loop)


def _added_to(loop: Loop) -> Iterator[str]:
    """Yield the variables that a loop adds to."""
    for node in ast.walk(loop):
        match node:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend")):
                yield name


def _added_to_items(file: SourceText, loop: Loop) -> Iterator[str]:
    """Yield the variables to whose items a loop adds, or a function to which it gives them."""
    yield from _names_of_items(loop)
    functions = {item.name: item for item in file.nodes(ast.FunctionDef)}
    for call in file.nodes(ast.Call, loop):
        if function := functions.get(last_name(call.func)):
            given = dict(zip(parameters_of(function), map(file.text_of, call.args), strict=False))
            yield from (given[name] for name in _names_of_items(function) if name in given)


def _names_of_items(tree: ast.AST) -> Iterator[str]:
    """Yield the variables to whose items a tree adds, as in a count for each class."""
    for node in ast.walk(tree):
        match node:
            case ast.AugAssign(target=ast.Subscript(value=ast.Name(id=name)), op=ast.Add()):
                yield name


def assigned_before(file: SourceText, loop: Loop) -> set[str]:
    """Return the variables that are assigned before a loop, in its block or in one around it."""
    blocks = [block[:index] for block, index in _blocks_around(file, loop)]
    return set().union(*map(_surely_assigned, blocks))


def _surely_assigned(statements: list[ast.stmt]) -> set[str]:
    """Return the variables that statements assign, whichever branches are taken."""
    names: set[str] = set()
    for item in statements:
        match item:
            case ast.Assign():
                names.update(stored_names(item))
            case ast.If():
                names |= _surely_assigned(item.body) & _surely_assigned(item.orelse)
            case ast.With():
                names |= _surely_assigned(item.body)
    return names


def statements_after(file: SourceText, loop: Loop) -> list[ast.stmt]:
    """Return the statements after a loop, in its block and in those around it."""
    return [item for block, index in _blocks_around(file, loop) for item in block[index + 1 :]]


def _blocks_around(file: SourceText, loop: Loop) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield the blocks that a loop is in, the innermost first, and its place in each.

    Blocks beyond the next loop do not count: their variables go on from epoch to epoch.
    """
    statement: ast.stmt = loop
    while True:
        block = file.block_of(statement)
        yield block, block.index(statement)
        parent = file.parents[statement]
        if not isinstance(parent, ast.With | ast.If | ast.Try):
            return
        statement = parent


def sum_numbers_of_training(conversion: Conversion) -> Edits:
    """Add up over all processes what training loops add up."""
    yield from keep_numbers_of_training(conversion)
    yield from _add_sums(conversion, of_training=True)


def keep_numbers_of_training(conversion: Conversion) -> Edits:
    """Let one process show all: what it shows may be right, or is summed where it is shown."""
    file, begin, _ = _find_training(conversion)
    yield file.insert_before(begin, "show_on_one_process()")


def calls_of(conversion: Conversion, name: str) -> Iterator[tuple[SourceText, ast.Call]]:
    """Yield the calls of a function in all files, by the name that it has without aliases.

    A run that is cut short has not come to those after the training.
    """
    for file, call in conversion.all_calls():
        if file.qualified_name(call.func) == name:
            yield file, call


def find_lines_not_judged(
    conversion: Conversion, min_shown: int = MIN_SHOWN
) -> Iterator[tuple[SourceText, ast.Call]]:
    """Yield the calls that print values, and that no run came to, or that showed a 0 each time.

    One that prints now and then must have shown some: shares may be equal by chance.
    """
    facts = conversion.facts
    series_of: defaultdict[Location, list[Series]] = defaultdict(list)
    for (line, caller, _), series in read_series(facts.log).items():
        for at in filter(None, (line, caller)):
            series_of[facts.location(at)].append(series)
    counts = dict.fromkeys(facts.shown_lines, min_shown)  # without numbers
    for location, shown in series_of.items():
        counts[location] = max(len(series.values) * any(series.values) for series in shown)
    for file, call in conversion.all_calls():
        shows = isinstance(call.func, ast.Attribute) and call.func.attr in LOGGING_METHODS
        if not shows and file.qualified_name(call.func) not in ("print", "sys.stdout.write"):
            continue
        is_fixed = all(isinstance(argument, ast.Constant) for argument in call.args)
        tests = [ast.dump(item.test) for item in file.parents_of(call) if isinstance(item, ast.If)]
        is_of_main = file.name == conversion.main or not any("__name__" in test for test in tests)
        needed = min_shown if any("Mod()" in test for test in tests) else 1
        count = max(counts.get(location, 0) for location in locations_of(file, call))
        if not is_fixed and is_of_main and count < needed:
            yield file, call
