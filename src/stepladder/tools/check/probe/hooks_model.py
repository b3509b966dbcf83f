"""Hooks that record forward passes of complete models, their wrappers, and what they load."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepladder.core.after_import import call_after_import
from stepladder.tools.check.events import (
    Digests,
    EvalMode,
    Forward,
    ModelDivided,
    Sharding,
    StateDictLoad,
    WrapperBuilt,
    ZeroGrad,
)
from stepladder.tools.check.probe import digests, pause
from stepladder.tools.check.probe.hooks_wrapper import gpu_of, wrapped_models
from stepladder.tools.check.probe.layer_outputs import layer_outputs
from stepladder.tools.check.probe.patching import (
    Arguments,
    Fields,
    NestingDepth,
    default_on_error,
    get_argument,
    record_calls,
    record_user_calls,
    wrap,
)
from stepladder.tools.check.probe.probe_log import record

FSDP = "torch.distributed.fsdp"
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
SHARDING_CLASSES = ("FSDPModule",)
CALLS_RECORDED_FULLY = 40  # of models with a gradient; later ones only now and then
CALLS_PER_FULL_RECORD = 16
MAX_RECORDED_ROWS = 64


class CalledModels(NestingDepth):
    """The models that the script has called, not from within another module."""

    def __init__(self) -> None:
        super().__init__()  # the depth is that of modules whose call is running
        self.models: dict[int, Any] = {}  # by id
        self.names: dict[int, str] = {}  # of parameters, by id
        self.calls = 0
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
        self.calls += 1
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
running_sharding = NestingDepth()


def attach() -> None:
    wrap_module_calls("__call__")
    wrap(DistributedDataParallel, "__init__", record_wrapper)
    call_after_import(f"{FSDP}.fully_sharded_data_parallel", watch_wrapper)
    call_after_import(f"{FSDP}._fully_shard._fully_shard", watch_fully_shard)
    wrap(nn.Module, "to_empty", fill_empty)
    record_calls(nn.Module, "load_state_dict", load_event)
    call_after_import("torch.distributed.tensor.parallel", watch_tensor_parallel)
    call_after_import("torch.distributed.pipelining", watch_pipelining)
    record_user_calls(nn.Module, "eval", lambda _: EvalMode())
    record_user_calls(nn.Module, "zero_grad", lambda *_, **__: ZeroGrad(optimizer=-1))


def division_event(*_: Any, **__: Any) -> ModelDivided:
    return ModelDivided()


def watch_tensor_parallel(module: Any) -> None:
    record_calls(module, "parallelize_module", division_event)


def watch_pipelining(module: Any) -> None:
    record_calls(module.PipelineStage, "__init__", division_event)


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
    layer_outputs.begin(module, [args, kwargs])
    with called_models:
        if not called_models.is_registered(module):
            called_models.register(module)
        if next(module.parameters(), None) is not None:
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


def record_wrapper(original: Any, wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    inner = (type(part).__name__ for part in module.modules() if kind_of_wrapper(part))
    nested = next(inner, "")
    result = original(wrapper, module, *args, **kwargs)
    called_models.register(wrapper)
    wrapped_models.add_wrapped(wrapper)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    record(
        WrapperBuilt(
            parameters={name_of(p): [id(p), digests.digest(p)] for p in trained},
            buffers=bool(wrapper.broadcast_buffers),
            nested=nested,
            gpu=gpu_of(trained),
        )
    )
    return result


def watch_wrapper(fsdp: Any) -> None:
    wrap(fsdp.FullyShardedDataParallel, "__init__", functools.partial(record_sharding, 1))


def watch_fully_shard(fsdp: Any) -> None:
    wrap(fsdp, "fully_shard", functools.partial(record_sharding, 0))


def record_sharding(index: int, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Record the weights of a model before it is cut into shards, which cuts its parts as well.

    Args:
        index: The position of the model among the arguments.
        original: The function that cuts it.
    """
    if not running_sharding.depth:
        sharding = Sharding(
            weights=unsharded_weights(index, args, kwargs),
            strategy=strategy_of(index, args, kwargs),
        )
        record(sharding)
    with running_sharding:
        return original(*args, **kwargs)


@default_on_error(dict)
def unsharded_weights(index: int, args: Arguments, kwargs: Fields) -> Digests:
    """Return the hashes of weights of which each rank keeps its own, and no broadcast follows."""
    module = get_argument(args, kwargs, index, "module")
    group = get_argument(args, kwargs, index + 1, "process_group")
    group = group or kwargs.get("mesh") or kwargs.get("device_mesh")
    is_of_all = group is None or group.size() == torch.distributed.get_world_size()
    if kwargs.get("sync_module_states") or not is_of_all:
        return {}
    parts = [part for part in module.modules() if kind_of_wrapper(part)]
    sharded = {id(parameter) for part in parts for parameter in part.parameters()}
    named = module.named_parameters()
    return {name: digests.digest(p) for name, p in named if id(p) not in sharded}


@default_on_error(str)
def strategy_of(index: int, args: Arguments, kwargs: Fields) -> str:
    """Return the name of a sharding strategy; empty where the default one is used."""
    mesh = kwargs.get("mesh")
    if mesh is not None and mesh.ndim > 1:
        return "HYBRID_SHARD"
    strategy = get_argument(args, kwargs, index + 2, "sharding_strategy")
    return strategy.name if strategy else ""


def fill_empty(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Write nan where `to_empty` leaves what was in memory, so that no run hides it by chance."""
    result = original(module, *args, **kwargs)
    fill_with_nan(module, kwargs.get("recurse", True))
    return result


@default_on_error(lambda: None)
def fill_with_nan(module: Any, recurse: bool) -> None:
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        if tensor.is_floating_point():
            tensor.detach().fill_(torch.nan)


def load_event(
    module: Any, state_dict: Any, strict: Any = True, *_: Any, **__: Any
) -> StateDictLoad | None:
    if called_models.depth:
        return None
    model_keys = set(module.state_dict())
    file_keys = set(state_dict)
    more = 0  # keys of the model with the prefix removed from the file's keys
    fewer = 0  # keys of the model with the prefix added to the file's keys
    if not model_keys & file_keys:
        more = len(model_keys & {key.removeprefix("module.") for key in file_keys})
        fewer = len(model_keys & {f"module.{key}" for key in file_keys})
    return StateDictLoad(strict=strict, own=len(model_keys), more=more, fewer=fewer)
