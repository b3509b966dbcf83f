"""Patterns in the source for which rules on recordings ask."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

from stepladder.tools.check.script_source import (
    SourceFile,
    dotted_name,
    find_nodes,
    last_name,
    lines_of,
)

DETACHES = (".item()", ".detach()", "float(", ".data", ".tolist()", ".cpu().numpy()")
REDUCES_NO_SUM = ("AVG", "MAX", "MIN")
COLLECTING_METHODS = ("append", "extend", "add")
SIZES_OF_TENSORS = (".size(", ".numel()", ".shape[")
LOADS = re.compile(r"(?:^|_)(?:load|resume|restore)(?:_|$)")
MAKES_TENSOR = ("tensor", "as_tensor", "Tensor", "FloatTensor")


def line_that_keeps_loss(file: SourceFile, line: int) -> int | None:
    """Return the line that stores a loss with its graph; None where there is none.

    Args:
        file: The file of the backward pass.
        line: A line of the call of `backward`.
    """
    calls = (call for call in file.calls("backward") if line in lines_of(call))
    backward = next(calls, None)
    if backward is None or not isinstance(backward.func, ast.Attribute):
        return None
    loss = ast.unparse(backward.func.value)
    for node in ast.walk(file.enclosing_function(backward)):
        if keeps_loss(node, loss):
            return getattr(node, "lineno", None)
    return None


def keeps_loss(node: ast.AST, loss: str) -> bool:
    """Return whether a loss is added to a sum, or appended to a list, without being detached."""
    if isinstance(node, ast.AugAssign):
        return has_name(node.value, loss) and not is_detached(node.value)
    if isinstance(node, ast.Call):
        is_collecting = last_name(node.func) in COLLECTING_METHODS
        is_argument = any(has_name(argument, loss) for argument in node.args)
        return is_collecting and is_argument and not is_detached(node)
    if isinstance(node, ast.Assign):
        return is_running_sum(node, loss) and not is_detached(node.value)
    return False


def is_running_sum(node: ast.Assign, loss: str) -> bool:
    """Return whether a statement is `total = total + loss`."""
    if not isinstance(node.value, ast.BinOp):
        return False
    total = ast.unparse(node.targets[0])
    if total == loss:
        return False
    return has_name(node.value, loss) and has_name(node.value, total)


def has_name(node: ast.AST, name: str) -> bool:
    """Return whether a name, such as `loss` or `self.loss`, is in an expression."""
    for part in ast.walk(node):
        is_name = isinstance(part, ast.Name | ast.Attribute)
        if is_name and ast.unparse(part) == name:
            return True
    return False


def is_detached(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return any(word in text for word in DETACHES)


def is_division(node: ast.AST | None) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def is_addition(node: ast.AST) -> TypeGuard[ast.AugAssign]:
    return isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)


def dividend_of(division: ast.BinOp) -> str:
    return ast.unparse(division.left).removesuffix(".item()")


def assignments(node: ast.AST, name: str) -> Iterator[ast.Assign]:
    """Yield the statements within a node that assign to a name."""
    for statement in find_nodes(node, ast.Assign):
        targets = [ast.unparse(target) for target in statement.targets]
        if name in targets:
            yield statement


def is_trained_on(file: SourceFile, line: int) -> bool:
    """Return whether a function may train on what one of its lines assigns.

    It is also True where that cannot be seen, as in a function without a backward pass.
    """
    for statement in find_nodes(file.tree, ast.Assign):
        if line in lines_of(statement):
            scope = file.enclosing_function(statement)
            trained = variables_of_training(file, scope)
            return not trained or bool(trained & variables_in(*statement.targets))
    return True


def variables_of_training(file: SourceFile, scope: ast.AST) -> set[str]:
    """Return the variables on which the backward pass of a function may depend."""
    calls = [call for call in file.calls("backward") if file.enclosing_function(call) is scope]
    variables: set[str] = set()
    imported = {alias.asname or alias.name for alias in find_nodes(file.tree, ast.alias)}
    flows = list(flows_of_values(scope))
    found = variables_in(*calls)
    while found - variables:
        variables |= found
        for changed, read in flows:
            if changed & (variables - imported):
                found |= read
    return variables


def flows_of_values(scope: ast.AST) -> Iterator[tuple[set[str], set[str]]]:
    """Yield the variables that a statement may change, and those on which these then depend."""
    for statement in find_nodes(scope, ast.stmt):
        if ast.unparse(statement).startswith("print("):
            continue
        # The body of a loop or an `if` holds statements, and its head expressions.
        parts = ast.iter_child_nodes(statement)
        read = variables_in(*(part for part in parts if isinstance(part, ast.expr)))
        if isinstance(statement, ast.Assign):
            yield variables_in(*statement.targets), read
        else:
            yield variables_in(statement), read


def variables_in(*nodes: ast.AST) -> set[str]:
    variables: set[str] = set()
    for node in nodes:
        variables.update(name.id for name in find_nodes(node, ast.Name))
    return variables


def names_of(scope: ast.AST, value: str) -> Iterator[str]:
    """Yield the names that a scope sets to a value, and to no other: `size = len(data)`."""
    for statement in find_nodes(scope, ast.Assign):
        name = ast.unparse(statement.targets[0])
        values = {ast.unparse(other.value) for other in assignments(scope, name)}
        if values == {value}:
            yield name


def reduced_quotients(file: SourceFile) -> Iterator[int]:
    """Yield the lines that reduce tensors which were made from a quotient or a mean."""
    for call in file.calls("all_reduce", "reduce"):
        is_of_torch = "dist" in dotted_name(call.func)
        is_collective = is_of_torch or last_name(call.func) == "all_reduce"
        if not call.args or not is_collective:
            continue
        function = file.enclosing_function(call)
        for statement in assignments(function, ast.unparse(call.args[0])):
            is_before = statement.lineno < call.lineno
            if is_before and is_quotient(statement.value, function, file.tree):
                yield call.lineno


def local_quotients(file: SourceFile) -> Iterator[tuple[int, int, str]]:
    """Yield the totals of all ranks that are divided by the count of one rank.

    Each is the line of the reduction, the line of the quotient, and a description of both.
    """
    reductions = [call for call in file.calls("all_reduce") if call.args]
    reduced = [ast.unparse(call.args[0]) for call in reductions]
    for call, total in zip(reductions, reduced, strict=True):
        if not total or any(word in ast.unparse(call) for word in REDUCES_NO_SUM):
            continue
        function = file.enclosing_function(call)
        counts = row_counts_in(function)
        for division in find_nodes(function, ast.BinOp):
            if not is_division(division) or division.lineno <= call.lineno:
                continue
            divisor = ast.unparse(division.right)
            is_total = dividend_of(division) in (total, f"float({total})")
            is_reduced = any(divisor in name for name in reduced)
            if is_total and divisor in counts and not is_reduced:
                text = (
                    f"{total} is summed over the ranks, and {divisor} is what this rank has counted"
                )
                yield call.lineno, division.lineno, text


def row_counts_in(function: ast.AST) -> set[str]:
    """Return the names that grow in a loop of a function by the size of a batch."""
    names: set[str] = set()
    for loop in find_nodes(function, ast.For):
        names.update(row_counts(loop))
    return names


def row_counts(loop: ast.For) -> Iterator[str]:
    """Yield the names that grow in a loop by the size of a batch."""
    for node in ast.walk(loop):
        if is_addition(node):
            value = ast.unparse(node.value)
            is_size = any(part in value for part in SIZES_OF_TENSORS)
            if is_size or value.startswith("len("):
                yield ast.unparse(node.target)


def prints_its_arguments(file: SourceFile, line: int) -> bool:
    """Return whether a line prints nothing but arguments of its function, and perhaps a rank."""
    for call in find_nodes(file.tree, ast.Call):
        function = file.enclosing_function(call)
        if line not in lines_of(call) or not isinstance(function, ast.FunctionDef):
            continue
        arguments = {node.arg for node in find_nodes(function.args, ast.arg)}
        names = {name for name in variables_in(*call.args) if "rank" not in name}
        if names and names <= arguments:
            return True
    return False


def returns_quotient(call: ast.Call, module: ast.Module) -> bool:
    """Return whether a call is of a function of the same file that always returns a quotient."""
    name = last_name(call.func)
    returned: list[ast.expr | None] = []
    for function in find_nodes(module, ast.FunctionDef):
        if function.name == name:
            for statement in find_nodes(function, ast.Return):
                returned.append(statement.value)
    return bool(returned) and all(map(is_division, returned))


def is_quotient(value: ast.expr, function: ast.AST, module: ast.Module) -> bool:
    """Return whether a value is a quotient, or a tensor that is made of one.

    For example `tensor(total / count)`, or `tensor(mean)` after `mean = total / count`.
    """
    if not isinstance(value, ast.Call) or not value.args:
        return is_division(value)
    inner = value.args[0]
    if isinstance(inner, ast.Call) and returns_quotient(inner, module):
        return True
    if isinstance(inner, ast.List | ast.Tuple):
        if len(inner.elts) != 1:
            return False
        inner = inner.elts[0]
    if is_division(inner):
        return True
    if not isinstance(inner, ast.Name):
        return False
    if last_name(value.func) not in MAKES_TENSOR:
        return False
    statements = list(assignments(function, inner.id))
    return bool(statements) and is_division(statements[-1].value)


def loads_to_resume(file: SourceFile) -> Iterator[ast.Call]:
    """Yield the calls that load something under an `if` that asks whether to resume."""
    for condition in find_nodes(file.tree, ast.If):
        if "resume" in ast.unparse(condition.test).lower():
            yield from loads_in(condition)


def loads_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of `torch.load`, and of functions such as `load_checkpoint`."""
    for call in find_nodes(node, ast.Call):
        if LOADS.search(last_name(call.func)):
            yield call


def has_load(node: ast.AST) -> bool:
    return any(loads_in(node))


def resumes(file: SourceFile) -> bool:
    return any(loads_to_resume(file))
