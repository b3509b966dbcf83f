"""Rules that examine the source alone, without a run."""

from __future__ import annotations

import ast
import re

from stepladder.tools.check.rules.evidence import CHECK_TEXTS, Findings, source_rule
from stepladder.tools.check.script_source import (
    ScriptSource,
    SourceFile,
    constant_value,
    keyword_value,
    last_name,
)
from stepladder.tools.findings.finding import Finding, Location

TCP_PORT = re.compile(r"tcp://[^:]*:(\d+)")


def finding_at(rule: str, file: SourceFile, node: ast.AST, evidence: str) -> Finding:
    location = Location(file.name, getattr(node, "lineno", 1))
    return CHECK_TEXTS.finding(rule, location, evidence)


def argument(call: ast.Call, index: int, name: str) -> ast.expr | None:
    """Return an argument of a call that is passed by keyword or by position."""
    by_position = call.args[index] if len(call.args) > index else None
    return keyword_value(call, name) or by_position


@source_rule("fixed-port")
def fixed_port(source: ScriptSource) -> Findings:
    """Find a port that is written into the script."""
    groups = [call for _, call in source.calls("init_process_group")]
    for file, node in source.nodes(ast.AST):
        line = node
        port = constant_value(resolve(file, value_of_variable(node, "MASTER_PORT")))
        if isinstance(node, ast.Call) and node in groups:
            method = argument(node, 1, "init_method")
            port = port_of_url(constant_value(resolve(file, method)))
            line = method or node
        if port and str(port).isdigit() and int(str(port)):
            text = f"port {port} is written into the script"
            yield finding_at("fixed-port", file, line, text)
            return


def port_of_url(url: object) -> str | None:
    match = TCP_PORT.search(url) if isinstance(url, str) else None
    return match[1] if match else None


def value_of_variable(node: ast.AST, name: str) -> ast.expr | None:
    """Return what os.environ[name] is set to by a statement or by `update`."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return node.value if constant_value(node.targets[0].slice) == name else None
    if not isinstance(node, ast.Call) or last_name(node.func) != "update":
        return None
    for table in node.args:
        if isinstance(table, ast.Dict):
            items = zip(table.keys, table.values, strict=True)
            return next((value for key, value in items if constant_value(key) == name), None)
    return keyword_value(node, name)


def resolve(file: SourceFile, node: ast.expr | None) -> ast.expr | None:
    """Return the constant behind `str(...)`, an f-string, or a name set at the top of the file."""
    if isinstance(node, ast.Call) and last_name(node.func) == "str" and node.args:
        node = node.args[0]
    if isinstance(node, ast.JoinedStr):
        if all(isinstance(part, ast.Constant) for part in node.values):
            return ast.Constant("".join(str(constant_value(part)) for part in node.values))
    elif isinstance(node, ast.Name):
        for statement in file.tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id:
                return statement.value
    return node


@source_rule("unsafe-load")
def unsafe_load(source: ScriptSource) -> Findings:
    """Find loads that run code from the file."""
    for file, call in source.calls("load"):
        weights_only = constant_value(keyword_value(call, "weights_only"))
        if file.qualified_name(call.func) == "torch.load" and weights_only is False:
            yield finding_at("unsafe-load", file, call, "torch.load with weights_only=False")


@source_rule("clip-scaled")
def clip_scaled(source: ScriptSource) -> Findings:
    """Find gradients that are clipped while they are scaled. A run on a CPU scales nothing."""
    scales_loss = source.calls("GradScaler") and source.calls("scale")
    if not scales_loss or source.calls("unscale_"):
        return
    for file, call in source.calls("clip_grad_norm_", "clip_grad_value_"):
        text = "a GradScaler scales the loss, and no file of the script calls unscale_"
        yield finding_at("clip-scaled", file, call, text)
        return
