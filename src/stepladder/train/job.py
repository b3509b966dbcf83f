"""The user's job: what a recipe, or a user's own file, builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from stepladder.core.arguments import validate_types
from stepladder.core.errors import InputError
from stepladder.core.masking import mask

if TYPE_CHECKING:
    import torch

    Batch = Any
    SumAndCount = tuple[torch.Tensor, Any]  # the count: an int, or a tensor of one number


@dataclass(frozen=True)
class Job:
    """Everything about the task, nothing about the machine.

    Args:
        model: The module whose parameters are trained.
        optimizer: Of the model's parameters. Several optimizers as one are
            `Optimizers(first, second)`.
        loss: `loss(model, batch) -> (sum, count)`: the sum over the batch as a scalar tensor that
            backward accepts, and what it counts (samples, tokens, ...), a number or a tensor of
            one number. A loss that returns one tensor is taken as a mean over the samples of the
            batch. The gradient of a step is that of sum / count over the whole global batch.
        train_data: A tensor, a tuple or dict of tensors (first dimension: samples), or a map-style
            Dataset. `batch` has the same form: tensors indexed by samples, or the Dataset's items
            collated.
        eval_data: The evaluation data, in one of the same forms.
        metrics: `metrics(model, batch) -> {name: (sum, count)}`, called in eval mode without
            gradients. One function returns all metrics, so that they share the forward pass.
        schedule: A learning-rate scheduler, or a tuple of several.
        schedule_per: Whether schedules are stepped after each optimizer step or once per epoch.
            ReduceLROnPlateau is stepped once per epoch in any case, with the metric of `best`; with
            the mean training loss of the epoch if the job has no `best`.
        clip_norm: Largest norm of the whole gradient, or None. The norm of each step is logged;
            math.inf clips nothing.
        best: (metric, "max" | "min"): the snapshot with the best value of the metric is kept.
        num_workers: Processes that read a map-style Dataset, as in DataLoader.
        collate: Makes a batch of a Dataset's items, as `collate_fn` of DataLoader.
        eval_batch: Samples per batch of an evaluation.
        derived: `derived(metrics) -> {name: value}`: further metrics computed from the means over
            all samples, such as the root of a mean square.
        unit: What the loss counts, for the speed that is shown.
        blocks: Kinds of modules whose weights --shard full gathers together, and whose activations
            --checkpoint-blocks recomputes. By default those that repeat in a list.
        ema_decay: Decay of an exponential moving average of the weights, such as 0.999. The average
            is evaluated in place of the weights.
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
        """The schedules as a tuple, whether there are none, one or several."""
        if self.schedule is None:
            return ()
        return self.schedule if isinstance(self.schedule, tuple) else (self.schedule,)


def mean_loss(
    criterion: Callable[..., torch.Tensor],
) -> Callable[[torch.nn.Module, Batch], SumAndCount]:
    """Return a job's loss on (x, y) batches, made of a criterion such as `F.cross_entropy`.

    Args:
        criterion: `criterion(output, y)` returns the mean over the batch.

    Raises:
        InputError: The criterion is no function.
    """
    if not callable(criterion):
        raise InputError(f"mean_loss({criterion!r:.60})", "mean_loss(F.cross_entropy)")

    def loss(model: torch.nn.Module, batch: Batch) -> SumAndCount:
        x, y = batch
        return criterion(model(x), y) * len(x), len(x)

    return loss


@dataclass(frozen=True)
class Recipe:
    """The origin of a job: its name, and the Config that it was built with.

    Both are part of the run's definition, so a resumed run must have the same ones.

    Args:
        name: The name of the job.
        config: The job file's Config, or its values by name. If it has epochs, global_batch or
            seed, they are those of the run.
        outside: Fields of the Config that say where files lie, and may change when a run is
            resumed. By default those that the Config lists in `outside_definition`. `data_dir` is
            always one of them.
        job_file: The path of the job file, for config.json.
    """

    name: str = "job"
    config: Any = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    job_file: str | None = None

    def __post_init__(self) -> None:
        validate_types(Recipe, vars(self))
        outside = self.outside or tuple(getattr(self.config, "outside_definition", ()))
        object.__setattr__(self, "outside", outside)
        if is_dataclass(self.config) and not isinstance(self.config, type):
            object.__setattr__(self, "config", asdict(self.config))
        elif not isinstance(self.config, Mapping):
            raise InputError(
                f"config of the Recipe is a {type(self.config).__name__}",
                "config= a dataclass's value, or a dict",
            )

    def with_sizes(self, **sizes: int) -> Recipe:
        """Return the same job with other epochs, global_batch or seed than its Config has."""
        return replace(self, config={**self.config, **sizes})

    @property
    def definition(self) -> dict[str, Any]:
        """The part of the Config that a resumed run must have in common with the first one."""
        free_fields = {*self.outside, "data_dir"}
        config = self.masked_config
        return {name: value for name, value in config.items() if name not in free_fields}

    @property
    def masked_config(self) -> dict[str, Any]:
        """The Config for files, pages and services: what may be secret is masked."""
        return {name: mask(value, name) for name, value in self.config.items()}
