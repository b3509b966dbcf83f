"""What each rank of `stepladder train` does: from a job file to a trained result."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stepladder.core.console import echo_json, write_text
from stepladder.core.errors import DONE, STOPPED, InputError, to_one_line
from stepladder.core.host_generators import seed_host
from stepladder.core.machine_limits import name_machine_errors
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.signals import die_with_parent
from stepladder.core.world import World
from stepladder.rank.exit_record import make_end_file_absolute
from stepladder.rank.progress import PROGRESS_VARIABLE
from stepladder.rank.torch_fixes import defer_dynamo
from stepladder.storage.run_files import MANIFEST_FILE, SNAPSHOTS_FOLDER, list_snapshots
from stepladder.storage.snapshot import read_newest_snapshot
from stepladder.train.build_errors import explain_build_errors
from stepladder.train.comm import Comm
from stepladder.train.group_setup import pick_device
from stepladder.train.job import Job, Recipe
from stepladder.train.job_file import load_job_file, raise_on_exit
from stepladder.train.job_source import validate_int_size
from stepladder.train.pretended_ranks import pretend_one_rank
from stepladder.train.process_group import process_group
from stepladder.train.run_spec import resolve_sizes
from stepladder.train.trainer import Trainer


def train_file(request: TrainRequest) -> int:
    """Train the job of a file, as the rank that this process is, and return the exit code."""
    if World.detect().init_method == "env://":
        die_with_parent()  # ranks of torchrun have sessions of their own, and would outlive it
    folder = Path.cwd()
    with join_process_group(request) as (build, recipe, comm):
        job = build()
        with _raise_on_early_exit():
            settings = _resolve_paths(request.settings, folder)
            result = Trainer(job, settings, recipe, comm).fit()
    if comm.world.is_first:
        if request.as_json:  # the last line on stdout, for a program
            echo_json(result.as_json())
        else:
            write_text("\n".join(result.summary()), sys.stdout)
    return STOPPED if result.stopped else DONE


@contextmanager
def _raise_on_early_exit() -> Iterator[None]:
    """Turn an exit of the job, with the code of a run that ended well, into a RuntimeError.

    Raises:
        RuntimeError: The job has exited in the block with no code, 0 or 75 (STOPPED), so that the
            launcher would take the run for complete, or for stopped with a snapshot.
        SystemExit: The job has exited with another code.
    """
    try:
        yield
    except SystemExit as error:
        if error.code in (None, DONE, STOPPED):
            raise RuntimeError(
                f"the job has called sys.exit({error.code or 0}) in its training"
            ) from error
        raise


def _resolve_paths(settings: Settings, folder: Path) -> Settings:
    """Return the settings with paths relative to `folder`, if the job has left that folder."""
    if Path.cwd() == folder:
        return settings
    make_end_file_absolute(folder)
    init_from = settings.init_from and str(folder / settings.init_from)
    return replace(settings, run_dir=folder / settings.run_dir, init_from=init_from)


@contextmanager
def join_process_group(request: TrainRequest) -> Iterator[tuple[Callable[[], Job], Recipe, Comm]]:
    """Join the ranks' process group for the length of the block.

    Args:
        request: The arguments of `train`.

    Yields:
        A function that builds the job, the job's name and Config, and the ranks.

    Raises:
        InputError: The job is invalid, or not all ranks have joined within the timeout.
        DistError: Not all ranks have joined, and the launcher of stepladder, which reports the
            reason, has started them.
    """
    world = World.detect()
    settings = request.settings
    build, recipe = load_job(request, world)
    _validate_world_unchanged(request.job, world)
    with ExitStack() as stack:
        device = pick_device(settings.device, world)
        group = process_group(world, device, settings.timeout)
        try:
            comm = stack.enter_context(group)
        except torch.distributed.DistError as error:
            if (
                PROGRESS_VARIABLE in os.environ
            ):  # our launcher knows what has happened to the other ranks
                raise
            raise InputError(
                f"{world.describe()}: not all ranks have joined within {settings.timeout:g} s"
                f" ({to_one_line(error)})",
                "start all of them, with the same MASTER_ADDR and MASTER_PORT;"
                " --timeout SECONDS to wait longer",
            ) from error
        yield build, recipe, comm


def load_job(request: TrainRequest, world: World) -> tuple[Callable[[], Job], Recipe]:
    """Import the job file, make its Config and seed the generators.

    Returns:
        A function that builds the job, and the job's name and Config.

    Raises:
        InputError: If the file, its Config or its build cannot be used.
    """
    path = request.job
    settings = request.settings
    _validate_init_from(settings)
    # With exact, on any number of ranks the job is that of one.
    answers = pretend_one_rank if settings.sync == "exact" else nullcontext
    _seed_all(0)  # for what the top of the file draws: the seed of the run is known only after it
    with answers():
        module = load_job_file(path)
    config_class: Any = getattr(module, "Config", None)
    values = request.config
    if settings.batch_per_rank is not None and hasattr(config_class, "global_batch"):
        # A schedule of the job counts its steps by the global batch.
        values = {**values, "global_batch": settings.batch_per_rank * world.world_size}
    _validate_config(path, config_class, values)
    _validate_build_signature(path, module.build)
    config = config_class(**values)
    for field in fields(config):
        validate_int_size(path, field.name, getattr(config, field.name))
    _scale_learning_rate(config, settings, world)
    recipe = Recipe(path.stem, config, job_file=str(path))
    _seed_all(resolve_sizes(settings, recipe).seed)

    def build() -> Job:
        defer_dynamo()
        with answers(), raise_on_exit(path), name_machine_errors(), explain_build_errors(path):
            job = module.build(config)
        if not isinstance(job, Job):
            raise InputError(
                f"build(config) has returned {to_one_line(repr(job))}", "return stepladder.Job(...)"
            )
        return job

    return build, recipe


def _seed_all(seed: int) -> None:
    """Seed the global generators, for a build that has no generator of its own."""
    seed_host(seed)
    torch.manual_seed(seed)


def _validate_world_unchanged(path: Path, world: World) -> None:
    """Raise InputError if the job file has changed the variables that say which rank this is."""
    present = World.detect()
    if (present.rank, present.world_size) != (world.rank, world.world_size):
        raise InputError(
            f"{path.name} has changed the environment variables that say which rank this is",
            "leave RANK, WORLD_SIZE and the variables of their kind in os.environ",
        )


def _validate_init_from(settings: Settings) -> None:
    """Raise InputError if --init-from is needed and names no run with a snapshot."""
    if settings.init_from is not None and not list_snapshots(settings.run_dir / SNAPSHOTS_FOLDER):
        source = Path(settings.init_from)
        if list_snapshots(source / SNAPSHOTS_FOLDER):
            return
        if not (source / MANIFEST_FILE).exists() and _holds_foreign_weights(source):
            raise InputError(
                f"--init-from {source}: weights of another program, and no run with a snapshot",
                f"stepladder import {source} JOB --run-dir {settings.run_dir}, and then train"
                " without --init-from",
            )
        read_newest_snapshot(source)  # raises


def _holds_foreign_weights(folder: Path) -> bool:
    """Return whether a folder has files that `stepladder import` may read."""
    return (folder / ".metadata").exists() or any(folder.glob("*.safetensors*"))


def _validate_config(path: Path, config_class: Any, values: dict[str, Any]) -> None:
    """Raise InputError if Config is no dataclass, or a field has neither default nor value."""
    if not (is_dataclass(config_class) and isinstance(config_class, type)):
        raise InputError(
            f"Config in {path.name} is not a dataclass", "@dataclass above class Config"
        )
    for field in fields(config_class):
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if field.init and not has_default and field.name not in values:
            flag = "--" + field.name.replace("_", "-")
            raise InputError(f"Config.{field.name} in {path.name} has no default", f"{flag} VALUE")


def _validate_build_signature(path: Path, build: Callable[..., Any]) -> None:
    """Raise InputError if `build` cannot be called with a Config alone."""
    with suppress(ValueError):  # raised for a function of C, whose signature is unknown
        try:
            inspect.signature(build).bind(None)
        except TypeError as error:
            raise InputError(
                f"build in {path.name} cannot be called with a config alone: {to_one_line(error)}",
                "def build(config: Config) -> stepladder.Job: ...",
            ) from error


def _scale_learning_rate(config: Any, settings: Settings, world: World) -> None:
    """Scale the Config's `lr` for a global batch that grows with the ranks, as --lr-scale asks.

    Linear scaling is by Goyal et al. 2017, section 2.1, and square-root scaling by Krizhevsky 2014,
    section 5.

    Raises:
        InputError: The Config has no field `lr`, or its value is not a number.
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
    object.__setattr__(config, "lr", config.lr * factor)  # works on a frozen dataclass too
