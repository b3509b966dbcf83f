"""Patterns in source that dynamic rules ask for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stepladder.tools.check.tree import CodeFile, full_name, last_name


def keeping_line(file: CodeFile, line: int) -> int | None:
    """Where the loss of the backward pass at `line` is appended or added up with its graph, in the
    same file.
    """
    call = next(
        (c for c in file.calls("backward") if c.lineno <= line <= (c.end_lineno or c.lineno)), None
    )
    name = ast.unparse(call.func.value) if call and isinstance(call.func, ast.Attribute) else ""
    if not name:
        return None
    for node in ast.walk(file.function(call) if call else file.tree):
        if (
            isinstance(node, ast.AugAssign)
            and name in names_in(node.value)
            and not detached(node.value)
        ):
            return node.lineno
        if (
            isinstance(node, ast.Call)
            and last_name(node.func) in ("append", "extend", "add")
            and not detached(node)
        ) and any(name in names_in(arg) for arg in node.args):
            return node.lineno
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.BinOp)
            and name in names_in(node.value)
        ):
            target = ast.unparse(node.targets[0])
            if target in names_in(node.value) and target != name and not detached(node.value):
                return node.lineno
    return None


def names_in(node: ast.AST) -> set[str]:
    return {
        ast.unparse(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))
    }


def detached(node: ast.AST) -> bool:
    return any(
        word in ast.unparse(node)
        for word in (".item()", ".detach()", "float(", ".data", ".tolist()", ".cpu().numpy()")
    )


def batch_mean_lines(file: CodeFile) -> Iterator[tuple[int, int]]:
    """Loops that add up a mean per batch, by their line, with the line where the sum is divided by
    the batches.
    """
    for loop in ast.walk(file.tree):
        if not isinstance(loop, ast.For):
            continue
        sums = list(unweighted_sums(loop))
        if not sums:
            continue
        counters = set(counted(loop))
        for node in ast.walk(file.function(loop)):
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Div)
                and node.lineno > loop.lineno
            ):
                below = ast.unparse(node.right)
                batches = below.replace("max(1, ", "").replace("float(", "")
                left = ast.unparse(node.left).removesuffix(".item()")
                if left.startswith("sum(") and left[4:-1] in sums and below == f"len({left[4:-1]})":
                    yield loop.lineno, node.lineno
                if left in sums and (
                    batches.startswith(f"len({ast.unparse(loop_source(loop))}")
                    or batches.rstrip(")") in counters
                ):
                    yield loop.lineno, node.lineno
            if (
                isinstance(node, ast.Call)
                and last_name(node.func) in ("mean", "fmean")
                and node.lineno > loop.lineno
            ) and (
                any(ast.unparse(arg) in sums for arg in node.args)
                or any(f"({name})" in ast.unparse(node.func) for name in sums)
            ):
                yield loop.lineno, node.lineno


def loop_source(loop: ast.For) -> ast.expr:
    """What the loop goes over, without enumerate, tqdm and the like."""
    source = loop.iter
    while isinstance(source, ast.Call) and source.args:
        source = source.args[0]
    return source


def counted(loop: ast.For) -> Iterator[str]:
    """Names that grow by one in the loop."""
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.value, ast.Constant)
            and node.value.value == 1
        ):
            yield ast.unparse(node.target)


LOSSES = ("loss", "criterion", "cross_entropy", "mse", "nll", "bce", "l1", "mean()", "acc")


def unweighted_sums(loop: ast.For) -> Iterator[str]:
    """Names that a mean of each batch is added or appended to, without its size."""
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.Add)
            and is_mean(node.value, loop)
        ):
            yield ast.unparse(node.target)
        if (
            isinstance(node, ast.Call)
            and last_name(node.func) == "append"
            and len(node.args) == 1
            and is_mean(node.args[0], loop)
        ) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value)


def is_mean(value: ast.expr, loop: ast.For) -> bool:
    text = ast.unparse(value)
    if "sum" in text or any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult) for part in ast.walk(value)
    ):
        return False
    texts = [text]
    name = text.split(".")[0].removeprefix("float(").rstrip(")")
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and name in [
            ast.unparse(target) for target in node.targets
        ]:
            texts.append(ast.unparse(node.value))
    joined = " ".join(texts).lower()
    if "reduction='sum'" in joined or (
        ".sum()" in joined and ".mean()" not in joined and "/" not in joined
    ):
        return False
    return any(word in joined for word in LOSSES)


def reduced_quotients(file: CodeFile) -> Iterator[tuple[int, str]]:
    """Lines that reduce a tensor which was made from a quotient or a mean, in an evaluation's
    function.
    """
    for call in file.calls("all_reduce", "reduce"):
        if not call.args or (
            "dist" not in full_name(call.func) and last_name(call.func) != "all_reduce"
        ):
            continue
        name, function = ast.unparse(call.args[0]), file.function(call)
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Assign)
                and name in [ast.unparse(t) for t in node.targets]
                and node.lineno < call.lineno
            ) and is_quotient(node.value, function, file.tree):
                yield call.lineno, getattr(function, "name", "")


def local_quotients(file: CodeFile) -> Iterator[tuple[int, int, str]]:
    """A total of all ranks divided by one rank's count: lines of the reduction and of the quotient,
    and both.
    """
    for call in file.calls("all_reduce"):
        name = ast.unparse(call.args[0]) if call.args else ""
        if (
            not name
            or "AVG" in ast.unparse(call)
            or "MAX" in ast.unparse(call)
            or "MIN" in ast.unparse(call)
        ):
            continue
        function = file.function(call)
        reduced = {ast.unparse(c.args[0]) for c in file.calls("all_reduce") if c.args}
        counts = {
            name
            for loop in ast.walk(function)
            if isinstance(loop, ast.For)
            for name in counted_rows(loop)
        }
        for node in ast.walk(function):
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Div)
                and node.lineno > call.lineno
            ):
                left, below = (
                    ast.unparse(node.left).removesuffix(".item()"),
                    ast.unparse(node.right),
                )
                if (
                    left in (name, f"float({name})")
                    and below in counts
                    and not any(below in r for r in reduced)
                ):
                    said = f"{name} is summed over the ranks, and {below} is what this rank has counted"
                    yield call.lineno, node.lineno, said


def counted_rows(loop: ast.For) -> Iterator[str]:
    """Names that grow in the loop by the size of a batch."""
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            value = ast.unparse(node.value)
            if (
                value.startswith("len(")
                or ".size(" in value
                or ".numel()" in value
                or ".shape[" in value
            ):
                yield ast.unparse(node.target)


def returns_quotient(call: ast.Call, top: ast.Module) -> bool:
    """Of a function of the same file."""
    name = last_name(call.func)
    defined = [n for n in ast.walk(top) if isinstance(n, ast.FunctionDef) and n.name == name]
    returns = [n.value for one in defined for n in ast.walk(one) if isinstance(n, ast.Return)]
    return bool(returns) and all(
        isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) for value in returns
    )


def is_quotient(value: ast.expr, function: ast.AST, top: ast.Module) -> bool:
    """tensor(total / count), or tensor(mean) with mean = total / count before."""
    if not isinstance(value, ast.Call) or not value.args:
        return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)
    inner = value.args[0]
    if isinstance(inner, ast.Call) and returns_quotient(inner, top):
        return True
    if isinstance(inner, (ast.List, ast.Tuple)):
        if len(inner.elts) != 1:
            return False
        inner = inner.elts[0]
    if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div):
        return True
    if not isinstance(inner, ast.Name) or last_name(value.func) not in (
        "tensor",
        "as_tensor",
        "Tensor",
        "FloatTensor",
    ):
        return False
    assigned = [
        n.value
        for n in ast.walk(function)
        if isinstance(n, ast.Assign) and inner.id in [ast.unparse(t) for t in n.targets]
    ]
    return (
        bool(assigned)
        and isinstance(assigned[-1], ast.BinOp)
        and isinstance(assigned[-1].op, ast.Div)
    )
