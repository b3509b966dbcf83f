"""What can be said from the source alone, without a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from stepladder.tools.check.finding import CodeLine, Fault
from stepladder.tools.check.rules.scaling import LIBRARIES, unscaled_batch
from stepladder.tools.check.tree import Code, CodeFile, constant, full_name, keyword, last_name


def fixed_port(source: Code) -> Iterator[Fault]:
    for file in source.files:
        for node in ast.walk(file.tree):
            at, port = getattr(node, "lineno", 1), constant(resolved(file, assigned_port(node)))
            if isinstance(node, ast.Call) and last_name(node.func) == "init_process_group":
                method = keyword(node, "init_method") or (
                    node.args[1] if len(node.args) > 1 else None
                )
                text = constant(resolved(file, method))
                found = re.search(r"tcp://[^:]*:(\d+)", text) if isinstance(text, str) else None
                port, at = found[1] if found else None, getattr(method, "lineno", at)
            if port and str(port).isdigit() and int(str(port)):
                yield Fault(
                    "fixed-port", CodeLine(file.name, at), f"port {port} is written into the script"
                )
                return


def assigned_port(node: ast.AST) -> ast.expr | None:
    """What os.environ["MASTER_PORT"] is set to."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
        if constant(target.slice) == "MASTER_PORT" and "environ" in full_name(target.value):
            return node.value
    if (
        isinstance(node, ast.Call)
        and last_name(node.func) == "update"
        and "environ" in full_name(node.func)
    ):
        for part in node.args:
            if isinstance(part, ast.Dict):
                return next(
                    (
                        v
                        for k, v in zip(part.keys, part.values, strict=True)
                        if constant(k) == "MASTER_PORT"
                    ),
                    None,
                )
        return keyword(node, "MASTER_PORT")
    return None


def resolved(file: CodeFile, node: ast.expr | None) -> ast.expr | None:
    """A constant behind str() or a name that is set once, at the top of the file."""
    if isinstance(node, ast.Call) and last_name(node.func) == "str" and node.args:
        node = node.args[0]
    if isinstance(node, ast.JoinedStr) and all(
        isinstance(part, ast.Constant) for part in node.values
    ):
        return ast.Constant("".join(str(constant(part)) for part in node.values))
    if isinstance(node, ast.Name):
        for one in file.tree.body:
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == node.id:
                return one.value
    return node


def unsafe_load(source: Code) -> Iterator[Fault]:
    for file, call in source.calls("load"):
        name = full_name(call.func)
        if name == "torch.load" and constant(keyword(call, "weights_only")) is False:
            yield Fault(
                "unsafe-load",
                CodeLine(file.name, call.lineno),
                "torch.load with weights_only=False",
            )
        elif name in ("pickle.load", "cPickle.load", "dill.load", "joblib.load") and of_snapshot(
            file, call
        ):
            yield Fault("unsafe-load", CodeLine(file.name, call.lineno), f"{name} of a snapshot")


def of_snapshot(file: CodeFile, call: ast.Call) -> bool:
    function = file.function(call)
    text = ast.unparse(function) if not isinstance(function, ast.Module) else ast.unparse(call)
    return any(
        word in text.lower()
        for word in ("snapshot", "checkpoint", "ckpt", "resume", "load_state_dict", "state_dict")
    )


def device_per_rank(source: Code) -> Iterator[Fault]:
    """A GPU by a constant name, and nowhere a number that could depend on the rank."""
    if source.has("CUDA_VISIBLE_DEVICES", "Accelerator(", "Fabric(", "lightning"):
        return
    first: tuple[CodeFile, ast.AST] | None = None
    for file in source.files:
        for node in ast.walk(file.tree):
            kind = device_kind(node)
            if kind == "by rank":
                return
            if kind == "constant" and first is None:
                first = file, node
    if first and source.has("init_process_group", "RANK", "DistributedDataParallel", "mp.spawn"):
        file, node = first
        yield Fault(
            "device-per-rank",
            CodeLine(file.name, getattr(node, "lineno", 1)),
            f"{ast.unparse(node)[:60]} on every rank, and no set_device: all ranks of a node use GPU 0",
        )


def device_kind(node: ast.AST) -> str:
    """Whether a call or a text names a GPU, and by what."""
    if isinstance(node, ast.JoinedStr):
        return (
            "by rank"
            if "cuda" in ast.unparse(node)
            and any(isinstance(v, ast.FormattedValue) for v in node.values)
            else ""
        )
    if not isinstance(node, ast.Call):
        return ""
    name, args = (
        last_name(node.func),
        [*node.args, *(k.value for k in node.keywords if k.arg in ("device", "index"))],
    )
    if name == "set_device" or (name == "cuda" and args):
        return "constant" if args and isinstance(args[0], ast.Constant) else "by rank"
    if name == "cuda" and isinstance(node.func, ast.Attribute) and not args:
        return "constant"
    if name == "device" and args:
        if len(args) > 1 and constant(args[0]) == "cuda":
            return "constant" if isinstance(args[1], ast.Constant) else "by rank"
        return (
            "constant"
            if names_cuda(args[0])
            else "by rank"
            if isinstance(args[0], ast.Name) and "rank" in args[0].id
            else ""
        )
    if name == "to" and args:
        if isinstance(args[0], ast.Name) and "rank" in args[0].id:
            return "by rank"
        return "constant" if names_cuda(args[0]) else ""
    return ""


def names_cuda(node: ast.expr) -> bool:
    return any(
        str(constant(part)).startswith("cuda")
        for part in ast.walk(node)
        if isinstance(part, ast.Constant)
    )


def cuda_only(source: Code) -> Iterator[Fault]:
    """Without any way for a CPU: nobody asks whether there is a GPU."""
    if source.has(
        "is_available",
        "gloo",
        "--device",
        "--backend",
        "Accelerator(",
        "Fabric(",
        "device_count() ",
        "args.device",
    ):
        return
    for file in source.files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and last_name(node.func) == "init_process_group":
                backend = keyword(node, "backend") or (node.args[0] if node.args else None)
                if "nccl" in str(constant(resolved(file, backend))):
                    yield Fault(
                        "cuda-only",
                        CodeLine(file.name, node.lineno),
                        "the backend is nccl, and the script never asks whether there is a GPU",
                    )
                    return
    for file in source.files:
        for node in ast.walk(file.tree):
            if device_kind(node) and "cuda" in ast.unparse(node):
                yield Fault(
                    "cuda-only",
                    CodeLine(file.name, getattr(node, "lineno", 1)),
                    f"{ast.unparse(node)[:50]}, and the script never asks whether there is a GPU",
                )
                return


def no_destroy(source: Code) -> Iterator[Fault]:
    if source.has("destroy_process_group"):
        return
    for file, call in source.calls("init_process_group"):
        yield Fault(
            "no-destroy",
            CodeLine(file.name, call.lineno),
            "the group is made, and no file of the script calls destroy_process_group",
        )
        return


def set_epoch(source: Code) -> Iterator[Fault]:
    """A constant, or never, where there is a loop over epochs and a sampler that shuffles."""
    for file, call in source.calls("set_epoch"):
        if call.args and isinstance(call.args[0], ast.Constant):
            yield Fault(
                "set-epoch",
                CodeLine(file.name, call.lineno),
                f"set_epoch({call.args[0].value!r}) in every epoch",
            )
            return
    if source.has("set_epoch") or source.imports(*LIBRARIES):
        return
    for file, call in source.calls("DistributedSampler"):
        shuffled = keyword(call, "shuffle")
        loops = source.has(" in range(") and source.has("epoch")
        if loops and (shuffled is None or constant(shuffled) is True):
            said = "the sampler shuffles, and set_epoch is never called"
            yield Fault("set-epoch", CodeLine(file.name, call.lineno), said)
            return


def clip_scaled(source: Code) -> Iterator[Fault]:
    """On a CPU nothing is scaled, so a run shows nothing."""
    if not (source.has("GradScaler") and source.has(".scale(")) or source.has("unscale_"):
        return
    if source.imports(*LIBRARIES):
        return
    for file, call in source.calls("clip_grad_norm_", "clip_grad_value_"):
        said = "a GradScaler scales the loss, and no file of the script calls unscale_"
        yield Fault("clip-scaled", CodeLine(file.name, call.lineno), said)
        return


STATIC = (
    fixed_port,
    unsafe_load,
    device_per_rank,
    cuda_only,
    no_destroy,
    set_epoch,
    unscaled_batch,
    clip_scaled,
)
# a run has nothing to add to these
ALWAYS = (fixed_port, unsafe_load, device_per_rank, cuda_only, unscaled_batch, clip_scaled)


def judge_static(source: Code, only: tuple[object, ...] = STATIC) -> list[Fault]:
    return [fault for rule in STATIC if rule in only for fault in rule(source)]
