"""The user's job: what a recipe, or a user's own file, builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from stepladder.core.secrets import masked

if TYPE_CHECKING:
    import torch

    Batch = Any
    SumAndCount = tuple[torch.Tensor, Any]  # the count: an int, or a tensor of one number


@dataclass(frozen=True)
class Job:
    """Everything about the task, nothing about the machine.

    loss: `loss(model, batch) -> (sum, count)`, the sum over the batch as a scalar tensor that backward
        accepts, and what it counts (samples, tokens, ...), a number or a tensor of one. A loss that returns
        one tensor is taken as a mean over the samples of the batch. The gradient of a step is that of
        sum / count over all of it.
    train_data, eval_data: a tensor, a tuple or dict of tensors (first dimension: samples), or a map-style
        Dataset. `batch` has the same form: tensors indexed by samples, or the Dataset's items collated.
    metrics: `metrics(model, batch) -> {name: (sum, count)}`, called in eval mode without gradients. One
        function for all, so that they share the forward pass.
    derived: further metrics from the means of all samples, such as the root of a mean square.
    optimizer: of the model's parameters; several of them as one are `Optimizers(one, other)`.
    schedule: a learning-rate scheduler, stepped after each optimizer step, or once per epoch; or several.
    clip_norm: largest norm of the whole gradient, or None. Each step's norm is logged; math.inf clips nothing.
    ema_decay: of an exponential moving average of the weights, such as 0.999, which is evaluated in their place.
    blocks: kinds of modules whose weights --shard full gathers together, and whose activations
        --checkpoint-blocks computes again; by default those that repeat in a list.
    unit: what the loss counts, for the speed that is shown.
    best: (metric, "max" | "min"); the snapshot with the best value is kept.
    num_workers, collate: as DataLoader has them, for a map-style Dataset.  eval_batch: samples per batch there.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[torch.nn.Module, Batch], SumAndCount | torch.Tensor]
    train_data: Any
    eval_data: Any = None
    metrics: Callable[[torch.nn.Module, Batch], dict[str, SumAndCount]] | None = None
    schedule: (
        torch.optim.lr_scheduler.LRScheduler
        | tuple[torch.optim.lr_scheduler.LRScheduler, ...]
        | None
    ) = None
    schedule_per: Literal["step", "epoch"] = "step"
    clip_norm: float | None = None
    best: tuple[str, Literal["max", "min"]] | None = None
    num_workers: int = 0
    collate: Callable[[list[Any]], Batch] | None = None
    eval_batch: int = 1000
    derived: Callable[[dict[str, float]], dict[str, float]] | None = None
    unit: str = "samples"
    blocks: tuple[type[torch.nn.Module], ...] = ()
    ema_decay: float | None = None

    @property
    def schedules(self) -> tuple[torch.optim.lr_scheduler.LRScheduler, ...]:
        """All of them."""
        if self.schedule is None:
            return ()
        return self.schedule if isinstance(self.schedule, tuple) else (self.schedule,)


def mean_loss(
    criterion: Callable[..., torch.Tensor],
) -> Callable[[torch.nn.Module, Batch], SumAndCount]:
    """A plain criterion such as `F.cross_entropy`, a mean over the batch, as a job's loss on (x, y)
    batches.
    """

    def loss(model: torch.nn.Module, batch: Batch) -> SumAndCount:
        x, y = batch
        return criterion(model(x), y) * len(x), len(x)

    return loss


@dataclass(frozen=True)
class Recipe:
    """Where a job comes from: its name, and the Config that it was built with. Part of the run's
    definition.

    config: the job file's Config, or its values by name. Its epochs, global_batch and seed, where
    it has them, are
        the run's.  outside: fields that say where files lie, and may change when a run is resumed;
        by default
        those that the Config itself lists in `outside_definition`, and data_dir.  job_file: shown
        in config.json."""

    name: str = "job"
    config: Any = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    job_file: str | None = None

    def __post_init__(self) -> None:
        outside = self.outside or tuple(getattr(self.config, "outside_definition", ()))
        object.__setattr__(self, "outside", outside)
        if is_dataclass(self.config) and not isinstance(self.config, type):
            object.__setattr__(self, "config", asdict(self.config))
        elif not isinstance(self.config, Mapping):
            raise TypeError(
                f"config is a {type(self.config).__name__}, not a dataclass's value or a dict"
            )

    def with_sizes(self, **sizes: int) -> Recipe:
        """The same job with other epochs, global_batch or seed: to try it out, whatever its Config
        says.
        """
        return replace(self, config={**self.config, **sizes})

    @property
    def definition(self) -> dict[str, Any]:
        """The Config's part of what a resumed run must have in common with the one that it
        continues.
        """
        return {
            name: value
            for name, value in self.masked_config.items()
            if name not in (*self.outside, "data_dir")
        }

    @property
    def masked_config(self) -> dict[str, Any]:
        """The Config as files, pages and services may have it: with masks for what may be secret."""
        return {name: masked(value, name) for name, value in self.config.items()}
