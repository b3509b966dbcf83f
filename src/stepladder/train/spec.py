"""What a run is: its plan, its length, and what a resumed one must have in common with it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from stepladder.core.errors import InputError
from stepladder.core.plan import Plan, default_microbatch, key, largest_divisor
from stepladder.core.settings import FREE_ON_RESUME, Settings
from stepladder.data.shards.dataset import Shards
from stepladder.train.batchnorm import batch_norms
from stepladder.train.determinism import machine
from stepladder.train.job import Job


def definition(
    settings: Settings, about: dict[str, Any], plan: Plan, job: Job, device: torch.device, threads: int
) -> dict[str, Any]:
    """Everything that decides what is computed; who computes it, and where files lie, is left out."""
    asked = {k: v for k, v in asdict(settings).items() if k not in FREE_ON_RESUME}
    asked |= {k: v for k, v in about["config"].items() if not k.endswith(("_dir", "_path", "_file"))}
    asked |= {"recipe": about["recipe"], "num_samples": plan.num_samples, "global_batch": plan.global_batch}
    if plan.chunks is not None:  # they decide the order
        asked["chunks"] = f"{len(plan.chunks.shards)} shards, {key(repr(plan.chunks)):x}"
    if job.schedule is None:  # nothing but the end depends on the number of epochs
        asked.pop("epochs", None)
    if settings.sync == "exact":  # another number of threads, or another processor, adds in another order
        asked |= {"threads": threads, "machine": machine(device)}
    return asked


def refuse_foreign_parameters(job: Job) -> None:
    """Raises InputError where the optimizer moves parameters that no gradient synchronisation would see."""
    known = {id(p) for p in job.model.parameters()}
    foreign = [p.shape for group in job.optimizer.param_groups for p in group["params"] if id(p) not in known]
    if foreign:
        raise InputError(
            f"the optimizer has {len(foreign)} parameters that are not the model's, the first of shape"
            f" {list(foreign[0])}",
            "make them part of the model (a submodule), and build the optimizer from model.parameters()",
        )


def make_plan(job: Job, settings: Settings, world_size: int, num_samples: int) -> Plan:
    """The run's plan. Raises InputError where this many processes cannot share a step."""
    min_microbatch = 2 if batch_norms(job.model) else 1
    chunks = job.train_data.chunks if isinstance(job.train_data, Shards) else None
    if settings.batch_per_rank is not None:
        plan = Plan(
            num_samples, settings.batch_per_rank * world_size,
            settings.microbatch or settings.batch_per_rank, settings.seed, min_microbatch, chunks,
        )  # fmt: skip
    else:
        microbatch = settings.microbatch or default_microbatch(settings.global_batch)
        if settings.microbatch is None and microbatch < min_microbatch:
            microbatch = settings.global_batch // largest_divisor(
                settings.global_batch, settings.global_batch // min_microbatch
            )
        plan = Plan(num_samples, settings.global_batch, microbatch, settings.seed, min_microbatch, chunks)
    most = max(world_size, settings.most_ranks)
    if most > plan.num_microbatches:
        raise InputError(
            f"{most} processes for {plan.num_microbatches} microbatches (--global-batch {plan.global_batch},"
            f" --microbatch {plan.microbatch}): some would never have work",
            f"--nproc {plan.num_microbatches}, or a smaller --microbatch",
        )
    return plan


def number_of_steps(settings: Settings, plan: Plan) -> int:
    """Optimizer steps of the whole run."""
    whole = settings.epochs * plan.steps_per_epoch
    if settings.steps is None:
        return whole
    if settings.steps > whole:
        raise InputError(
            f"--steps {settings.steps} is more than --epochs {settings.epochs} holds ({whole})",
            f"--epochs {-(-settings.steps // plan.steps_per_epoch)}",
        )
    return settings.steps
