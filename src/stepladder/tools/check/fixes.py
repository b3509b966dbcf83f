"""Fixes that are mechanical, as a patch of the user's own lines. No source is written."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.python_file import parse_source
from stepladder.tools.check.edits import (
    Edits,
    apply_edits,
    format_diff,
    insert_after,
    insert_before,
    overlap,
    replace_node,
)
from stepladder.tools.check.rules.batch_means import iterated_object
from stepladder.tools.check.rules.source_patterns import is_on_line, keeps_loss
from stepladder.tools.check.script_source import (
    Node,
    SourceFile,
    constant_value,
    find_nodes,
    keyword_value,
    last_name,
)
from stepladder.tools.findings.finding import Finding

Fix = Callable[[SourceFile, int], Edits]


@dataclass(frozen=True)
class Patch:
    """A patch, as text, and the findings that it mends."""

    text: str
    fixed: tuple[Finding, ...]


def make_patch(
    findings: Iterable[Finding],
    folder: Path,
) -> Patch:
    """Return the patch for all findings whose fix is mechanical.

    Args:
        findings: The findings.
        folder: The folder to which the names of their files are relative.
    """
    by_file: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.rule in FIXES:
            by_file[finding.location.file].append(finding)
    texts: list[str] = []
    fixed: list[Finding] = []
    for name, of_file in by_file.items():
        file = read_file(folder / name, name)
        if file is not None:
            edits = mend(
                file,
                of_file,
                fixed,
            )
            texts.append(format_diff(file, apply_edits(file.text, edits)))
    return Patch("".join(texts), tuple(fixed))


def mend(
    file: SourceFile,
    findings: list[Finding],
    fixed: list[Finding],
) -> Edits:
    """Return the edits of one file, and add the findings that they mend to a list."""
    edits: Edits = []
    for finding in findings:
        fix = FIXES[finding.rule]
        of_finding = fix(file, finding.location.line)
        if of_finding and not any(overlap(new, old) for new in of_finding for old in edits):
            edits += of_finding
            fixed.append(finding)
    return edits


def read_file(
    path: Path,
    name: str,
) -> SourceFile | None:
    try:
        tree = parse_source(path)
    except InputError:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    return SourceFile(
        path,
        name,
        tree,
        text,
    )


def nodes_on_line(
    file: SourceFile,
    kind: type[Node],
    line: int,
) -> list[Node]:
    nodes = find_nodes(file.tree, kind)
    return [node for node in nodes if is_on_line(node, line)]  # type: ignore[arg-type]


def statement_of(
    file: SourceFile,
    node: ast.AST,
) -> ast.stmt | None:
    """Return the statement that is an expression alone, if it is this one."""
    parent = file.parents.get(node)
    return parent if isinstance(parent, ast.Expr) else None


def tell_epoch(
    file: SourceFile,
    line: int,
) -> Edits:
    """Give set_epoch the number of the epoch, or call it before the loop over the loader."""
    for call in nodes_on_line(
        file,
        ast.Call,
        line,
    ):
        epoch = epoch_name(file, call)
        if last_name(call.func) == "set_epoch" and len(call.args) == 1 and epoch:
            return [replace_node(call.args[0], epoch)]
    for loop in find_nodes(file.tree, ast.For):
        epoch = epoch_name(file, loop)
        loader = iterated_object(loop.iter)
        if loop.lineno == line and epoch and isinstance(loader, ast.Name | ast.Attribute):
            text = f"{ast.unparse(loader)}.sampler.set_epoch({epoch})"
            return [
                insert_before(
                    file,
                    line,
                    text,
                )
            ]
    return []


def epoch_name(
    file: SourceFile,
    node: ast.AST,
) -> str:
    """Return the variable of the loop over epochs around a node; empty where there is none."""
    while node in file.parents:
        node = file.parents[node]
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            if "epoch" in node.target.id:
                return node.target.id
        elif isinstance(node, ast.FunctionDef):
            names = (argument.arg for argument in node.args.args)
            return next((name for name in names if "epoch" in name and "epochs" not in name), "")
    return ""


def clear_gradients(
    file: SourceFile,
    line: int,
) -> Edits:
    for call in nodes_on_line(
        file,
        ast.Call,
        line,
    ):
        statement = statement_of(file, call)
        if (
            last_name(call.func) != "step"
            or not isinstance(call.func, ast.Attribute)
            or not statement
        ):
            continue
        optimizer = call.args[0] if call.args else call.func.value  # scaler.step(optimizer)
        return [
            insert_after(
                file,
                statement,
                f"{ast.unparse(optimizer)}.zero_grad()",
            )
        ]
    return []


def save_beside(
    file: SourceFile,
    line: int,
) -> Edits:
    """Write a snapshot under another name, and then rename it."""
    for call in nodes_on_line(
        file,
        ast.Call,
        line,
    ):
        statement = statement_of(file, call)
        if ast.unparse(call.func) == "torch.save" and len(call.args) == 2 and statement:
            path = ast.unparse(call.args[1])
            temporary = f'str({path}) + ".tmp"'
            return [
                replace_node(call.args[1], temporary),
                insert_after(
                    file,
                    statement,
                    f"os.replace({temporary}, {path})",
                ),
                *import_os(file),
            ]
    return []


def import_os(file: SourceFile) -> Edits:
    imports = [node for node in file.tree.body if isinstance(node, ast.Import)]
    if any(alias.name == "os" for node in imports for alias in node.names):
        return []
    others = [node for node in file.tree.body if isinstance(node, ast.ImportFrom)]
    ordinary = [node for node in others if node.module != "__future__"]
    first = min((node.lineno for node in [*imports, *ordinary]), default=1)
    return [
        insert_before(
            file,
            first,
            "import os",
        )
    ]


def load_weights_only(
    file: SourceFile,
    line: int,
) -> Edits:
    for call in nodes_on_line(
        file,
        ast.Call,
        line,
    ):
        value = keyword_value(call, "weights_only")
        if last_name(call.func) == "load" and value and constant_value(value) is False:
            return [replace_node(value, "True")]
    return []


def write_on_rank_0(
    file: SourceFile,
    line: int,
) -> Edits:
    """Ask for the rank in place of the local rank, around the line that writes."""
    for call in nodes_on_line(
        file,
        ast.Call,
        line,
    ):
        node: ast.AST = call
        while node in file.parents and not isinstance(node, ast.FunctionDef):
            node = file.parents[node]
            comparisons = find_nodes(node.test, ast.Compare) if isinstance(node, ast.If) else ()
            for comparison in comparisons:
                if "local_rank" in ast.unparse(comparison.left).lower():
                    return [replace_node(comparison.left, f"{distributed_name(file)}.get_rank()")]
    return []


def distributed_name(file: SourceFile) -> str:
    """Return under which name a file knows torch.distributed."""
    for node in find_nodes(file.tree, ast.Import):
        for alias in node.names:
            if alias.name == "torch.distributed" and alias.asname:
                return alias.asname
    return "torch.distributed"


def keep_no_graph(
    file: SourceFile,
    line: int,
) -> Edits:
    """Put `@torch.no_grad()` on the function that evaluates, if it trains nothing."""
    for call in nodes_on_line(
        file,
        ast.Call,
        line,
    )[:1]:
        function = file.enclosing_function(call)
        if isinstance(function, ast.FunctionDef) and ".backward(" not in ast.unparse(function):
            first = min([function.lineno, *(node.lineno for node in function.decorator_list)])
            return [
                insert_before(
                    file,
                    first,
                    "@torch.no_grad()",
                )
            ]
    return []


def keep_number(
    file: SourceFile,
    line: int,
) -> Edits:
    """Add a loss as a number, without its graph."""
    for node in find_nodes(file.tree, ast.AugAssign):
        is_loss = isinstance(node.value, ast.Name) and keeps_loss(node, node.value.id)
        if node.lineno == line and is_loss:
            return [replace_node(node.value, f"{ast.unparse(node.value)}.item()")]
    return []


FIXES: dict[str, Fix] = {
    "set-epoch": tell_epoch,
    "missing-zero-grad": clear_gradients,
    "in-place-snapshot": save_beside,
    "unsafe-load": load_weights_only,
    "many-writers": write_on_rank_0,
    "eval-keeps-graph": keep_no_graph,
    "graph-kept": keep_number,
}
