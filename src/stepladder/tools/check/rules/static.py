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
    keyword_value,
    last_name,
)
from stepladder.tools.findings.finding import Finding, Location

DeviceChoice = Literal["", "constant", "by rank"]  # how an expression names a GPU

LIBRARIES = (
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "deepspeed",
    "transformers",
)
CHOOSES_DEVICES = ("Accelerator", "Fabric", "Trainer")
# Set by a script that starts its ranks in a way of its own, such as one in each container.
CHOOSES_RANK_OR_GPU = ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE")
MAKES_RANKS = ("init_process_group", "DistributedDataParallel", "spawn", "init_device_mesh")
ASKS_FOR_GPUS = ("is_available", "current_accelerator", "device_count", "is_nccl_available")
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
    if any(value_of_variable(node, name) for _, node in nodes for name in CHOOSES_RANK_OR_GPU):
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


def device_choice(node: ast.AST, source: ScriptSource) -> DeviceChoice:
    """Return how a call or a text chooses a GPU; empty where it chooses none."""
    if isinstance(node, ast.JoinedStr):
        has_variable = any(isinstance(part, ast.FormattedValue) for part in node.values)
        if has_variable and "cuda" in ast.unparse(node):
            return "by rank"
        return ""
    if not isinstance(node, ast.Call):
        return ""
    name = last_name(node.func)
    keywords = [word.value for word in node.keywords if word.arg in ("device", "index")]
    args: list[ast.expr] = [*node.args, *keywords]
    if name == "set_device" or (name == "cuda" and args):
        return constant_or_by_rank(args[0] if args else None)
    if name == "cuda" and isinstance(node.func, ast.Attribute):
        return "constant"
    if name == "device" and len(args) > 1 and constant_value(args[0]) == "cuda":
        return constant_or_by_rank(args[1])
    if name in ("device", "to") and args:
        return choice_of_device(args[0], source)
    return ""


def constant_or_by_rank(index: ast.expr | None) -> DeviceChoice:
    if isinstance(index, ast.Constant):
        return "constant"
    return "by rank"


def choice_of_device(device: ast.expr, source: ScriptSource) -> DeviceChoice:
    if isinstance(device, ast.IfExp):
        choices = [choice_of_device(each, source) for each in (device.body, device.orelse)]
        return "by rank" if "by rank" in choices else max(choices)
    if depends_on(device, RANK, source):
        return "by rank"
    if not names_cuda(device):
        return ""
    # "cuda:{}".format(rank), "cuda:%d" % rank, "cuda:" + str(rank)
    is_computed = isinstance(device, ast.Call | ast.BinOp)
    has_variable = any(isinstance(part, ast.Name) for part in ast.walk(device))
    return "by rank" if is_computed and has_variable else "constant"


def names_cuda(node: ast.expr) -> bool:
    return any(str(constant_value(part)).startswith("cuda") for part in ast.walk(node))


@source_rule("cuda-only")
def cuda_only(source: ScriptSource) -> Findings:
    """Find a script that needs a GPU and never asks whether there is one."""
    if source.calls(*ASKS_FOR_GPUS, *CHOOSES_DEVICES):
        return
    for file, call in source.calls("init_process_group"):
        backend = constant_value(resolve(file, argument(call, 0, "backend")))
        if "nccl" in str(backend):
            text = "the backend is nccl, and the script never asks whether there is a GPU"
            yield finding_at("cuda-only", file, call, text)
            return
    for file, node in source.nodes(ast.AST):
        if device_choice(node, source) and "cuda" in ast.unparse(node):
            text = f"{ast.unparse(node)[:50]}, and the script never asks whether there is a GPU"
            yield finding_at("cuda-only", file, node, text)
            return


@source_rule("set-epoch", static_only=True)
def set_epoch(source: ScriptSource) -> Findings:
    """Find a shuffling sampler in a loop over epochs that never gets the epoch, or a constant."""
    for file, call in source.calls("set_epoch"):
        if call.args and isinstance(call.args[0], ast.Constant):
            text = f"set_epoch({call.args[0].value!r}) in every epoch"
            yield finding_at("set-epoch", file, call, text)
            return
    if source.calls("set_epoch") or source.imports(*LIBRARIES):
        return
    has_epoch_loop = any(holds_loop(loop) for _, loop in source.nodes(ast.For))
    for file, call in source.calls("DistributedSampler"):
        shuffle = keyword_value(call, "shuffle")
        is_shuffled = shuffle is None or constant_value(shuffle) is True
        if has_epoch_loop and is_shuffled:
            text = "the sampler shuffles, and set_epoch is never called"
            yield finding_at("set-epoch", file, call, text)
            return


def holds_loop(loop: ast.For) -> bool:
    """Return whether a loop has another one in it, or calls a function that may."""
    return any(
        isinstance(node, ast.For | ast.Call) for part in loop.body for node in ast.walk(part)
    )


@source_rule("clip-scaled")
def clip_scaled(source: ScriptSource) -> Findings:
    """Find gradients that are clipped while they are scaled. A run on a CPU scales nothing."""
    scales_loss = source.calls("GradScaler") and source.calls("scale")
    if not scales_loss or source.calls("unscale_") or source.imports(*LIBRARIES):
        return
    for file, call in source.calls("clip_grad_norm_", "clip_grad_value_"):
        text = "a GradScaler scales the loss, and no file of the script calls unscale_"
        yield finding_at("clip-scaled", file, call, text)
        return
