"""Hooks that record calls of complete models, their wrappers and moves, and what they load."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepladder.tools.check.events import (
    Digests,
    EvalMode,
    Forward,
    ModelDivided,
    ModelMoved,
    Sharding,
    StateDictLoad,
    WrapperBuilt,
    ZeroGrad,
)
from stepladder.tools.check.probe import digests, pause
from stepladder.tools.check.probe.layer_outputs import layer_outputs
from stepladder.tools.check.probe.patching import (
    Fields,
    NestingDepth,
    WrappedCall,
    default_on_error,
    record_calls,
    record_user_calls,
    recorder,
    wrap,
    wrap_after_import,
)
from stepladder.tools.check.probe.probe_log import record

FSDP = "torch.distributed.fsdp"
# What divides a model among the ranks: a module, and a function of it.
DIVISIONS = {
    "torch.distributed.tensor.parallel": "parallelize_module",
    "torch.distributed.pipelining": "PipelineStage.__init__",
}
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
SHARDING_CLASSES = ("FSDPModule",)
CALLS_RECORDED_FULLY = 40  # of models with a gradient; later ones only now and then
CALLS_PER_FULL_RECORD = 16
MAX_RECORDED_ROWS = 64
MOVING_METHODS = ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type")


class CalledModels(NestingDepth):
    """The models that the script has called, not from within another module."""

    def __init__(self) -> None:
        super().__init__()  # the depth is that of modules whose call is running
        self.models: dict[int, Any] = {}  # by id
        self.names: dict[int, str] = {}  # of parameters, by id
        self.calls = 0  # for a gradient
        self.last_evaluated = 0  # the id of the last model, if its call kept no graph
        self.rows = 0  # with which models were called for a gradient, until they are taken

    def register(self, module: Any) -> None:
        """Remember a model, and its parameters by the names that they have without wrappers."""
        self.models[id(module)] = module
        is_wrapper = type(module).__name__ in WRAPPERS
        for name, parameter in module.named_parameters():
            name_in_model = name.replace("module.", "", 1) if is_wrapper else name
            self.names.setdefault(id(parameter), name_in_model.replace("_orig_mod.", ""))

    def is_registered(self, module: Any) -> bool:
        return self.models.get(id(module)) is module

    def begin_call(self, module: Any, keeps_graph: bool) -> bool:
        """Count a call, and return whether it is the first evaluation of a model after others."""
        self.calls += keeps_graph
        is_first_evaluation = not keeps_graph and self.last_evaluated != id(module)
        self.last_evaluated = 0 if keeps_graph else id(module)
        return is_first_evaluation

    def add_rows(self, rows: int) -> None:
        self.rows += rows

    def take_rows(self) -> int:
        """Return the rows of the calls that kept a graph since they were taken last."""
        rows = self.rows
        self.rows = 0
        return rows

    @property
    def shards(self) -> bool:
        """Whether a wrapper cuts a model into shards, and gathers them for each call."""
        return any(map(kind_of_wrapper, self.models.values()))

    def parameters(self) -> Iterator[Any]:
        for model in list(self.models.values()):
            yield from model.parameters()


called_models = CalledModels()
wrapped_parameters: set[int] = set()  # ids of those of wrapped models
# The devices that the script asks for, by the id of a parameter. Simulated GPUs are the CPU: only
# the script's own calls say where a parameter should be.
requested_devices: dict[int, str] = {}
running_sharding = NestingDepth()


def attach() -> None:
    wrap_module_calls("__call__")
    wrap(DistributedDataParallel, "__init__", record_wrapper)
    record_wrapped_shards = functools.partial(record_sharding, 1)
    constructor = "FullyShardedDataParallel.__init__"
    wrap_after_import(f"{FSDP}.fully_sharded_data_parallel", constructor, record_wrapped_shards)
    record_shards = functools.partial(record_sharding, 0)
    wrap_after_import(f"{FSDP}._fully_shard._fully_shard", "fully_shard", record_shards)
    for module, function in DIVISIONS.items():
        wrap_after_import(module, function, recorder(lambda _: ModelDivided()))
    wrap(nn.Module, "to_empty", fill_empty)
    for name in MOVING_METHODS:
        wrap(nn.Module, name, functools.partial(record_move, name))
    record_calls(nn.Module, "load_state_dict", load_event)
    record_user_calls(nn.Module, "eval", lambda _: EvalMode())
    record_user_calls(nn.Module, "zero_grad", lambda _: ZeroGrad(optimizer=-1))


def wrap_module_calls(name: str) -> None:
    """Wrap the call of modules, by a function of its own code.

    torch's profiler knows it by its code, and reads the local variable `self` of each of its
    frames: it crashes where the code is that of other wrappers too, which have no `self`.
    """
    original = getattr(nn.Module, name)

    @functools.wraps(original)
    def call_module(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(original, self, *args, **kwargs)

    setattr(nn.Module, name, call_module)


def call(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    # What the probe computes of the inputs would become a part of the trace.
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if called_models.depth or is_traced:
        result = original(module, *args, **kwargs)
        if not is_traced and not torch.compiler.is_compiling():
            layer_outputs.add(module, result)
        return result
    with called_models:
        if not called_models.is_registered(module):
            called_models.register(module)
        if next(module.parameters(), None) is not None:  # else it is a loss, or a transform
            layer_outputs.begin(module, [args, kwargs])
            record_forward(module, args, kwargs)
        return original(module, *args, **kwargs)


def name_of(parameter: Any) -> str:
    """Return the name of a parameter in its model; empty where no called model has it."""
    if id(parameter) not in called_models.names:
        for model in list(called_models.models.values()):
            called_models.register(model)
    return called_models.names.get(id(parameter), "")


def record_forward(module: Any, args: Any, kwargs: Any) -> None:
    keeps_graph = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    is_first_evaluation = called_models.begin_call(module, keeps_graph)
    calls = called_models.calls
    fields: Fields = {
        "root": id(module),
        "model_class": type(module).__name__,
        "grad": keeps_graph,
        "size": digests.row_count([args, kwargs]),
        "wrapped": kind_of_wrapper(module),
    }
    if keeps_graph:
        called_models.add_rows(fields["size"])
    is_recorded_fully = calls <= CALLS_RECORDED_FULLY or calls % CALLS_PER_FULL_RECORD == 0
    if keeps_graph and is_recorded_fully:
        fields["rows"] = digests.row_digests([args, kwargs])[:MAX_RECORDED_ROWS]
        fields["sums"] = digests.row_sums([args, kwargs])
        fields |= count_layers_with_modes(module)
        if fields.get("drops"):
            fields["random"] = digests.generator_state(torch.default_generator)
    if is_first_evaluation:
        fields |= count_layers_with_modes(module)
        fields["weights"] = digests.model_digest(module)
    if isinstance(module, DistributedDataParallel):
        fields["sync"] = module.require_backward_grad_sync
    record(Forward(**fields))
    if not keeps_graph:
        pause.pause_at("evaluation")


def kind_of_wrapper(module: Any) -> str:
    """Return the class of the wrapper that averages a model's gradients; empty without one.

    One that cuts the model into shards for a single rank averages nothing.
    """
    classes = (cls.__name__ for cls in type(module).__mro__)
    name = next((name for name in classes if name in WRAPPERS + SHARDING_CLASSES), "")
    if name in SHARDING_CLASSES and is_of_one_rank(module):
        return ""
    return name


@default_on_error(bool)
def is_of_one_rank(module: Any) -> bool:
    """Return whether all parameters are distributed over a mesh of one rank."""
    meshes = [getattr(parameter, "device_mesh", None) for parameter in module.parameters()]
    return bool(meshes) and all(mesh is not None and mesh.size() == 1 for mesh in meshes)


@default_on_error(dict)
def count_layers_with_modes(module: Any) -> Fields:
    """Count the layers that differ in training and evaluation: dropout and batch norm."""
    dropouts = []
    norms = []
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            norms.append(layer)
        elif isinstance(layer, nn.modules.dropout._DropoutNd):
            dropouts.append(layer)
    training_norms = [norm for norm in norms if norm.training]
    training_dropouts = [dropout for dropout in dropouts if dropout.training]
    active_dropouts = [d for d in training_dropouts if getattr(d, "p", 0) > 0]
    local_norms = [
        norm
        for norm in training_norms
        if norm.track_running_stats and not isinstance(norm, nn.SyncBatchNorm)
    ]
    # A mean over all batches of a pass, and no moving one: the pass only measures statistics.
    only_measures = any(norm.momentum is None for norm in training_norms)
    live = 0
    if not only_measures:
        live = len(training_norms) + len(active_dropouts)
    return {
        "live": live,
        "moded": len(norms) + len(dropouts),
        "moded_on": len(training_norms) + len(training_dropouts),
        "norms": len(local_norms),
        "drops": len(active_dropouts),
    }


def record_wrapper(call: WrappedCall) -> Any:
    wrapper = call.args[0]
    module = call.argument(1, "module")
    inner = (type(part).__name__ for part in module.modules() if kind_of_wrapper(part))
    nested = next(inner, "")
    result = call.run()
    called_models.register(wrapper)
    wrapped_parameters.update(map(id, wrapper.parameters()))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    record(
        WrapperBuilt(
            parameters={name_of(p): [id(p), digests.digest(p)] for p in trained},
            buffers=bool(wrapper.broadcast_buffers),
            holds_buffers=any(True for _ in wrapper.buffers()),
            nested=nested,
            gpu=gpu_of(trained),
        )
    )
    return result


def record_sharding(index: int, call: WrappedCall) -> Any:
    """Record the weights of a model before it is cut into shards, which cuts its parts as well.

    Args:
        index: The position of the model among the arguments.
        call: The call of the function that cuts it.
    """
    if not running_sharding.depth:
        weights = unsharded_weights(index, call)
        record(Sharding(weights=weights, strategy=strategy_of(index, call)))
    with running_sharding:
        return call.run()


@default_on_error(dict)
def unsharded_weights(index: int, call: WrappedCall) -> Digests:
    """Return the hashes of weights of which each rank keeps its own, and no broadcast follows."""
    module = call.argument(index, "module")
    group = call.argument(index + 1, "process_group")
    group = group or call.kwargs.get("mesh") or call.kwargs.get("device_mesh")
    is_of_all = group is None or group.size() == torch.distributed.get_world_size()
    if call.kwargs.get("sync_module_states") or not is_of_all:
        return {}
    parts = [part for part in module.modules() if kind_of_wrapper(part)]
    sharded = {id(parameter) for part in parts for parameter in part.parameters()}
    named = module.named_parameters()
    return {name: digests.digest(p) for name, p in named if id(p) not in sharded}


@default_on_error(str)
def strategy_of(index: int, call: WrappedCall) -> str:
    """Return the name of a sharding strategy; empty where the default one is used."""
    mesh = call.kwargs.get("mesh")
    if mesh is not None and mesh.ndim > 1:
        return "HYBRID_SHARD"
    strategy = call.argument(index + 2, "sharding_strategy")
    return strategy.name if strategy else ""


def fill_empty(call: WrappedCall) -> Any:
    """Write nan where `to_empty` leaves what was in memory, so that no run hides it by chance."""
    result = call.run()
    fill_with_nan(call.args[0], call.kwargs.get("recurse", True))
    return result


@default_on_error(lambda: None)
def fill_with_nan(module: Any, recurse: bool) -> None:
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        if tensor.is_floating_point():
            tensor.detach().fill_(torch.nan)


def load_event(call: WrappedCall) -> StateDictLoad | None:
    if called_models.depth:
        return None
    strict = call.argument(2, "strict", True)
    model_keys = set(call.args[0].state_dict())
    file_keys = set(call.argument(1, "state_dict"))
    more = 0  # keys of the model with the prefix removed from the file's keys
    fewer = 0  # keys of the model with the prefix added to the file's keys
    if not model_keys & file_keys:
        more = len(model_keys & {key.removeprefix("module.") for key in file_keys})
        fewer = len(model_keys & {f"module.{key}" for key in file_keys})
    return StateDictLoad(strict=strict, own=len(model_keys), more=more, fewer=fewer)


def device_of(parameter: Any) -> str:
    return requested_devices.get(id(parameter), str(parameter.device.type))


def gpu_of(parameters: list[Any]) -> str:
    """Return the GPU on which a model is; empty where it is on none."""
    device = device_of(parameters[0]) if parameters else ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{device} {visible}".strip() if device.startswith("cuda") else ""


def record_move(name: str, call: WrappedCall) -> Any:
    module = call.args[0]
    before = describe_place(module)
    result = call.run()
    device = requested_device(name, (*call.args[1:], *call.kwargs.values()))
    if device:
        requested_devices.update((id(parameter), device) for parameter in module.parameters())
    after = describe_place(module)
    if before and after and before != after:
        record(ModelMoved(before=before, after=after))
    return result


@default_on_error(str)
def describe_place(module: Any) -> str:
    """Return the device and the type of a wrapped model; an empty text of any other."""
    parameter = next(module.parameters(), None)
    if parameter is None or id(parameter) not in wrapped_parameters:
        return ""
    dtype = str(parameter.dtype).removeprefix("torch.")
    device = device_of(parameter).partition(":")[0]
    return f"{device} in {dtype}"


@default_on_error(str)
def requested_device(name: str, arguments: tuple[Any, ...]) -> str:
    """Return the device that a call asks for; an empty text where it asks for none."""
    device = name if name in ("cuda", "cpu") else ""
    for argument in arguments if name in ("to", "cuda") else ():
        if isinstance(argument, str | torch.device):
            device = str(argument)
        elif isinstance(argument, int) and not isinstance(argument, bool):
            device = f"cuda:{argument}"
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
