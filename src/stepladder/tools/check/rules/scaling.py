"""Whether the batch or the learning rate follows the number of processes, by the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from stepladder.tools.check.finding import CodeLine, Fault
from stepladder.tools.check.tree import Code, CodeFile, keyword, last_name

LIBRARIES = (
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "deepspeed",
    "transformers",
)


WORLD = re.compile(
    r"world|num_replicas|num_processes|nproc|n_ranks|num_ranks|ngpus|n_gpus|num_gpus|device_count|nranks"
)


def unscaled_batch(source: Code) -> Iterator[Fault]:
    """Neither the batch of a rank nor the learning rate is computed from the number of processes."""
    if source.imports(*LIBRARIES) or not source.has(
        "DistributedSampler", "DistributedDataParallel", "all_reduce"
    ):
        return
    tainted = world_names(source)
    loaders = source.calls("DataLoader")
    optimizers = [
        (f, c)
        for f, c in source.calls(
            "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LBFGS", "NAdam", "RAdam"
        )
    ]
    if any(keyword(call, "batch_sampler") for _, call in loaders):  # a class of its own decides
        return
    steps = list(steps_by_hand(source)) if not optimizers else []
    if not loaders or not (optimizers or steps):
        return
    batches = [size_of(call) for _, call in loaders]
    rates = [
        keyword(call, "lr") or (call.args[1] if len(call.args) > 1 else None)
        for _, call in optimizers
    ]
    rates += [factor for _, _, factors in steps for factor in factors]
    known = [*batches, *rates, *lambdas(source)]
    if any(part is not None and depends(part, tainted) for part in known):
        return
    file, line = [
        *((f, call.lineno) for f, call in optimizers),
        *((f, line) for f, line, _ in steps),
    ][0]
    yield Fault(
        "unscaled-batch",
        CodeLine(file.name, line),
        "neither the batch size per rank nor the learning rate depends on the number of processes",
    )


GRADIENT = re.compile(r"grad|^g$|^d[wb]$")


def steps_by_hand(source: Code) -> Iterator[tuple[CodeFile, int, list[ast.expr]]]:
    """Steps without an optimizer, `w -= lr * grad`: their lines, and what the gradient is
    multiplied by.
    """
    for file in source.files:
        for node in ast.walk(file.tree):
            value = None
            if isinstance(node, (ast.AugAssign, ast.BinOp)) and isinstance(node.op, ast.Sub):
                value = node.value if isinstance(node, ast.AugAssign) else node.right
            elif isinstance(node, ast.Call) and last_name(node.func) == "sub_" and node.args:
                value = node.args[0]
            parts = list(factors(value)) if value is not None else []
            rate = [part for part in parts if not is_gradient(part)]
            if rate and len(rate) < len(parts):
                yield file, getattr(node, "lineno", 1), rate


def factors(product: ast.expr) -> Iterator[ast.expr]:
    """Without divisors: a gradient is divided by the number of ranks to be averaged."""
    if isinstance(product, ast.BinOp) and isinstance(product.op, (ast.Mult, ast.Div)):
        yield from factors(product.left)
        if isinstance(product.op, ast.Mult):
            yield from factors(product.right)
    else:
        yield product


def is_gradient(node: ast.expr) -> bool:
    return any(GRADIENT.search(last_name(part).lower()) for part in ast.walk(node))


def size_of(call: ast.Call) -> ast.expr | None:
    return (
        keyword(call, "batch_size")
        or (call.args[1] if len(call.args) > 1 else None)
        or keyword(call, "batch_sampler")
    )


def lambdas(source: Code) -> list[ast.expr]:
    """Arguments of schedules, and what the learning rate is set to later."""
    found: list[ast.expr] = [
        arg
        for _, call in source.calls("LambdaLR", "LinearLR", "OneCycleLR")
        for arg in [*call.args, *(k.value for k in call.keywords)]
    ]
    for file in source.files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Assign) and "'lr'" in ast.unparse(node.targets[0]):
                found.append(node.value)
    return found


def depends(node: ast.AST, tainted: set[str]) -> bool:
    """A call of one of the source's own functions: by what that returns, whatever it is given."""
    if isinstance(node, ast.Call) and f"def {last_name(node.func)}" in tainted:
        return is_world(node.func, tainted)
    return is_world(node, tainted) or any(
        depends(part, tainted) for part in ast.iter_child_nodes(node)
    )


def is_world(node: ast.AST, tainted: set[str]) -> bool:
    """A name, or a text such as "WORLD_SIZE", that means the number of processes or comes from it."""
    name = last_name(node) or (node.value if isinstance(node, ast.Constant) else "")
    return isinstance(name, str) and (name in tainted or bool(WORLD.search(name.lower())))


def world_names(source: Code) -> set[str]:
    """Names whose value comes from the number of processes, by whatever way; too many rather than
    too few.
    """
    functions = {
        n.name: n for f in source.files for n in ast.walk(f.tree) if isinstance(n, ast.FunctionDef)
    }
    tainted = {f"def {name}" for name in functions}
    for _ in range(6):
        before = len(tainted)
        for file in source.files:
            for node in ast.walk(file.tree):
                taint(node, tainted)
                if isinstance(node, ast.Call) and (called := functions.get(last_name(node.func))):
                    names = [arg.arg for arg in called.args.args if arg.arg != "self"]
                    given = zip(names, node.args, strict=False)
                    tainted |= {name for name, arg in given if depends(arg, tainted)}
        if len(tainted) == before:
            break
    return tainted


def taint(node: ast.AST, tainted: set[str]) -> None:
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value: ast.AST = node.value
        if (depends(value, tainted) and not isinstance(value, ast.Call)) or (
            isinstance(value, ast.Call) and arithmetic(value, tainted)
        ):
            tainted |= {
                last_name(part)
                for target in targets
                for part in ast.walk(target)
                if last_name(part)
            } - {"self"}
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if any(
            isinstance(part, ast.Return) and part.value is not None and depends(part.value, tainted)
            for part in ast.walk(node)
        ):
            tainted.add(node.name)
    elif isinstance(node, ast.keyword) and node.arg:
        if WORLD.search(node.arg):
            tainted |= {last_name(part) for part in ast.walk(node.value)} - {
                "",
                "args",
                "self",
                "config",
            }
        if depends(node.value, tainted):
            tainted.add(node.arg)


def arithmetic(call: ast.Call, tainted: set[str]) -> bool:
    """A function of numbers, or one that returns what depends on the number of processes."""
    if is_world(call.func, tainted):
        return True
    return last_name(call.func) in {
        "int",
        "max",
        "min",
        "float",
        "round",
        "sqrt",
        "ceil",
    } and depends(call, tainted)
