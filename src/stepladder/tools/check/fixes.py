"""Fixes that are mechanical, as a patch of the user's own lines. No source is written."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import InputError
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
from stepladder.tools.check.rules.source_patterns import keeps_loss
from stepladder.tools.check.script_source import (
    SourceFile,
    constant_value,
    find_nodes,
    keyword_value,
    last_name,
    lines_of,
)
from stepladder.tools.findings.finding import Finding


@dataclass(frozen=True)
class Patch:
    """A patch, as text, and the findings that it fixes."""

    text: str
    fixed: tuple[Finding, ...]


def make_patch(findings: Iterable[Finding], folder: Path) -> Patch:
    """Return the patch for all findings whose fix is mechanical.

    Args:
        findings: The findings.
        folder: The folder to which the names of their files are relative.
    """
    by_file: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.rule in CALL_FIXES or finding.rule in STATEMENT_FIXES:
            by_file[finding.location.file].append(finding)
    texts: list[str] = []
    fixed: list[Finding] = []
    for name, findings_of_file in by_file.items():
        try:
            file = SourceFile.read(folder / name, name)
        except InputError:
            continue
        edits: Edits = []
        for finding in findings_of_file:
            fix = find_fix(file, finding)
            if fix and not any(overlap(new, old) for new in fix for old in edits):
                edits += fix
                fixed.append(finding)
        texts.append(format_diff(file, apply_edits(file.text, edits)))
    return Patch("".join(texts), tuple(fixed))


def find_fix(file: SourceFile, finding: Finding) -> Edits:
    """Return the edits that fix a finding; none if its line is not of a known form."""
    return next(filter(None, list_fixes(file, finding.rule, finding.location.line)), [])


def list_fixes(file: SourceFile, rule: str, line: int) -> Iterator[Edits]:
    """Yield the edits for each call that a line is part of, and each statement that it begins."""
    if rule in CALL_FIXES:
        for call in find_nodes(file.tree, ast.Call):
            if line in lines_of(call):
                yield CALL_FIXES[rule](file, call)
    if rule in STATEMENT_FIXES:
        for statement in find_nodes(file.tree, ast.stmt):
            if statement.lineno == line:
                yield STATEMENT_FIXES[rule](file, statement)


def set_epoch_number(file: SourceFile, call: ast.Call) -> Edits:
    """Give set_epoch the number of the epoch."""
    epoch = find_epoch_name(file, call)
    if last_name(call.func) == "set_epoch" and len(call.args) == 1 and epoch:
        return [replace_node(call.args[0], epoch)]
    return []


def call_set_epoch(file: SourceFile, loop: ast.stmt) -> Edits:
    """Call set_epoch before the loop over the loader."""
    epoch = find_epoch_name(file, loop)
    if not isinstance(loop, ast.For) or not epoch:
        return []
    loader = iterated_object(loop.iter)
    if not isinstance(loader, ast.Name | ast.Attribute):
        return []
    text = f"{ast.unparse(loader)}.sampler.set_epoch({epoch})"
    return [insert_before(file, loop.lineno, text)]


def find_epoch_name(file: SourceFile, node: ast.AST) -> str:
    """Return the variable of the loop over epochs around a node; empty where there is none."""
    for parent in file.parents_of(node):
        if isinstance(parent, ast.For) and isinstance(parent.target, ast.Name):
            if "epoch" in parent.target.id:
                return parent.target.id
        elif isinstance(parent, ast.FunctionDef):
            names = (argument.arg for argument in parent.args.args)
            return next((name for name in names if "epoch" in name and "epochs" not in name), "")
    return ""


def clear_gradients(file: SourceFile, call: ast.Call) -> Edits:
    """Call zero_grad after the optimizer's step."""
    statement = file.parents.get(call)
    if (
        last_name(call.func) != "step"
        or not isinstance(call.func, ast.Attribute)
        or not isinstance(statement, ast.Expr)
    ):
        return []
    optimizer = call.args[0] if call.args else call.func.value  # scaler.step(optimizer)
    return [insert_after(file, statement, f"{ast.unparse(optimizer)}.zero_grad()")]


def replace_after_save(file: SourceFile, call: ast.Call) -> Edits:
    """Write a snapshot under another name, and then rename it."""
    statement = file.parents.get(call)
    is_save = ast.unparse(call.func) == "torch.save" and len(call.args) == 2
    if not is_save or not isinstance(statement, ast.Expr):
        return []
    path = ast.unparse(call.args[1])
    temporary = f'str({path}) + ".tmp"'
    return [
        replace_node(call.args[1], temporary),
        insert_after(file, statement, f"os.replace({temporary}, {path})"),
        *import_os(file),
    ]


def import_os(file: SourceFile) -> Edits:
    """Import os before the other imports, if the file does not import it."""
    imports = [node for node in file.tree.body if isinstance(node, ast.Import)]
    if any(alias.name == "os" for node in imports for alias in node.names):
        return []
    imports_from = [node for node in file.tree.body if isinstance(node, ast.ImportFrom)]
    lines = [node.lineno for node in imports]
    lines += [node.lineno for node in imports_from if node.module != "__future__"]
    return [insert_before(file, min(lines, default=1), "import os")]


def load_weights_only(_file: SourceFile, call: ast.Call) -> Edits:
    """Load tensors, and no other objects, whose code would run."""
    value = keyword_value(call, "weights_only")
    if last_name(call.func) == "load" and value and constant_value(value) is False:
        return [replace_node(value, "True")]
    return []


def write_on_rank_0(file: SourceFile, call: ast.Call) -> Edits:
    """Ask for the rank in place of the local rank, around the line that writes."""
    conditions = (node for node in file.parents_of(call) if isinstance(node, ast.If))
    for condition in conditions:
        for comparison in find_nodes(condition.test, ast.Compare):
            if "local_rank" in ast.unparse(comparison.left).lower():
                module = find_distributed_name(file)
                return [replace_node(comparison.left, f"{module}.get_rank()")]
    return []


def find_distributed_name(file: SourceFile) -> str:
    """Return the name by which a file knows torch.distributed."""
    for node in find_nodes(file.tree, ast.Import):
        for alias in node.names:
            if alias.name == "torch.distributed" and alias.asname:
                return alias.asname
    return "torch.distributed"


def disable_gradients(file: SourceFile, call: ast.Call) -> Edits:
    """Put `@torch.no_grad()` on the function that evaluates, if it trains nothing."""
    function = file.enclosing_function(call)
    if not isinstance(function, ast.FunctionDef) or ".backward(" in ast.unparse(function):
        return []
    first = min([function.lineno, *(node.lineno for node in function.decorator_list)])
    return [insert_before(file, first, "@torch.no_grad()")]


def add_loss_as_number(_file: SourceFile, statement: ast.stmt) -> Edits:
    """Add a loss as a number, without its graph."""
    if not isinstance(statement, ast.AugAssign) or not isinstance(statement.value, ast.Name):
        return []
    if not keeps_loss(statement, statement.value.id):
        return []
    return [replace_node(statement.value, f"{statement.value.id}.item()")]


CALL_FIXES: dict[str, Callable[[SourceFile, ast.Call], Edits]] = {
    "set-epoch": set_epoch_number,
    "missing-zero-grad": clear_gradients,
    "in-place-snapshot": replace_after_save,
    "unsafe-load": load_weights_only,
    "many-writers": write_on_rank_0,
    "eval-keeps-graph": disable_gradients,
}
STATEMENT_FIXES: dict[str, Callable[[SourceFile, ast.stmt], Edits]] = {
    "set-epoch": call_set_epoch,
    "graph-kept": add_loss_as_number,
}
