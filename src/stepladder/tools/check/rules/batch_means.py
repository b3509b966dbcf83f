"""Patterns in the source: means of batches that are added up or collected, and then divided."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stepladder.tools.check.rules.source_patterns import (
    assignments,
    is_addition,
    is_division,
    names_of,
    row_counts,
)
from stepladder.tools.check.script_source import (
    SourceFile,
    constant_value,
    find_nodes,
    last_name,
    lines_of,
)

LOSS_NAMES = ("loss", "criterion", "cross_entropy", "mse", "nll", "bce", "l1", "mean()", "acc")
LENGTH_OF_ALL = re.compile(r"len\([\w.]+\.dataset\)")
SUM_OVER_RANKS = re.compile(r"[\w.]*gather\((.+)\)\.sum\(\)")
Comprehension = ast.ListComp | ast.GeneratorExp


@dataclass(frozen=True)
class BatchMeans:
    """A loop or a comprehension that adds up or collects a mean of each batch.

    Args:
        lines: Its lines, up to the object that it iterates over, and those where the name of that
            object is set, as by `enumerate(loader)`: a pass over the loader begins on one of them.
        values: The sums and the lists, as they are written.
        loader: What is iterated over.
        divisors: What stands for the number of batches.
        counts: What stands for the number of samples.
        scope: The function that it is in.
        node: The loop or the comprehension.
    """

    lines: set[int]
    values: tuple[str, ...]
    loader: str
    divisors: tuple[str, ...]
    counts: tuple[str, ...]
    scope: ast.AST
    node: ast.For | Comprehension

    def following_nodes(self) -> Iterator[ast.expr | ast.stmt]:
        """Yield the nodes of the function from the first line of the loop on."""
        for node in ast.walk(self.scope):
            if isinstance(node, ast.expr | ast.stmt) and node.lineno >= self.node.lineno:
                yield node


@dataclass(frozen=True)
class Quotient:
    """A division in the source, as an expression or as `total /= count`."""

    dividend: str
    divisor: str
    node: ast.expr | ast.stmt

    @property
    def line(self) -> int:
        return self.node.lineno


def averages_of_batch_means(file: SourceFile) -> Iterator[tuple[BatchMeans, int]]:
    """Yield the loops that add up a mean per batch, and divide the sum by the number of batches.

    Each is the loop, and the line of the division or of the call of `mean`.
    """
    for means in all_batch_means(file):
        for node in means.following_nodes():
            quotient = quotient_of(node)
            is_average = quotient is not None and divides_by_batches(quotient, means)
            if is_average or is_mean_of(node, means.values):
                yield means, node.lineno


def all_batch_means(file: SourceFile) -> Iterator[BatchMeans]:
    for node in ast.walk(file.tree):
        counts: tuple[str, ...] = ()
        if isinstance(node, ast.For):
            values = tuple(unweighted_sums(node))
            counts = tuple(row_counts(node))
            head = iterated = node.iter
        elif isinstance(node, Comprehension) and is_mean(node.elt, node):
            values = tuple(names_of_collected(file, node))
            head = node
            iterated = node.generators[0].iter
        else:
            continue
        if values:
            loader = ast.unparse(iterated_object(iterated))
            scope = file.enclosing_function(node)
            length = f"len({loader})"
            lines = {*range(node.lineno, lines_of(head).stop)}
            yield BatchMeans(
                lines=lines | {statement.lineno for statement in assignments(scope, loader)},
                values=values,
                loader=loader,
                divisors=(length, *counters(node), *names_of(scope, length)),
                counts=(*counts, *names_of(scope, f"len({loader}.dataset)")),
                scope=scope,
                node=node,
            )


def names_of_collected(file: SourceFile, collected: Comprehension) -> Iterator[str]:
    """Yield how the means of a comprehension are written: as itself, and as a name."""
    yield ast.unparse(collected)
    parent = file.parents.get(collected)
    if isinstance(parent, ast.Assign):
        yield ast.unparse(parent.targets[0])


def quotient_of(node: ast.AST) -> Quotient | None:
    """Return the division that a node is, or None."""
    if is_division(node):
        dividend = node.left
        divisor = node.right
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        dividend = node.target
        divisor = node.value
    elif isinstance(node, ast.Call) and is_division_method(node):
        dividend = node.func.value  # type: ignore[attr-defined]
        divisor = node.args[0]
    else:
        return quotient_of_each(node)
    name = ast.unparse(dividend).removesuffix(".item()")
    return Quotient(name, bare_count(divisor), node)


def quotients(nodes: Iterable[ast.AST]) -> Iterator[Quotient]:
    yield from filter(None, map(quotient_of, nodes))


def line_divided_by_length(file: SourceFile, loop_line: int) -> int | None:
    """Return the first line after a loop, in its function, that divides by the length of all."""
    for loop in find_nodes(file.tree, ast.For):
        if loop.lineno == loop_line:
            function = file.enclosing_function(loop)
            for quotient in quotients(ast.walk(function)):
                if quotient.line > loop_line and is_length_of_all(quotient.divisor, function):
                    return quotient.line
    return None


def is_length_of_all(divisor: str, function: ast.AST) -> bool:
    """Return whether a number is the length of a whole data set, or a name for it."""
    named = [ast.unparse(statement.value) for statement in assignments(function, divisor)]
    return all(LENGTH_OF_ALL.fullmatch(value) for value in named or [divisor])


def quotient_of_each(node: ast.AST) -> Quotient | None:
    """Return the division of each value in `{k: v / n for k, v in sums.items()}`."""
    if not isinstance(node, ast.DictComp | Comprehension):
        return None
    loop = node.generators[0]
    divided = quotient_of(node.value if isinstance(node, ast.DictComp) else node.elt)
    target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
    if divided is None or divided.dividend != ast.unparse(target):
        return None
    values = ast.unparse(loop.iter).removesuffix(".items()").removesuffix(".values()")
    return Quotient(values, divided.divisor, node)


def is_division_method(call: ast.Call) -> bool:
    """Return whether a call is `total.div_(count)`."""
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in ("div", "div_")
    return is_method and len(call.args) == 1


def bare_count(divisor: ast.expr) -> str:
    """Return how a number is written, without `max(1, ...)` and `float(...)` around it."""
    while isinstance(divisor, ast.Call) and last_name(divisor.func) in ("max", "float", "int"):
        arguments = [part for part in divisor.args if not isinstance(part, ast.Constant)]
        if len(arguments) != 1:
            break
        divisor = arguments[0]
    return ast.unparse(divisor)


def divides_by_batches(quotient: Quotient, means: BatchMeans) -> bool:
    """Return whether a sum of batch means is divided by the number of batches."""
    for values in means.values:
        if quotient.dividend in (f"sum({values})", f"sum({values}).item()"):
            return quotient.divisor in (f"len({values})", *means.divisors)
    return quotient.dividend in means.values and quotient.divisor in means.divisors


def divides_by_samples(quotient: Quotient, means: BatchMeans) -> bool:
    """Return whether a sum of batch means is divided by a number of samples."""
    sums = [text for values in means.values for text in (values, f"sum({values})")]
    if SUM_OVER_RANKS.sub(r"\1", quotient.dividend) not in sums:
        return False
    samples = (f"len({means.loader}.dataset)", f"len({means.loader}.sampler)", *means.counts)
    return quotient.divisor in samples


def is_mean_of(node: ast.AST, values: tuple[str, ...]) -> bool:
    """Return whether a node is `mean(values)`, or `tensor(values).mean()`, of one of these."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in ("mean", "fmean"):
        return False
    arguments = [ast.unparse(argument) for argument in node.args]
    function = ast.unparse(node.func)
    return any(name in arguments or f"({name})" in function for name in values)


def iterated_object(iterated: ast.expr) -> ast.expr:
    """Return what is iterated over, without enumerate, tqdm and the like."""
    while isinstance(iterated, ast.Call) and iterated.args:
        iterated = iterated.args[0]
    return iterated


def counters(loop: ast.AST) -> Iterator[str]:
    """Yield the names that grow by one in a loop."""
    for node in find_nodes(loop, ast.AugAssign):
        if constant_value(node.value) == 1:
            yield ast.unparse(node.target)


def unweighted_sums(loop: ast.For) -> Iterator[str]:
    """Yield the names that the mean of each batch is added or appended to, without its size."""
    for node in ast.walk(loop):
        if is_addition(node) and is_mean(node.value, loop):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Call) and is_mean_appended(node, loop):
            yield ast.unparse(node.func).removesuffix(".append")


def is_mean_appended(call: ast.Call, loop: ast.For) -> bool:
    """Return whether a call is `values.append(mean)`."""
    is_append = isinstance(call.func, ast.Attribute) and call.func.attr == "append"
    return is_append and len(call.args) == 1 and is_mean(call.args[0], loop)


def is_mean(value: ast.expr, loop: ast.AST) -> bool:
    """Return whether a value is the mean of a loss over a batch."""
    text = ast.unparse(own_value(value))
    if "sum" in text or has_product(value):
        return False
    name = text.split(".")[0].removeprefix("float(").rstrip(")")
    texts = [text, *(ast.unparse(statement.value) for statement in assignments(loop, name))]
    joined = " ".join(texts).lower()
    is_divided = ".mean()" in joined or "/" in joined
    is_sum = "reduction='sum'" in joined or (".sum()" in joined and not is_divided)
    return not is_sum and any(loss in joined for loss in LOSS_NAMES)


def own_value(value: ast.expr) -> ast.expr:
    """Return what this rank adds to `gather(value).sum()`, or a value that is no such sum."""
    text = SUM_OVER_RANKS.sub(r"\1", ast.unparse(value))
    return ast.parse(text, mode="eval").body


def has_product(node: ast.AST) -> bool:
    operations = find_nodes(node, ast.BinOp)
    return any(isinstance(operation.op, ast.Mult) for operation in operations)
