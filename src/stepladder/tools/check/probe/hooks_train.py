"""Hooks that record backward passes, optimizer steps and schedules.

Losses are recorded as numbers, gradients and weights as hashes by name.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
import weakref
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers

from stepladder.tools.check.events import (
    AutogradCall,
    Backward,
    BeforeStep,
    Clipping,
    Digests,
    Halt,
    LeafGradients,
    LocalGradients,
    ModelDivided,
    NotFinite,
    OptimizerBuilt,
    OptimizerStep,
    Returned,
    ScheduleStep,
    ZeroGrad,
)
from stepladder.tools.check.probe import digests, pause
from stepladder.tools.check.probe.hooks_data import CheckIsDone, end_if_enough_steps, pass_counters
from stepladder.tools.check.probe.hooks_model import called_models, name_of
from stepladder.tools.check.probe.layer_outputs import is_not_finite, layer_outputs, name_of_value
from stepladder.tools.check.probe.loss_graph import (
    activation_of,
    gathered_features,
    scale_of,
    target_weight_of,
)
from stepladder.tools.check.probe.patching import (
    Fields,
    NestingDepth,
    WrappedCall,
    default_on_error,
    record_calls,
    wrap,
)
from stepladder.tools.check.probe.probe_log import current_log, record
from stepladder.tools.check.probe.snapshot_files import snapshot_files

STEPS_RECORDED_FULLY = 24  # later ones only now and then
STEPS_PER_FULL_RECORD = 16
BACKWARDS_WITH_WEIGHTS = 24
NOT_HASHED = "-"  # in place of a hash of a sharded state, which is a state all the same
# The code that runs around the step of each optimizer.
STEP_CODE = optimizers.Optimizer.profile_hook_step(lambda: None).__code__


class GraphMark:
    """An object that lives as long as the graph of one loss."""


class TrainingTracker:
    """The optimizers of this process, the state of their gradients, and the graphs that live."""

    def __init__(self) -> None:
        self.optimizers: list[Any] = []  # an optimizer's number is its index
        self.clean: dict[int, bool] = {}  # whether gradients were cleared since the last step
        self.steps: dict[int, int] = {}
        self.with_backward: set[int] = set()  # since their last step
        self.graphs: list[weakref.ref[GraphMark]] = []
        self.autograd_calls = 0  # of torch.autograd.grad

    def number_of(self, optimizer: Any) -> int:
        for number, known in enumerate(self.optimizers):
            if known is optimizer:
                return number
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1

    def parameters_of_first_steps(self) -> list[Any]:
        """Return the parameters of the only optimizer, until it has made its first steps."""
        is_recorded = len(self.optimizers) == 1 and self.steps.get(0, 0) < STEPS_RECORDED_FULLY
        return parameters_of(self.optimizers[0]) if is_recorded else []

    def begin_backward(self) -> None:
        """Note which optimizers have no gradient before a backward pass."""
        for number, optimizer in enumerate(self.optimizers):
            if not self.clean.get(number) and all(
                map(digests.has_no_gradient, parameters_of(optimizer))
            ):
                self.clean[number] = True
        self.with_backward = set(range(len(self.optimizers)))

    def begin_step(self, number: int) -> int:
        """Count a step of an optimizer, and return its number."""
        self.steps[number] = self.steps.get(number, 0) + 1
        return self.steps[number]

    def is_clean(self, number: int) -> bool:
        """Return whether the gradients of a step are those of its own backward passes."""
        is_first_step = self.steps[number] == 1
        return self.clean.get(number, is_first_step) or number not in self.with_backward

    def finish_step(self, number: int) -> int:
        """Note that gradients were used, and return the number of the step."""
        self.clean[number] = False
        self.with_backward.discard(number)
        return self.steps.get(number, 1)

    def add_graph(self, loss: Any) -> int:
        """Remember the graph of a loss, and return how many graphs of earlier losses still live."""
        self.graphs = [graph for graph in self.graphs if graph() is not None]
        count = len(self.graphs)
        node = getattr(loss, "grad_fn", None)
        if node is not None:
            mark = GraphMark()
            node.metadata["stepladder"] = mark
            self.graphs.append(weakref.ref(mark))
        return count

    def count_autograd_call(self) -> int:
        self.autograd_calls += 1
        return self.autograd_calls


training_tracker = TrainingTracker()
running_schedule = NestingDepth()


def attach() -> None:
    wrap(torch.autograd, "backward", record_backward)
    record_calls(torch.autograd, "grad", autograd_grad_event)
    optimizers.register_optimizer_step_pre_hook(record_before_step)
    optimizers.register_optimizer_step_post_hook(record_after_step)
    record_calls(optimizers.Optimizer, "__init__", optimizer_event)
    if current_log().settings.leaves:
        wrap(optimizers.Optimizer, "__init__", leaf_sums.build)
    record_calls(optimizers.Optimizer, "zero_grad", zero_grad_event)
    wrap(torch.nn.utils, "clip_grad_norm_", record_clipping)
    for cls in vars(lr_scheduler).copy().values():
        is_schedule = isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler)
        if is_schedule and "step" in vars(cls):
            wrap(cls, "step", record_schedule_step)
    wrap(lr_scheduler.LRScheduler, "_initial_step", ignore_initial_step)
    wrap(lr_scheduler.ReduceLROnPlateau, "__init__", ignore_initial_step)


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_parameters_of(optimizer: Any) -> Fields:
    parameters = parameters_of(optimizer)
    return {name_of(p) or f"#{index}": p for index, p in enumerate(parameters)}


def record_clipping(call: WrappedCall) -> Any:
    parameters = call.argument(0, "parameters")
    is_one = isinstance(parameters, Tensor)
    parameters = [parameters] if is_one else list(parameters)  # an iterator can be read once
    call = call.with_argument(0, "parameters", parameters)
    if current_log().settings.frozen:  # a clipped gradient is the mean of no samples
        call = call.with_argument(1, "max_norm", math.inf)
    norm = call.run()
    is_number = type(norm) is Tensor
    pointers = digests.gradient_pointers(parameters)
    record(Clipping(ptrs=pointers, norm=float(norm) if is_number else None))
    return norm


class LeafSums:
    """Sums of the gradients that this rank alone has computed since the last step."""

    def __init__(self) -> None:
        self.by_optimizer: dict[int, list[float]] = {}

    def build(self, call: WrappedCall) -> None:
        """Make an optimizer, and add up what backward passes give its first parameters."""
        call.run()
        optimizer = call.args[0]
        parameters = parameters_of(optimizer)[: digests.MAX_GRADIENT_SUMS]
        sums = self.by_optimizer[training_tracker.number_of(optimizer)] = [0.0] * len(parameters)

        def add(index: int, gradient: Any) -> None:
            sums[index] += digests.gradient_sum(gradient)

        for index, parameter in enumerate(parameters):
            if parameter.requires_grad and parameter.is_leaf:
                parameter.register_hook(partial(add, index))

    def take(self, number: int) -> list[float]:
        """Return the sums, and begin anew."""
        sums = self.by_optimizer[number]
        taken = list(sums)
        sums[:] = [0.0] * len(sums)
        return taken


leaf_sums = LeafSums()


def optimizer_event(call: WrappedCall) -> OptimizerBuilt:
    return OptimizerBuilt(cls=type(call.args[0]).__name__)


def zero_grad_event(call: WrappedCall) -> ZeroGrad:
    return ZeroGrad(optimizer=training_tracker.number_of(call.args[0]))


def record_backward(call: WrappedCall) -> Any:
    tensors = call.argument(0, "tensors")
    loss = tensors[0] if isinstance(tensors, list | tuple) else tensors
    training_tracker.begin_backward()
    wait_if_halted()
    value = ""
    fields: Fields = {
        "way": current_log().user_stack(),
        "alive": training_tracker.add_graph(loss),
        "scale": scale_of(loss),
        "target_weight": target_weight_of(loss),
        "gathered": gathered_features.find_constant(loss),
    }
    if isinstance(loss, Tensor) and loss.numel() == 1:
        fields["loss"] = float(loss.detach()) + 0.0
        value = name_of_value(fields["loss"])
        fields["twice"] = activation_of(loss)
    if not training_tracker.steps and pass_counters.count_backward() <= BACKWARDS_WITH_WEIGHTS:
        models = called_models.models.values()
        fields["weights"] = digests.short_hash("".join(map(digests.model_digest, models)))
    record(Backward(**fields))
    if value:
        record_not_finite("the loss", value, layer_outputs.find_origin(value))
    layer_outputs.forget()
    result = call.run()
    current_log().write(Returned())
    sums = digests.gradient_sums(training_tracker.parameters_of_first_steps())
    if sums:
        current_log().write(LocalGradients(sums=sums))
    return result


def record_not_finite(what: str, value: str, origin: str) -> None:
    """Record the first value of this process that is not finite."""
    if not layer_outputs.is_reported:
        layer_outputs.mark_reported()
        record(NotFinite(what=what, value=value, origin=origin))


def record_infinite_gradient(parameters: Fields, norm: float) -> None:
    """Record a gradient that is not finite although the loss was."""
    value = name_of_value(norm)
    for name, parameter in parameters.items() if value else ():
        if is_not_finite(parameter.grad):
            record_not_finite(f"the gradient of {name}", value, "the loss itself is finite")
            return


def wait_if_halted() -> None:
    """Wait to be ended if a snapshot was written, before anything more is trained."""
    log = current_log()
    # The other ranks wait for this one in their next collective.
    if not log.settings.stop_at_snapshot or log.rank > 0:
        return
    parameters = chain.from_iterable(map(parameters_of, training_tracker.optimizers))
    if snapshot_files.has_new_snapshot(parameters):
        log.write(Halt())
        while True:
            time.sleep(1)


def autograd_grad_event(_: WrappedCall) -> AutogradCall | None:
    """Return that a script takes gradients as values, and makes steps without an optimizer.

    It may use torch.autograd.grad or torch.func.
    """
    is_early = training_tracker.count_autograd_call() <= STEPS_RECORDED_FULLY
    return AutogradCall() if is_early else None


def is_recorded_fully(step: int) -> bool:
    return step <= STEPS_RECORDED_FULLY or step % STEPS_PER_FULL_RECORD == 0


def is_inner_step() -> bool:
    """Return whether this step is a part of another optimizer's step.

    ZeroRedundancyOptimizer has such an inner optimizer. Only the outer step is recorded: it counts
    once, and it has all parameters.
    """
    frames = traceback.walk_stack(sys._getframe())
    return sum(frame.f_code is STEP_CODE for frame, _ in frames) > 1


def record_before_step(optimizer: Any, *_: Any) -> None:
    if is_inner_step():
        return
    log = current_log()
    number = training_tracker.number_of(optimizer)
    step = training_tracker.begin_step(number)
    steps_limit = log.settings.steps * max(log.settings.epochs, 1)
    has_no_loader = pass_counters.passes == 0
    if steps_limit and has_no_loader and step > steps_limit:
        raise CheckIsDone(0)
    # The first step of a pass may be that after an average of the weights.
    if not is_recorded_fully(step) and pass_counters.steps:
        return
    if log.settings.leaves and number in leaf_sums.by_optimizer:
        log.write(LeafGradients(sums=leaf_sums.take(number)))
    named = named_parameters_of(optimizer)
    parameters = parameters_of(optimizer)
    if step == 1 and any(map(digests.is_divided, parameters)) and not called_models.shards:
        record(ModelDivided())
    with_gradient = {name: p for name, p in named.items() if p.grad is not None}
    norm = digests.gradient_norm(parameters)
    record_infinite_gradient(with_gradient, norm)
    log.write_with_line(
        BeforeStep(
            optimizer=number,
            step=step,
            clean=training_tracker.is_clean(number),
            grads={name: digests.digest(p.grad) for name, p in with_gradient.items()},
            norm=norm,
            matrix_norm=digests.gradient_norm(digests.trained_matrices(parameters) or parameters),
            before=weight_digests(named),
            ids={name: id(p) for name, p in named.items()},
            frozen_names=[name for name, p in named.items() if not p.requires_grad],
            sums=digests.gradient_sums(parameters),
            random=list(digests.random_states().values()) if log.settings.frozen else (),
        )
    )


def weight_digests(named: Fields) -> Digests:
    return {name: digests.digest(parameter) for name, parameter in named.items()}


def record_after_step(optimizer: Any, *_: Any) -> None:
    if is_inner_step():
        return
    pass_counters.count_step()
    number = training_tracker.number_of(optimizer)
    step = training_tracker.finish_step(number)
    parameters = parameters_of(optimizer)
    fields: Fields = {
        "optimizer": number,
        "step": step,
        "lr": [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
        "first_lr": float(optimizer.defaults.get("lr", 0.0)),
        "numel": sum(parameter.numel() for parameter in parameters),
    }
    if is_recorded_fully(step):
        named = named_parameters_of(optimizer)
        states = {name: optimizer.state.get(p) for name, p in named.items()}
        fields["after"] = weight_digests(named)
        fields["state"] = {name: state_digest(state) for name, state in states.items()}
        fields["buffers"] = buffer_digests()
        fields["shapes"] = [list(parameter.shape) for parameter in parameters]
        fields |= compare_with_models(parameters)
    record(OptimizerStep(**fields))
    if number == 0:
        pause.pause_at("step")
        end_if_enough_steps()


@default_on_error(dict)
def buffer_digests() -> Digests:
    """Return hashes of the buffers of all models that were called."""
    models = list(called_models.models.values())
    named = [pair for model in models for pair in model.named_buffers()]
    return {name: digests.digest(buffer) for name, buffer in named}


@default_on_error(lambda: {"unheld": [], "strangers": 0})
def compare_with_models(parameters: list[Any]) -> Fields:
    """Compare the parameters of an optimizer with those of the models that were called.

    "unheld" are parameters of models with a gradient that no optimizer has, "strangers" is the
    number of the optimizer's parameters without a gradient that no model has.
    """
    held = [p for optimizer in training_tracker.optimizers for p in parameters_of(optimizer)]
    held_ids = set(map(id, held))
    of_models = list(called_models.parameters())
    ids_of_models = set(map(id, of_models))
    with_gradient = [p for p in of_models if p.requires_grad and p.grad is not None]
    unheld = {name_of(p) for p in with_gradient if id(p) not in held_ids}
    strangers = [p for p in parameters if id(p) not in ids_of_models and p.grad is None]
    return {"unheld": sorted(unheld), "strangers": len(strangers)}


def state_digest(state: Any) -> str:
    tensors = [value for value in (state or {}).values() if isinstance(value, Tensor)]
    return "".join(digests.digest(tensor)[:6] or NOT_HASHED for tensor in tensors)


def ignore_initial_step(call: WrappedCall) -> Any:
    with running_schedule:
        return call.run()


def record_schedule_step(call: WrappedCall) -> Any:
    schedule = call.args[0]
    if running_schedule.depth == 0:
        log = current_log()
        log.write_with_line(
            ScheduleStep(
                schedule=id(schedule),
                cls=type(schedule).__name__,
                horizon=horizon_of(schedule),
                direct=log.is_called_by_user(),
            )
        )
    with running_schedule:
        return call.run()


def horizon_of(schedule: Any) -> int | None:
    """Return the number of steps after which a schedule ends; None where it has no end."""
    horizons = [getattr(schedule, n, None) for n in ("T_max", "total_steps", "total_iters")]
    return next((horizon for horizon in horizons if isinstance(horizon, int)), None)
