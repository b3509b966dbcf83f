"""A job or an unmodified script under the profiler.

Both ways start so many ranks here, or this process is one of those that another launcher has
started. They leave the ranks' traces in `folder` and return an exit code; InputError: the ranks
cannot be started or make too few steps.  steps: optimizer steps that are recorded, after `warmup`
others."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.process_count import choose_threads_per_rank, validate_process_count
from stepladder.core.settings import TrainRequest
from stepladder.core.world import World
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.supervisor import run_local
from stepladder.launcher.options import Options
from stepladder.launcher.run import prepare_run
from stepladder.launcher.script import Script
from stepladder.launcher.topology import Topology
from stepladder.tools.profiler.capture import Capture, CapturedSteps
from stepladder.tools.steps.hook import environment, variables

QUIET = {"KINETO_LOG_LEVEL": "99"}  # torch 2.13's prints two lines per rank otherwise


def profile_job(request: TrainRequest, warmup: int, steps: int, nproc: int, folder: Path) -> int:
    settings = replace(
        request.settings, run_dir=folder / "run", snapshot_every=10**9, progress=False
    )
    work = partial(train_profiled, replace(request, settings=settings), warmup, steps, folder)
    with environment(**QUIET):
        if World.detect().world_size > 1:
            return work()
        validate_process_count(nproc)
        return run_local(
            LocalGroup(work, choose_threads_per_rank(settings, nproc), Limits(settings.timeout)),
            nproc,
        )


def train_profiled(request: TrainRequest, warmup: int, steps: int, folder: Path) -> int:
    """On each rank: train `warmup` steps, and `steps` more under the profiler; the trace goes to
    `folder`.
    """
    from stepladder.train.job_runner import (
        join_process_group,  # torch, which the launcher does without
    )
    from stepladder.train.trainer import Trainer

    settings = replace(request.settings, steps=warmup + steps, epochs=None)
    with join_process_group(request) as (build, recipe, comm):
        comm.phases.observer = Capture(folder, comm.world.rank, warmup, steps).observe
        recipe = recipe.with_sizes(epochs=warmup + steps)  # as many as could be needed
        job = replace(build(), eval_data=None, best=None)
        Trainer(job, settings, recipe, comm).fit()
        comm.gather_bytes(b".")  # when the first rank leaves, all traces are there
    return 0


def profile_script(
    script: Script, threads: int | None, warmup: int, steps: int, nproc: int, folder: Path
) -> int:
    """threads: intra-op, or None for the script's own choice."""
    own, world = {"OMP_NUM_THREADS": str(threads)} if threads else {}, World.detect()
    observer = variables(CapturedSteps, folder=folder.absolute(), warmup=warmup, steps=steps)
    with environment(**own, **QUIET, **observer):
        if world.world_size > 1:
            code, nproc = subprocess.call(script.command()), world.world_size
        else:
            code = prepare_run(script, Options(), Topology(nproc=str(nproc)))()
    if not code and world.is_first:  # a rank leaves when the others' traces are there too
        counts = [int(file.read_bytes()) for file in folder.glob("rank-*.steps")]
        refuse_short(script, min(counts) if len(counts) >= nproc else 0, warmup, steps, nproc)
    return code


def refuse_short(script: Script, made: int, warmup: int, steps: int, nproc: int) -> None:
    """Raises InputError where a rank has made fewer steps than the window needs."""
    if made == 0:
        raise InputError(
            f"{script.name} made no optimizer step: only steps of a torch.optim.Optimizer are seen",
            f"stepladder run --nproc {nproc} {' '.join([script.name, *script.args])}, to see what it does",
        )
    if made < warmup + steps:
        most = min(steps, max(1, made - 1))
        raise InputError(
            f"{script.name} made {made} optimizer steps, but --warmup {warmup} and"
            f" --steps {steps} need {warmup + steps}",
            f"--warmup {made - most} --steps {most}" if made > 1 else "let it train for longer",
        )
