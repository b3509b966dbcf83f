"""Rules that examine the source alone, without a run."""

from __future__ import annotations

import ast
import re
from typing import Literal

from stepladder.tools.check.rules.evidence import CHECK_TEXTS, Findings, source_rule
from stepladder.tools.check.rules.rank_values import RANK, depends_on
from stepladder.tools.check.script_source import (
    ScriptSource,
    SourceFile,
    constant_value,
    find_nodes,
    keyword_value,
    last_name,
)
from stepladder.tools.findings.finding import Finding, Location

DeviceChoice = Literal["", "constant", "by rank"]  # how an expression names a GPU

CHOOSES_DEVICES = ("Accelerator", "Fabric", "Trainer")
# Set by a script that starts its ranks in a way of its own, such as one in each container.
CHOOSES_RANK_OR_GPU = ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE")
MAKES_RANKS = (
    "init_process_group",
    "DistributedDataParallel",
    "spawn",
    "start_processes",
    "init_device_mesh",
)
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


@source_rule("device-per-rank")
def device_per_rank(source: ScriptSource) -> Findings:
    """Find a GPU by a constant name, where no GPU is chosen by the rank."""
    if source.calls(*CHOOSES_DEVICES) or not source.calls(*MAKES_RANKS):
        return
    nodes = list(source.nodes(ast.AST))
    if any(chooses_rank_or_gpu(node) for _, node in nodes):
        return
    choices = [(file, node, device_choice(node, source)) for file, node in nodes]
    if any(choice == "by rank" for _, _, choice in choices):
        return
    for file, node, choice in choices:
        if choice == "constant":
            text = (
                f"{ast.unparse(node)[:60]} on every rank, and no set_device: all ranks of a node "
                f"use GPU 0"
            )
            yield finding_at("device-per-rank", file, node, text)
            return


def chooses_rank_or_gpu(node: ast.AST) -> bool:
    return any(value_of_variable(node, name) for name in CHOOSES_RANK_OR_GPU)


def device_choice(node: ast.AST, source: ScriptSource) -> DeviceChoice:
    """Return how a call or a text chooses a GPU; empty where it chooses none."""
    if isinstance(node, ast.JoinedStr):
        has_variable = any(isinstance(part, ast.FormattedValue) for part in node.values)
        return "by rank" if has_variable and names_cuda(node) else ""
    name = last_name(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or name not in ("set_device", "cuda", "device", "to"):
        return ""
    keywords = [word.value for word in node.keywords if word.arg in ("device", "index")]
    args = [*node.args, *keywords]
    takes_number = name in ("set_device", "cuda")
    numbers: list[ast.expr] = []
    if takes_number:
        numbers = args
    elif name == "device":
        numbers = args[1:]
    devices: list[ast.expr] = []
    if args and not takes_number:
        devices = choices_of(args[0])
    is_by_rank = any(is_computed_name(device) for device in devices)
    is_by_rank |= any(depends_on(device, RANK, source) for device in devices)
    if is_by_rank or not all(isinstance(number, ast.Constant) for number in numbers):
        return "by rank"
    is_gpu = takes_number or any(map(names_cuda, devices))
    return "constant" if is_gpu else ""


def choices_of(device: ast.expr) -> list[ast.expr]:
    return [device.body, device.orelse] if isinstance(device, ast.IfExp) else [device]


def is_computed_name(device: ast.expr) -> bool:
    """Return whether it is `"cuda:%d" % rank`, or another text that is made of a variable."""
    has_variable = any(find_nodes(device, ast.Name))
    return isinstance(device, ast.Call | ast.BinOp) and has_variable and names_cuda(device)


def names_cuda(node: ast.expr) -> bool:
    return any(str(constant_value(part)).startswith("cuda") for part in ast.walk(node))


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
