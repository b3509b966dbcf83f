"""Validation of a job's parts, before anything is done with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stepladder.core.errors import InputError, as_input_error, to_one_line
from stepladder.train.build_errors import validate_unwrapped
from stepladder.train.job import Job
from stepladder.train.optimizers import is_plateau, list_optimizers


class _PartRule(NamedTuple):
    """What one part of a job must be, and what the HINT shows as an example."""

    is_valid: Callable[[Any], bool]
    example: str


def _is_optional_function(value: Any) -> bool:
    return value is None or callable(value)


def _is_schedule(value: Any) -> bool:
    schedules = value if isinstance(value, tuple) else (value,)
    methods = ("step", "state_dict", "load_state_dict")
    return value is None or all(hasattr(each, name) for each in schedules for name in methods)


def _is_ema_decay(value: Any) -> bool:
    return value is None or (isinstance(value, float) and 0 <= value < 1)


def _is_clip_norm(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and value > 0)


def _is_best(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, tuple) and value[1:] in (("max",), ("min",))


def _is_classes(value: Any) -> bool:
    return isinstance(value, tuple) and {type(item) for item in value} <= {type}


JOB_PARTS = {
    "model": _PartRule(
        lambda value: isinstance(value, nn.Module), "torch.nn.Linear(20, 1), or another module"
    ),
    "optimizer": _PartRule(
        lambda value: isinstance(value, torch.optim.Optimizer),
        "torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    "loss": _PartRule(callable, "a function of (model, batch) that returns (sum, count)"),
    "metrics": _PartRule(_is_optional_function, "a function of (model, batch), or None"),
    "derived": _PartRule(_is_optional_function, "a function of the metrics' means, or None"),
    "collate": _PartRule(_is_optional_function, "a function of a list of samples, or None"),
    "schedule": _PartRule(
        _is_schedule, "a scheduler of torch.optim.lr_scheduler, or a tuple of them"
    ),
    "schedule_per": _PartRule(lambda value: value in ("step", "epoch"), '"step" or "epoch"'),
    "ema_decay": _PartRule(_is_ema_decay, "0.999, or None"),
    "clip_norm": _PartRule(_is_clip_norm, "1.0, or None"),
    "best": _PartRule(_is_best, '("loss", "min")'),
    "unit": _PartRule(
        lambda value: isinstance(value, str) and value.isprintable(), '"tokens", or another word'
    ),
    "blocks": _PartRule(_is_classes, "(Block,), of classes"),
    "num_workers": _PartRule(lambda value: isinstance(value, int) and value >= 0, "0, or more"),
    "eval_batch": _PartRule(lambda value: isinstance(value, int) and value >= 1, "1, or more"),
}


def validate_parts(job: Job) -> None:
    """Raise InputError for the first part of a job that is not what the docstring of Job says."""
    for name, rule in JOB_PARTS.items():
        value = getattr(job, name)
        if not rule.is_valid(value):
            raise InputError(
                f"{name} of the Job is {to_one_line(repr(value))}", f"{name}={rule.example}"
            )
    validate_unwrapped(job.model)


def validate_parameters(job: Job) -> None:
    """Check that there is a parameter to train, and that the optimizer steps only the model's.

    The gradients of other parameters would not be synchronized.

    Raises:
        InputError: All parameters are frozen, the optimizer has some that are not the model's, or
            the model's state_dict cannot be stored.
    """
    validate_state(job.model)
    if not any(param.requires_grad for param in job.model.parameters()):
        raise InputError(
            "no parameter of the model has requires_grad, so there is nothing to train",
            "parameter.requires_grad_(True) for the layers that are to be trained",
        )
    model_parameters = {id(param) for param in job.model.parameters()}
    foreign = [
        param for param in _parameters_of(job.optimizer) if id(param) not in model_parameters
    ]
    if foreign:
        raise InputError(
            f"the optimizer has {len(foreign)} parameters that are not the model's, the first of"
            f" shape {list(foreign[0].shape)}",
            "make them part of the model (a submodule), and build the optimizer from"
            " model.parameters()",
        )


def validate_state(model: nn.Module) -> None:
    """Raise InputError if a weight has no shape, or a tensor cannot be written or saved."""
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise InputError(
                f"the weight {name} has no shape yet",
                "call the model in build once, before the optimizer is made",
            )
    _validate_writable(model)
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"state_dict of the model has {name}, which is no tensor but a"
                f" {type(value).__name__}: no snapshot can have it",
                "register_buffer with a tensor, in place of get_extra_state",
            )
    stored = set(map(id, state.values()))
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in stored:
            raise InputError(
                f"state_dict of the model has no {name}, which is trained: no snapshot would have"
                " it",
                "remove the hook or the method that leaves it out",
            )


def _validate_writable(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise InputError(
                f"{name} was made in torch.inference_mode(), so nothing can be written to it",
                "torch.no_grad() in its place",
            )
        is_dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)
        sizes = zip(tensor.shape, tensor.stride() if is_dense else (), strict=is_dense)
        if not is_dense or any(size > 1 and not step for size, step in sizes):
            kind = "expanded" if is_dense else f"{tensor.dtype}, {tensor.layout} on {tensor.device}"
            raise InputError(
                f"{name} is {kind}: no snapshot can have it",
                "register_buffer with dense tensors: the indices and the values of a sparse one;"
                " expanded.clone()",
            )


def validate_closures(job: Job) -> None:
    """Raise InputError if a step of an optimizer computes the loss by itself, as LBFGS does."""
    for optimizer in list_optimizers(job.optimizer):
        parameters = inspect.signature(optimizer.step).parameters
        closure = parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise InputError(
                f"a step of {type(optimizer).__name__} wants a closure, which computes the loss"
                " several times; here a step computes it once",
                "torch.optim.AdamW(model.parameters(), lr=1e-3), or keep your loop: stepladder run"
                " SCRIPT",
            )


def validate_schedules(job: Job) -> None:
    """Check that each schedule can be stepped and saved.

    Raises:
        InputError: A step wants what only the job knows, ReduceLROnPlateau has no metric, or the
            state cannot be read, as where LambdaLR calls an object without `__dict__`.
    """
    for schedule in job.schedules:
        if is_plateau(schedule):
            _validate_plateau(schedule, job)
            continue
        parameters = inspect.signature(schedule.step).parameters.values()
        positional = [param for param in parameters if param.kind < param.VAR_POSITIONAL]
        wanted = [param.name for param in positional if param.default is param.empty]
        if wanted:
            raise InputError(
                f"a step of {type(schedule).__name__} wants {', '.join(wanted)}",
                "a schedule whose step() wants nothing, or ReduceLROnPlateau",
            )
        problem = f"state_dict of {type(schedule).__name__}"
        with as_input_error(problem, "a function of the step", (AttributeError, TypeError)):
            schedule.state_dict()


def _validate_plateau(schedule: Any, job: Job) -> None:
    """Raise InputError if ReduceLROnPlateau would watch no metric, or the wrong direction of it."""
    name, mode = job.best or ("the training loss", "min")
    if job.best is not None and (job.metrics is None or job.eval_data is None):
        raise InputError(
            f"ReduceLROnPlateau watches {name}, but the job evaluates nothing",
            "Job(eval_data=, metrics=), or leave best out: then it watches the training loss",
        )
    if schedule.mode != mode:
        raise InputError(
            f'ReduceLROnPlateau(mode="{schedule.mode}") watches {name}, whose best is its {mode}',
            f'ReduceLROnPlateau(optimizer, mode="{mode}")',
        )


def validate_gradients_fit(job: Job) -> None:
    """Raise InputError if the optimizer cannot step the gradients that its weights will have."""
    has_sparse = any(getattr(module, "sparse", False) for module in job.model.modules())
    for optimizer in list_optimizers(job.optimizer):
        if isinstance(optimizer, torch.optim.SparseAdam) and not has_sparse:
            raise InputError(
                "SparseAdam steps sparse gradients only, and no module of the model has any",
                "torch.optim.Adam(model.parameters(), lr=1e-3)",
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise InputError(
                f"{type(optimizer).__name__} has differentiable=True, for gradients of its steps",
                "leave differentiable out",
            )
        if not isinstance(optimizer, torch.optim.Adafactor):
            continue
        for param in _parameters_of(optimizer):
            if param.requires_grad and not param.numel():
                raise InputError(
                    "Adafactor cannot step a weight without elements, such as the one of shape"
                    f" {list(param.shape)}",
                    "torch.optim.Adafactor([p for p in model.parameters() if p.numel()])",
                )


def validate_sparse_adam(job: Job) -> None:
    """Raise InputError for SparseAdam: gradients that are added over ranks are dense."""
    if any(isinstance(part, torch.optim.SparseAdam) for part in list_optimizers(job.optimizer)):
        raise InputError(
            "SparseAdam steps sparse gradients only; here they become dense as they are added over"
            " microbatches and ranks",
            "torch.optim.Adam(model.parameters()), or SGD",
        )


def validate_batch_norms(job: Job) -> None:
    """Raise InputError for SyncBatchNorm, which exchanges statistics in the forward pass."""
    for name, module in job.model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise InputError(
                f"the layer {name} is a SyncBatchNorm, whose statistics depend on the number of"
                " ranks, and which CPUs do not have",
                "leave convert_sync_batchnorm out: with --sync exact or --microbatch N, statistics"
                " are the same on any number of ranks",
            )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
