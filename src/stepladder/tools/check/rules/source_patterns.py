"""Patterns in the source for which rules on recordings ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stepladder.tools.check.script_source import SourceFile, find_nodes, last_name, lines_of

DETACHES = (".item()", ".detach()", "float(", ".data", ".tolist()", ".cpu().numpy()")
COLLECTING_METHODS = ("append", "extend", "add")


def line_that_keeps_loss(file: SourceFile, line: int) -> int | None:
    """Return the line that stores a loss with its graph; None where there is none.

    Args:
        file: The file of the backward pass.
        line: A line of the call of `backward`.
    """
    backward = next((call for call in backward_calls(file) if line in lines_of(call)), None)
    if backward is None:
        return None
    assert isinstance(backward.func, ast.Attribute)
    loss = ast.unparse(backward.func.value)
    for node in ast.walk(file.enclosing_function(backward)):
        if keeps_loss(node, loss):
            return getattr(node, "lineno", None)
    return None


def backward_calls(file: SourceFile) -> Iterator[ast.Call]:
    for call in find_nodes(file.tree, ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            yield call


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
    calls = [call for call in backward_calls(file) if file.enclosing_function(call) is scope]
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


def prints_its_arguments(file: SourceFile, line: int) -> bool:
    """Return whether a line prints arguments of its function, and nothing that this computes."""
    for call in find_nodes(file.tree, ast.Call):
        function = file.enclosing_function(call)
        if line not in lines_of(call) or not isinstance(function, ast.FunctionDef):
            continue
        arguments = {node.arg for node in find_nodes(function.args, ast.arg)}
        computed = {
            node.id for node in find_nodes(function, ast.Name) if isinstance(node.ctx, ast.Store)
        }
        names = variables_in(*call.args)
        if names & arguments and not names & computed:
            return True
    return False
