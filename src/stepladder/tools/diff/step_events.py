"""Record a digest of everything that a training step computes, in its order."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepladder.tools.probe.job_listener import JobListener
from stepladder.tools.verify.causes import list_leaves
from stepladder.train.fingerprints import fingerprint
from stepladder.train.job import Job

# The kinds of events.
INITIAL_WEIGHTS = "initial weights"
WEIGHTS = "weights"
DATA = "data"
RANDOMNESS = "randomness"
OPERATION = "operation"
LOSS = "loss"
GRADIENT_KIND = "gradient"
LEARNING_RATE = "learning rate"
OPTIMIZER = "optimizer"


class Event(NamedTuple):
    """A value that a step computed."""

    step: int
    microbatch: int  # from 1; 0 for a value of the whole step
    kind: str
    name: str
    digest: str
    description: str  # for people; not compared


EventPair = tuple[Event | None, Event | None]


class EventRecorder(JobListener):
    """Records the events of a job's training, from a step on.

    Args:
        job: The job that is trained.
        start: The number of steps finished before the training.
        first: The first step whose events are recorded.
    """

    def __init__(self, job: Job, start: int, first: int) -> None:
        self.job = job
        self.step = start
        self.microbatch = 0
        self.first = first
        self.events: list[Event] = []
        self.on_gpu = False
        for name, module in job.model.named_modules():
            module.register_forward_pre_hook(partial(self._record_input, name), with_kwargs=True)
            module.register_forward_hook(partial(self._record_output, name))
        for name, param in job.model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._record_gradient, name))
        job.optimizer.register_step_pre_hook(self._record_update)

    def record(self, kind: str, name: str, value: Any, description: str = "") -> None:
        if self.step >= self.first:
            digest = _compute_digest(value)
            event = Event(self.step, self.microbatch, kind, name, digest, description)
            self.events.append(event)

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        """Compute the job's loss, and record the batch, the random generator and the loss."""
        self.microbatch += 1
        self.on_gpu = next(model.parameters()).is_cuda
        for index, tensor in enumerate(list_leaves(batch)):
            self.record(DATA, f"tensor {index} of the batch", tensor)
        self._record_generator("the loss")
        result = self.job.loss(model, batch)
        self.record(LOSS, "the loss", result)
        return result

    def _record_generator(self, name: str) -> None:
        state = torch.cuda.get_rng_state() if self.on_gpu else torch.get_rng_state()
        self.record(RANDOMNESS, f"the random generator before {name}", state)

    def _record_input(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = name or "the model"
        self.record(OPERATION, f"the input of {name}", [*args, *kwargs.values()])
        if _is_leaf(module):
            self._record_generator(name)

    def _record_output(self, name: str, module: nn.Module, _args: Any, output: Any) -> None:
        description = repr(module) if _is_leaf(module) else type(module).__name__
        self.record(OPERATION, name or "the model", output, description)

    def _record_gradient(self, name: str, param: Tensor) -> None:
        self.record(GRADIENT_KIND, name, param.grad)

    def _record_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Record the gradients of the whole step and the optimizer's settings before its update."""
        self.microbatch = 0
        for name, param in self.job.model.named_parameters():
            self.record(GRADIENT_KIND, f"{name} over the whole step", param.grad)
        for index, group in enumerate(optimizer.param_groups):
            for name in sorted(group.keys() - {"params"}):
                kind = LEARNING_RATE if name == "lr" else OPTIMIZER
                self.record(kind, f"{name} of group {index}", group[name], repr(group[name]))

    def before_step(self) -> None:
        self.step += 1
        self.microbatch = 0
        if self.step == self.first:
            self._record_state(INITIAL_WEIGHTS if self.first == 1 else WEIGHTS)

    def after_step(self) -> None:
        self.microbatch = 0
        self._record_state(OPTIMIZER)

    def _record_state(self, kind: str) -> None:
        for name, tensor in self.job.model.state_dict().items():
            self.record(kind, name, tensor)
        # The class comes before the optimizer's state, which some classes have from the start.
        optimizer_class = type(self.job.optimizer).__name__
        self.record(OPTIMIZER, "the optimizer's class", optimizer_class, optimizer_class)
        names: dict[Any, str] = {param: name for name, param in self.job.model.named_parameters()}
        for param, state in self.job.optimizer.state.items():
            param_name = names.get(param, "a parameter")
            for name, value in state.items():
                self.record(kind, f"{name} of {param_name}", value)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _compute_digest(value: Any) -> str:
    """Return a digest of all tensors, numbers and texts in a nested value.

    Other objects have no comparable bits: they count only as present.
    """
    return fingerprint([fingerprint(_to_hashable(leaf)) for leaf in list_leaves(value)]).hex()


def _to_hashable(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to_dense()
    return leaf if isinstance(leaf, (float, int, str, bytes)) else None


def find_first_difference(first: list[Event], second: list[Event]) -> EventPair | None:
    """Return the first events that differ; one of the two is None if its run has no more."""
    for first_event, second_event in zip_longest(first, second):
        if first_event is None or second_event is None:
            return first_event, second_event
        if first_event[:5] != second_event[:5]:  # all but the description
            return first_event, second_event
    return None
