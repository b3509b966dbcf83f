"""The rule that the batch or the learning rate depends on the number of processes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from stepladder.tools.check.rules.evidence import CHECK_TEXTS, Findings, source_rule
from stepladder.tools.check.script_source import (
    ScriptSource,
    SourceFile,
    find_nodes,
    keyword_value,
    last_name,
)
from stepladder.tools.findings.finding import Location

LIBRARIES = (
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "deepspeed",
    "transformers",
)
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LBFGS", "NAdam", "RAdam")
IS_DATA_PARALLEL = ("DistributedSampler", "DistributedDataParallel", "all_reduce")
ARITHMETIC = {"int", "max", "min", "float", "round", "sqrt", "ceil"}
WORLD_SIZE = re.compile(
    r"world|num_replicas|num_processes|nproc|n_ranks|num_ranks|ngpus|n_gpus|num_gpus|device_count"
    r"|nranks"
)
GRADIENT_NAME = re.compile(r"grad|^g$|^d[wb]$")
MAX_ROUNDS = 6  # of following names through assignments and calls

Names = set[str]  # whose value comes from the number of processes; "def f" for each function f


@source_rule("unscaled-batch")
def unscaled_batch(source: ScriptSource) -> Findings:
    """Find scripts where neither batch size nor learning rate depends on the world size."""
    if source.imports(*LIBRARIES) or not source.contains(*IS_DATA_PARALLEL):
        return
    loaders = [call for _, call in source.calls("DataLoader")]
    if any(keyword_value(call, "batch_sampler") for call in loaders):
        return  # a class of the script decides
    optimizers = source.calls(*OPTIMIZERS)
    steps = [] if optimizers else list(steps_by_hand(source))
    if not loaders or not (optimizers or steps):
        return
    values = [batch_size_of(call) for call in loaders]
    values += [learning_rate_of(call) for _, call in optimizers]
    for _, _, factors in steps:
        values += factors
    values += schedule_values(source)
    names = world_size_names(source)
    if any(depends_on(value, names) for value in values if value is not None):
        return
    lines = [(file, call.lineno) for file, call in optimizers]
    lines += [(file, line) for file, line, _ in steps]
    file, line = lines[0]
    yield CHECK_TEXTS.finding(
        "unscaled-batch",
        Location(file.name, line),
        "neither the batch size per rank nor the learning rate depends on the number of processes",
    )


def steps_by_hand(source: ScriptSource) -> Iterator[tuple[SourceFile, int, list[ast.expr]]]:
    """Yield steps without an optimizer, such as `w -= lr * grad`.

    Each is the file, the line, and the factors by which the gradient is multiplied.
    """
    for file, node in source.nodes(ast.AST):
        subtracted = subtracted_value(node)
        if subtracted is None:
            continue
        factors = list(factors_of(subtracted))
        rate = [factor for factor in factors if not is_gradient(factor)]
        if rate and len(rate) < len(factors):
            yield file, getattr(node, "lineno", 1), rate


def subtracted_value(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return node.right
    if isinstance(node, ast.Call) and last_name(node.func) == "sub_" and node.args:
        return node.args[0]
    return None


def factors_of(product: ast.expr) -> Iterator[ast.expr]:
    """Yield the factors of a product, without divisors.

    A gradient is divided by the number of ranks to be averaged, which scales nothing.
    """
    if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult | ast.Div):
        yield product
        return
    yield from factors_of(product.left)
    if isinstance(product.op, ast.Mult):
        yield from factors_of(product.right)


def is_gradient(node: ast.expr) -> bool:
    return any(GRADIENT_NAME.search(last_name(part).lower()) for part in ast.walk(node))


def second_argument(call: ast.Call) -> ast.expr | None:
    return call.args[1] if len(call.args) > 1 else None


def batch_size_of(call: ast.Call) -> ast.expr | None:
    return keyword_value(call, "batch_size") or second_argument(call)


def learning_rate_of(call: ast.Call) -> ast.expr | None:
    return keyword_value(call, "lr") or second_argument(call)


def schedule_values(source: ScriptSource) -> list[ast.expr]:
    """Return the arguments of schedules, and the values that a learning rate is set to."""
    values: list[ast.expr] = []
    for _, call in source.calls("LambdaLR", "LinearLR", "OneCycleLR"):
        values += call.args
        values += [argument.value for argument in call.keywords]
    for _, statement in source.nodes(ast.Assign):
        if "'lr'" in ast.unparse(statement.targets[0]):
            values.append(statement.value)
    return values


def depends_on(node: ast.AST, names: Names) -> bool:
    """Return whether an expression depends on one of these names.

    A call of the source's own function depends on what the function returns, not on its arguments.
    """
    if isinstance(node, ast.Call) and f"def {last_name(node.func)}" in names:
        return is_world_size(node.func, names)
    if is_world_size(node, names):
        return True
    return any(depends_on(part, names) for part in ast.iter_child_nodes(node))


def is_world_size(node: ast.AST, names: Names) -> bool:
    """Return whether a name, or a text such as "WORLD_SIZE", means the number of processes.

    A name that was computed from it counts as well.
    """
    name: object = last_name(node)
    if not name and isinstance(node, ast.Constant):
        name = node.value
    if not isinstance(name, str):
        return False
    return name in names or bool(WORLD_SIZE.search(name.lower()))


def world_size_names(source: ScriptSource) -> Names:
    """Return all names whose value comes from the number of processes; rather too many."""
    nodes = [node for _, node in source.nodes(ast.AST)]
    functions = {function.name: function for _, function in source.nodes(ast.FunctionDef)}
    names = {f"def {name}" for name in functions}
    for _ in range(MAX_ROUNDS):
        count = len(names)
        for node in nodes:
            names |= new_names(node, names)
            if isinstance(node, ast.Call):
                called = functions.get(last_name(node.func))
                if called is not None:
                    names |= dependent_parameters(called, node, names)
        if len(names) == count:
            break
    return names


def dependent_parameters(function: ast.FunctionDef, call: ast.Call, names: Names) -> Names:
    """Return the parameters of a function that a call gives dependent values."""
    parameters = [p.arg for p in function.args.args if p.arg != "self"]
    values = zip(parameters, call.args, strict=False)
    return {parameter for parameter, value in values if depends_on(value, names)}


def new_names(node: ast.AST, names: Names) -> Names:
    """Return the names that a node makes dependent: targets, functions, keyword arguments."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return assigned_names(node, names)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if returns_dependent_value(node, names):
            return {node.name}
        return set()
    if isinstance(node, ast.keyword):
        return keyword_names(node, names)
    return set()


def assigned_names(node: ast.Assign | ast.AnnAssign | ast.AugAssign, names: Names) -> Names:
    value = node.value
    if isinstance(value, ast.Call):
        is_dependent = is_dependent_call(value, names)
    else:
        is_dependent = value is not None and depends_on(value, names)
    if not is_dependent:
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return set().union(*map(names_in, targets)) - {"self"}


def names_in(node: ast.AST) -> Names:
    """Return the names of all variables and attributes in an expression."""
    names = {last_name(part) for part in ast.walk(node)}
    return names - {""}


def is_dependent_call(call: ast.Call, names: Names) -> bool:
    """Return whether the function returns a dependent value, or is arithmetic on one."""
    if is_world_size(call.func, names):
        return True
    return last_name(call.func) in ARITHMETIC and depends_on(call, names)


def returns_dependent_value(function: ast.AST, names: Names) -> bool:
    returned = [statement.value for statement in find_nodes(function, ast.Return)]
    return any(depends_on(value, names) for value in returned if value is not None)


def keyword_names(node: ast.keyword, names: Names) -> Names:
    """Return the dependent names of a keyword argument, such as `num_replicas=count`."""
    dependents: Names = set()
    if not node.arg:
        return dependents
    if WORLD_SIZE.search(node.arg):
        dependents |= names_in(node.value)
        dependents -= {"args", "self", "config"}
    if depends_on(node.value, names | dependents):
        dependents.add(node.arg)
    return dependents
