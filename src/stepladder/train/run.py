"""From a job file to a trained result: what each rank of `stepladder train` does."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from stepladder.core.errors import InputError
from stepladder.core.exit_codes import DONE, STOPPED
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.rank.lifecycle import die_with_parent
from stepladder.train.comm import pick_device, process_group
from stepladder.train.job import Job
from stepladder.train.job_file import load_job_file
from stepladder.train.trainer import Trainer


def train_file(path: Path, given: dict[str, Any], settings: Settings, as_json: bool) -> int:
    """Train the job of `path` as the rank that this process is. Returns the exit code.

    given: the Config fields that were set; those named epochs, global_batch and seed are settings too.
    """
    world = World.detect()
    if world.init_method == "env://":  # torchrun's ranks live in sessions of their own, and would outlive it
        die_with_parent()
    build, settings, about = configured(path, given, settings, world)
    with process_group(world, pick_device(settings.device, world), settings.timeout) as comm:
        result = Trainer(build(), settings, about, comm).fit()
    if world.is_first:
        report(result, as_json)
    return STOPPED if result["stopped"] else DONE


def configured(
    path: Path, given: dict[str, Any], settings: Settings, world: World
) -> tuple[Callable[[], Job], Settings, dict[str, Any]]:
    """How to build the job, the settings with what its Config says of them, and what config.json says about it."""
    module = load_job_file(path)
    if settings.batch_per_rank is not None and hasattr(module.Config, "global_batch"):
        batch = settings.batch_per_rank * world.world_size
        given = {**given, "global_batch": batch}  # a schedule counts its steps by it
    refuse_unfit_config(path, module.Config, given)
    config = module.Config(**given)
    shared = {name: getattr(config, name) for name in ("epochs", "global_batch", "seed") if hasattr(config, name)}
    settings = replace(settings, **shared)
    scale_learning_rate(config, settings, world)
    seed_everything(settings.seed)
    about = {"recipe": path.stem, "config": asdict(config), "job_file": str(path)}
    return partial(build_job, module, config), settings, about


def refuse_unfit_config(path: Path, config: Any, given: dict[str, Any]) -> None:
    """Raises InputError where it is no dataclass, or a field without a default was not given."""
    if not is_dataclass(config):
        raise InputError(f"Config in {path.name} is not a dataclass", "@dataclass above class Config")
    for field in fields(config):
        if field.init and field.name not in given and field.default is field.default_factory is MISSING:
            flag = "--" + field.name.replace("_", "-")
            raise InputError(f"Config.{field.name} in {path.name} has no default", f"{flag} VALUE")


def build_job(module: ModuleType, config: Any) -> Job:
    job = module.build(config)
    if not isinstance(job, Job):
        raise InputError(f"build(config) has returned a {type(job).__name__}", "return stepladder.Job(...)")
    return job


def seed_everything(seed: int) -> None:
    """What a build draws without a seed of its own. Training seeds each pass by itself."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def scale_learning_rate(config: Any, settings: Settings, world: World) -> None:
    """The classical rule for a batch that grows with the ranks: rate x 1, x sqrt(ranks) or x ranks.

    Linear: Goyal et al. 2017, section 2.1; square root: Krizhevsky 2014, section 5.
    """
    factors = {"none": 1.0, "sqrt": math.sqrt(world.world_size), "linear": float(world.world_size)}
    factor = factors[settings.lr_scale]
    if settings.lr_scale != "none":
        if not hasattr(config, "lr"):
            raise InputError(
                f"--lr-scale {settings.lr_scale}, but the job's Config has no field lr", "add lr: float"
            )
        config.lr *= factor


def report(result: dict[str, Any], as_json: bool) -> None:
    """The result for a person, or as the last line of stdout for a program."""
    if as_json:
        print(json.dumps(result), flush=True)
        return
    values = {"train_loss": result["train_loss"], **result["metrics"]}
    known = {name: value for name, value in values.items() if value is not None and not math.isnan(value)}
    if known:  # not before the first epoch has ended
        print("  ".join(f"{name} {value:.4f}" for name, value in known.items()))
    end = (
        f"stopped at step {result['steps']}, to be resumed"
        if result["stopped"]
        else f"{result['steps']} steps done"
    )
    print(f"{end}; everything is in {result['run_dir']}", file=sys.stdout, flush=True)
