"""A step of the optimizer, on the gradient that all ranks share: warm-up, clipping, fp16's scale,
schedules.
"""

from __future__ import annotations

import torch

from stepladder.train.run_spec import RunSpec
from stepladder.train.state import TrainState
from stepladder.train.sync.base import Sync


class WeightUpdate:
    """Moves the weights by what `sync` has left in their gradients."""

    def __init__(self, spec: RunSpec, state: TrainState, sync: Sync) -> None:
        self.spec, self.job, self.state, self.sync = spec, spec.job, state, sync
        self.optimizer, self.schedules = spec.job.optimizer, spec.job.schedules
        self.scales, self.warmup_steps = state.scaler.is_enabled(), spec.settings.warmup_steps

    def apply(self) -> tuple[float, torch.Tensor | None]:
        """The step's learning rate, of the first group, and the gradient's norm before clipping, of
        shape ().

        There is no norm where the job has no `clip_norm`.
        """
        step, groups, norm = self.state.step, self.optimizer.param_groups, None
        if self.scales:
            self.state.scaler.unscale_(self.optimizer)
        if self.job.clip_norm is not None:
            norm = self._clip(self.job.clip_norm)
        warming = step < self.warmup_steps
        if warming:
            rates = [group["lr"] for group in groups]
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * (step + 1) / self.warmup_steps
        lr: float = groups[0]["lr"]
        stepped = self.state.step_optimizer()
        if self.state.shard_replicas is not None:
            self.state.shard_replicas.record_step(stepped)
        if warming:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        for param in self.sync.params:
            param.grad = None
        if self.schedules:
            per_step = self.job.schedule_per == "step"
            if stepped if per_step else (step + 1) % self.spec.plan.steps_per_epoch == 0:
                for schedule in self.schedules:
                    schedule.step()
        return lr, norm

    def _clip(self, most: float) -> torch.Tensor:
        if self.state.full_shards is not None:
            return self.state.full_shards.clip(most)
        return torch.nn.utils.clip_grad_norm_(self.job.model.parameters(), most).detach()
