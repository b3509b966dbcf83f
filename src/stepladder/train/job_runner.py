"""From a job file to a trained result: what each rank of `stepladder train` does."""

from __future__ import annotations

import inspect
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepladder.core.console import show
from stepladder.core.errors import DONE, STOPPED, InputError, one_line
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.surroundings import surroundings
from stepladder.core.world import World
from stepladder.rank.exit_record import keep_end_file
from stepladder.rank.lifecycle import die_with_parent
from stepladder.rank.progress import PROGRESS
from stepladder.rank.torch_fixes import build_optimizers_without_dynamo
from stepladder.storage.rundir import SNAPSHOTS, snapshot_paths
from stepladder.storage.snapshot import newest_snapshot
from stepladder.train.build_errors import explain_build_errors
from stepladder.train.comm import Comm
from stepladder.train.group_setup import pick_device
from stepladder.train.job import Job, Recipe
from stepladder.train.job_file import load_job_file, raise_on_exit, validate_int_size
from stepladder.train.process_group import process_group
from stepladder.train.run_spec import resolve_sizes
from stepladder.train.trainer import Trainer


def train_file(request: TrainRequest) -> int:
    """Train the job of a file as the rank that this process is. Returns the exit code."""
    if World.detect().init_method == "env://":
        die_with_parent()  # torchrun's ranks live in sessions of their own, and would outlive it
    here = Path.cwd()
    with join_process_group(request) as (build, recipe, comm):
        job = build()
        with raise_on_early_exit():
            result = Trainer(job, resolve_paths(here, request.settings), recipe, comm).fit()
    if comm.world.is_first:
        if request.as_json:  # the last line on stdout, for a program
            show(json.dumps(result.as_json()), sys.stdout)
        else:
            show("\n".join(result.summary()), sys.stdout)
    return STOPPED if result.stopped else DONE


@contextmanager
def raise_on_early_exit() -> Iterator[None]:
    """Raise RuntimeError where the job ends the process with the exit code of a run that is done or
    stopped.
    """
    try:
        yield
    except SystemExit as error:
        if error.code in (None, DONE, STOPPED):
            raise RuntimeError(
                f"the job has called sys.exit({error.code or 0}) in its training"
            ) from error
        raise


def resolve_paths(folder: Path, settings: Settings) -> Settings:
    """Paths mean what they meant there, where the job has gone elsewhere since."""
    if Path.cwd() == folder:
        return settings
    keep_end_file(folder)
    source = settings.init_from and str(folder / settings.init_from)
    return replace(settings, run_dir=folder / settings.run_dir, init_from=source)


@contextmanager
def join_process_group(request: TrainRequest) -> Iterator[tuple[Callable[[], Job], Recipe, Comm]]:
    """The ranks' process group for the length of the block: how to build the job, and what is known
    before.
    """
    world, settings = World.detect(), request.settings
    build, recipe = load_job(request, world)
    validate_world_unchanged(request.job, world)
    with ExitStack() as stack:
        group = process_group(world, pick_device(settings.device, world), settings.timeout)
        try:
            comm = stack.enter_context(group)
        except torch.distributed.DistError as error:
            if PROGRESS in os.environ:  # our launcher knows what became of the others
                raise
            raise InputError(
                f"{world.describe()}: not all ranks have met within {settings.timeout:g} s ({one_line(error)})",
                "start all of them, with the same MASTER_ADDR and MASTER_PORT; --timeout SECONDS to wait longer",
            ) from error
        yield build, recipe, comm


def load_job(request: TrainRequest, world: World) -> tuple[Callable[[], Job], Recipe]:
    path, given, settings = request.job, request.config, request.settings
    validate_init_from(settings)
    module = load_job_file(path)
    config_type: Any = getattr(module, "Config", None)
    if settings.batch_per_rank is not None and hasattr(config_type, "global_batch"):
        batch = settings.batch_per_rank * world.world_size
        given = {**given, "global_batch": batch}  # a schedule counts its steps by it
    validate_config(path, config_type, given)
    validate_build_signature(path, module.build)
    config = config_type(**given)
    for field in fields(config):
        validate_int_size(path, field.name, getattr(config, field.name))
    scale_learning_rate(config, settings, world)
    recipe = Recipe(path.stem, config, job_file=str(path))
    seed = resolve_sizes(settings, recipe).seed
    for draw in (
        random.seed,
        np.random.seed,
        torch.manual_seed,
    ):  # for a build that has no generator of its own
        draw(seed)

    def build() -> Job:
        build_optimizers_without_dynamo()
        with raise_on_exit(path), surroundings(), explain_build_errors(path):
            job = module.build(config)
        if not isinstance(job, Job):
            raise InputError(
                f"build(config) has returned {one_line(repr(job))}", "return stepladder.Job(...)"
            )
        return job

    return build, recipe


def validate_world_unchanged(path: Path, world: World) -> None:
    """Raises InputError where the job file has taken away what says which rank this is, or has
    changed it.
    """
    found = World.detect()
    if (found.rank, found.world_size) != (world.rank, world.world_size):
        raise InputError(
            f"{path.name} has changed the environment variables that say which rank this is",
            "leave RANK, WORLD_SIZE and those beside them in os.environ",
        )


def validate_init_from(settings: Settings) -> None:
    """Raises InputError where --init-from names no run with a snapshot, before the job file is
    compiled.
    """
    if settings.init_from is not None and not snapshot_paths(settings.run_dir / SNAPSHOTS):
        source = Path(settings.init_from)
        if not snapshot_paths(source / SNAPSHOTS):
            newest_snapshot(source)


def validate_config(path: Path, config: Any, given: dict[str, Any]) -> None:
    """Raises InputError where it is no dataclass, or a field without a default was not given."""
    if not (is_dataclass(config) and isinstance(config, type)):
        raise InputError(
            f"Config in {path.name} is not a dataclass", "@dataclass above class Config"
        )
    for field in fields(config):
        if (
            field.init
            and field.name not in given
            and field.default is field.default_factory is MISSING
        ):
            flag = "--" + field.name.replace("_", "-")
            raise InputError(f"Config.{field.name} in {path.name} has no default", f"{flag} VALUE")


def validate_build_signature(path: Path, build: Callable[..., Any]) -> None:
    """Raises InputError where it cannot be called with a Config alone."""
    with suppress(ValueError):  # a callable of C's, which does not tell
        try:
            inspect.signature(build).bind(None)
        except TypeError as error:
            found = f"build in {path.name} cannot be called with a config alone: {one_line(error)}"
            raise InputError(found, "def build(config: Config) -> stepladder.Job: ...") from error


def scale_learning_rate(config: Any, settings: Settings, world: World) -> None:
    """The classical rule for a batch that grows with the ranks: rate x sqrt(ranks) or x ranks, if
    asked for.

    Linear: Goyal et al. 2017, section 2.1; square root: Krizhevsky 2014, section 5.
    """
    if settings.lr_scale == "none":
        return
    if not hasattr(config, "lr"):
        raise InputError(
            f"--lr-scale {settings.lr_scale}, but the job's Config has no field lr", "add lr: float"
        )
    if not isinstance(config.lr, (int, float)):
        raise InputError(
            f"--lr-scale {settings.lr_scale}, but Config.lr is {config.lr!r:.60}", "lr: float"
        )
    factor = math.sqrt(world.world_size) if settings.lr_scale == "sqrt" else world.world_size
    object.__setattr__(config, "lr", config.lr * factor)  # of a frozen one too
