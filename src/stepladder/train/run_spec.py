"""The definition of a run: its plan, its length, its data, and what a resumed run must share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

import torch

from stepladder.core.errors import InputError
from stepladder.core.order import derive_seed, find_largest_divisor
from stepladder.core.plan import Plan, choose_microbatch
from stepladder.core.process_count import choose_threads_per_rank
from stepladder.core.settings import SETTING_FLAGS, Settings
from stepladder.data.source import get_contents
from stepladder.data.sources import BatchSource, find_chunks, is_sorted_by_length, open_source
from stepladder.train.batch_norm import find_batch_norms
from stepladder.train.checkpoint_blocks import validate_checkpointable
from stepladder.train.comm import Comm
from stepladder.train.compile_loss import prepare_compiler
from stepladder.train.cuda_graphs import validate_capturable
from stepladder.train.determinism import describe_machine
from stepladder.train.job import Job, Recipe
from stepladder.train.job_validation import (
    validate_batch_norms,
    validate_closures,
    validate_gradients_fit,
    validate_parameters,
    validate_parts,
    validate_schedules,
    validate_sparse_adam,
)
from stepladder.train.layout import find_layout
from stepladder.train.rank_consistency import validate_equal_settings

SIZE_DEFAULTS = {"epochs": 1, "global_batch": 64, "seed": 0}


class Sizes(NamedTuple):
    """What both the settings and the job's Config may say; a run has one value of each."""

    epochs: int
    global_batch: int
    seed: int


def resolve_sizes(settings: Settings, recipe: Recipe) -> Sizes:
    """Return the sizes of the Config, else those of the settings, else the defaults.

    Raises:
        InputError: If Config and settings contradict each other, or a size is no whole number.
    """
    sizes = Sizes(*[_resolve_size(name, settings, recipe) for name in Sizes._fields])
    replace(settings, **sizes._asdict())  # raises InputError for sizes that are out of range
    return sizes


def _resolve_size(name: str, settings: Settings, recipe: Recipe) -> Any:
    in_settings = getattr(settings, name)
    in_config = recipe.config.get(name)
    if in_settings is not None and in_config is not None and in_settings != in_config:
        raise InputError(
            f"{name} is {in_config} in the job's Config and {in_settings} in the settings",
            f"leave {name} to the Config",
        )
    value: Any = SIZE_DEFAULTS[name]
    if in_config is not None:
        value = in_config
    elif in_settings is not None:
        value = in_settings
    is_whole_number = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole_number:
        raise InputError(
            f"{name} in the job's Config is {value!r:.60}, not a whole number", f"{name}: int"
        )
    return value


@dataclass(frozen=True)
class RunSpec:
    """One run, whichever processes compute it. Only its plan has the global batch.

    Args:
        job: The model, its optimizer, the loss and the data.
        settings: The flags of `stepladder train`.
        recipe: The job's name and Config.
        plan: Which samples each step trains.
        epochs: The number of passes over the training data.
        num_steps: Optimizer steps of the whole run.
        threads: Intra-op threads of each process.
        device: The device of this rank.
        train_source: The opened training data.
        eval_source: The opened evaluation data, None if the job has no evaluation.
    """

    job: Job
    settings: Settings
    recipe: Recipe
    plan: Plan
    epochs: int
    num_steps: int
    threads: int
    device: torch.device
    train_source: BatchSource
    eval_source: BatchSource | None

    @staticmethod
    def make(job: Job, settings: Settings, recipe: Recipe, comm: Comm) -> RunSpec:
        """Return the run of a job. A collective.

        Raises:
            InputError: If the job, the settings and the number of processes do not fit each other,
                or ranks have different settings.
        """
        validate_equal_settings(comm, settings, recipe)
        validate_parts(job)
        validate_parameters(job)
        validate_closures(job)
        validate_gradients_fit(job)
        validate_schedules(job)
        if settings.sync == "exact" or not comm.alone:
            validate_sparse_adam(job)
        if settings.sync == "exact" or comm.device.type == "cpu":
            validate_batch_norms(job)
        find_layout(settings).validate(job)
        if settings.checkpoint_blocks:
            validate_checkpointable(job)
        if settings.compile:
            prepare_compiler()
        sizes = resolve_sizes(settings, recipe)

        def open_data(data: Any) -> BatchSource:
            return open_source(data, comm.device, sizes.seed, job.num_workers, job.collate)

        train_source = open_data(job.train_data)
        if settings.capture:
            validate_capturable(train_source, comm.device)
        plan = _make_plan(job, settings, sizes, comm.world.world_size, len(train_source))
        num_steps = _count_steps(sizes.epochs, settings.steps, plan)
        _validate_fail_at(settings.fail_at, num_steps)
        eval_source: BatchSource | None = None
        if job.eval_data is not None and job.metrics is not None:
            eval_source = open_data(job.eval_data)
        return RunSpec(
            job=job,
            settings=settings,
            recipe=recipe,
            plan=plan,
            epochs=sizes.epochs,
            num_steps=num_steps,
            threads=choose_threads_per_rank(
                settings.threads, settings.sync, comm.world.ranks_per_node
            ),
            device=comm.device,
            train_source=train_source,
            eval_source=eval_source,
        )

    def with_order(self, shuffle: str) -> RunSpec:
        """Return this run with the order of samples that it began with; "" for a new run."""
        return replace(self, plan=replace(self.plan, shuffle=shuffle or self.plan.shuffle))

    @property
    def by_microbatch(self) -> bool:
        """Whether each microbatch is a pass of its own, with randomness keyed to it.

        Otherwise a rank computes its whole share of a step in one pass.
        """
        return self.settings.microbatch is not None or self.settings.sync == "exact"

    @cached_property
    def definition(self) -> dict[str, Any]:
        """Everything that decides what is computed, which a resumed run must have in common.

        Which processes compute it, and where files lie, is not part of it.
        """
        definition = {
            name: value
            for name, value in asdict(self.settings).items()
            if not SETTING_FLAGS[name].free_on_resume
        }
        definition |= {"epochs": self.epochs, "seed": self.plan.seed}
        definition |= self.recipe.definition
        definition |= {"recipe": self.recipe.name, "num_samples": self.plan.num_samples}
        definition["global_batch"] = self.plan.global_batch
        chunks = self.plan.chunks
        if chunks is not None:  # they decide the order of samples
            definition["chunks"] = f"{len(chunks.shards)} shards, {derive_seed(repr(chunks)):x}"
        if self.plan.by_length:
            definition["by_length"] = True
        if self.job.schedule is None:  # then only the length depends on the number of epochs
            definition.pop("epochs", None)
        if self.settings.sync == "exact":
            # Another number of threads or another processor adds numbers in another order.
            definition["threads"] = self.threads
            definition["machine"] = describe_machine(self.device, self.settings.compile)
        for name in ("compile", "capture"):  # so that runs from before these flags can be resumed
            if not definition[name]:
                del definition[name]
        return definition

    @cached_property
    def files(self) -> dict[str, Any]:
        """The name and a hash of each file of the training and the evaluation data."""
        data = {"training": self.job.train_data, "evaluation": self.job.eval_data}
        return {name: get_contents(source) for name, source in data.items()}

    def as_json(self) -> dict[str, Any]:
        """Return what config.json holds of the run."""
        return {
            "definition": self.definition,
            "files": self.files,
            "plan": self.plan.as_json(),
            "derived": {
                "steps_per_epoch": self.plan.steps_per_epoch,
                "by_microbatch": self.by_microbatch,
            },
            "config": self.recipe.masked_config,
            "job_file": self.recipe.job_file,
        }


def _make_plan(
    job: Job, settings: Settings, sizes: Sizes, world_size: int, num_samples: int
) -> Plan:
    """Return the plan of a run.

    Raises:
        InputError: If the microbatches of a step are fewer than the processes.
    """
    min_microbatch = 2 if find_batch_norms(job.model) else 1
    global_batch = sizes.global_batch
    microbatch = settings.microbatch
    if settings.batch_per_rank is not None:
        global_batch = settings.batch_per_rank * world_size
        microbatch = microbatch or settings.batch_per_rank
    elif microbatch is None:
        microbatch = choose_microbatch(global_batch)
        if microbatch < min_microbatch:
            most_microbatches = global_batch // min_microbatch
            microbatch = global_batch // find_largest_divisor(global_batch, most_microbatches)
    plan = Plan(
        num_samples,
        global_batch,
        microbatch,
        sizes.seed,
        min_microbatch,
        chunks=find_chunks(job.train_data),
        by_length=is_sorted_by_length(job.train_data),
    )
    max_ranks = max(world_size, settings.most_ranks)
    if max_ranks > plan.num_microbatches:
        raise InputError(
            f"{max_ranks} processes for {plan.num_microbatches} microbatches"
            f" (--global-batch {plan.global_batch}, --microbatch {plan.microbatch}):"
            " some would never have work",
            f"--nproc {plan.num_microbatches}, or a smaller --microbatch",
        )
    return plan


def _count_steps(epochs: int, steps: int | None, plan: Plan) -> int:
    """Return the optimizer steps of the whole run.

    Args:
        epochs: The number of passes over the training data.
        steps: The value of --steps; None for all steps of the epochs.
        plan: Has the number of steps per epoch.

    Returns:
        The number of steps, at most those of the epochs.

    Raises:
        InputError: `steps` is more than the epochs have.
    """
    steps_of_epochs = epochs * plan.steps_per_epoch
    if steps is None:
        return steps_of_epochs
    if steps > steps_of_epochs:
        raise InputError(
            f"--steps {steps} is more than --epochs {epochs} holds ({steps_of_epochs})",
            f"--epochs {-(-steps // plan.steps_per_epoch)}",
        )
    return steps


def validate_step(spec: RunSpec, step: int) -> None:
    """Raise InputError if the run directory is at a step that the run does not have."""
    if step > spec.num_steps:
        raise InputError(
            f"run directory {spec.settings.run_dir} is at step {step}, past the {spec.num_steps}"
            " asked for",
            "--fresh to begin again, or more --epochs or --steps",
        )


def _validate_fail_at(failures: Iterable[tuple[int, int]], num_steps: int) -> None:
    """Raise InputError if `fail_at` names a step that the run does not have."""
    for rank, step in failures:
        if step > num_steps:
            raise InputError(
                f"--fail-at {rank}:{step}: the run's last step is {num_steps}",
                f"--fail-at {rank}:{num_steps}",
            )
