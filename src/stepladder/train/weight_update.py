"""The update of the weights in a step: warm-up, clipping, the fp16 scaler, schedules."""

from __future__ import annotations

from typing import Any

import torch

from stepladder.core.errors import InputError, get_reason
from stepladder.train.optimizers import Rate, is_from_torch, is_plateau, list_optimizers, read_rates
from stepladder.train.run_spec import RunSpec
from stepladder.train.state import TrainState
from stepladder.train.sync.base import Sync

# The errors by which torch's classes refuse their options in a step.
REFUSALS = (AssertionError, TypeError, ValueError)


class WeightUpdate:
    """Updates the weights by the gradients that a `Sync` has put into the parameters.

    Args:
        spec: The run.
        state: Its optimizer is stepped.
        sync: Its parameters have the gradients.
    """

    def __init__(self, spec: RunSpec, state: TrainState, sync: Sync) -> None:
        self.job = spec.job
        self.optimizer = spec.job.optimizer
        self.schedules = [each for each in spec.job.schedules if not is_plateau(each)]
        self.plateaus: list[Any] = [each for each in spec.job.schedules if is_plateau(each)]
        self.steps_per_epoch = spec.plan.steps_per_epoch
        self.warmup_steps = spec.settings.warmup_steps
        self.state = state
        self.layout = state.layout
        self.scales_loss = state.scaler.is_enabled()
        self.sync = sync
        self.params = list(spec.job.model.parameters())
        # As it was built: no snapshot would have a change, not even one that a step has made.
        self.built = self._read_built()
        # As they were after the last step, since nothing but a step may change them.
        self.groups: list[dict[str, Any]] = []
        self.rates: list[Rate] = []
        self._record_groups()

    def _record_groups(self) -> None:
        self.groups = list(map(dict, self.optimizer.param_groups))
        self.rates = read_rates(self.optimizer)  # copies: a rate may be a tensor

    def _read_built(self) -> dict[str, list[Any]]:
        groups = self.optimizer.param_groups
        return {
            "requires_grad of a weight": [param.requires_grad for param in self.params],
            "the list of the optimizer's parameters": [len(each["params"]) for each in groups],
        }

    def _validate_built(self) -> None:
        """Raise InputError if a weight was frozen, or the optimizer has got other parameters."""
        for name, value in self._read_built().items():
            if value != self.built[name]:
                raise InputError(
                    f"{name} has changed since build, which no snapshot would have",
                    "freeze weights in build, which gives the optimizer all others; later,"
                    " --init-from RUN_DIR with another job",
                )

    def _validate_settings(self) -> None:
        """Raise InputError if the job has changed settings, which each rank does by its passes."""
        self._validate_built()
        groups = self.optimizer.param_groups
        changed = set()
        if read_rates(self.optimizer) != self.rates:
            changed.add("lr")
        for group, before in zip(groups, self.groups, strict=True):
            if group != before:
                changed.update(name for name in group if group[name] != before.get(name))
        if changed:
            raise InputError(
                f"{', '.join(sorted(changed))} of the optimizer changed outside of its step and its"
                " schedule, where ranks and a resume differ",
                "rates in Job(schedule=LambdaLR(optimizer, function)); groups in build",
            )

    def apply(self) -> tuple[Rate, torch.Tensor | None]:
        """Update the weights and clear the gradients.

        Returns:
            The learning rate of the first group of parameters, and the norm of the gradient before
            clipping, shape (). The norm is None if the job has no `clip_norm`.
        """
        norm = None
        self._validate_settings()
        if self.plateaus and self.state.step and not self.state.step % self.steps_per_epoch:
            for plateau in self.plateaus:  # now, since the last epoch's value is known only now
                plateau.step(self.state.epoch_value)
        if self.scales_loss:
            self.state.scaler.unscale_(self.optimizer)
        if self.job.clip_norm is not None:
            norm = self.layout.clip(self.job.clip_norm)
        if self.state.step < self.warmup_steps:
            learning_rate, is_stepped = self._step_warming_up()
        else:
            learning_rate = read_rates(self.optimizer)[0]
            is_stepped = self._step_optimizer()
        for param in self.sync.params:
            param.grad = None
        if self.schedules:
            self._step_schedules(is_stepped)
            self._validate_built()
        self._record_groups()
        return learning_rate, norm

    def _step_warming_up(self) -> tuple[Rate, bool]:
        """Step the optimizer with rates that grow linearly to their full values.

        Returns:
            The learning rate of the first group of parameters, and whether the step was taken.
        """
        groups = self.optimizer.param_groups
        full_rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, full_rates, strict=True):
            group["lr"] = rate * (self.state.step + 1) / self.warmup_steps
        learning_rate = read_rates(self.optimizer)[0]
        is_stepped = self._step_optimizer()
        for group, rate in zip(groups, full_rates, strict=True):
            group["lr"] = rate
        return learning_rate, is_stepped

    def _step_optimizer(self) -> bool:
        """Step the optimizer.

        Returns:
            Whether the step was taken.

        Raises:
            InputError: A class of torch refuses its own options here.
        """
        try:
            return self.layout.step(self.state.scaler)
        except REFUSALS as error:
            members = list_optimizers(self.optimizer)
            if not all(map(is_from_torch, members)):
                raise
            names = ", ".join(sorted({type(each).__name__ for each in members}))
            raise InputError(
                f"a step of {names} fails: {get_reason(error)}", f"build {names} with other options"
            ) from error

    def _step_schedules(self, is_stepped: bool) -> None:
        if self.job.schedule_per == "step":
            is_due = is_stepped
        else:
            is_due = (self.state.step + 1) % self.steps_per_epoch == 0
        if is_due:
            for schedule in self.schedules:
                schedule.step()
