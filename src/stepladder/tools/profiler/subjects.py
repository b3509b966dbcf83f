"""What can be profiled, a job or an unmodified script, and how its ranks are run under the profiler.

run: starts so many ranks here, or is one of those that another launcher has started, as `world` says. Leaves the
ranks' traces in `folder` and returns an exit code, or raises InputError where the ranks cannot be started or make
too few steps.  steps: optimizer steps that are recorded, after `warmup` others.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stepladder.core.cores import refuse_too_many, threads_per_rank
from stepladder.core.errors import InputError
from stepladder.core.settings import TrainRequest
from stepladder.core.world import World
from stepladder.launcher.local.group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.ranks import run_local
from stepladder.launcher.options import Options
from stepladder.launcher.run import run_script
from stepladder.launcher.script import Script
from stepladder.launcher.topology import Topology
from stepladder.tools.profiler.capture import Capture, CapturedSteps
from stepladder.tools.steps.hook import environment, variables

QUIET = {"KINETO_LOG_LEVEL": "99"}  # torch 2.13's prints two lines per rank otherwise


@dataclass(frozen=True)
class ProfiledJob:
    """A recipe or job file."""

    request: TrainRequest
    warmup: int
    steps: int

    def run(self, nproc: int, world: World, folder: Path) -> int:
        settings = replace(self.request.settings, run_dir=folder / "run", snapshot_every=10**9, progress=False)
        request = replace(self.request, settings=settings)
        work = partial(profile_job, request, folder, self.warmup, self.steps)
        with environment(**QUIET):
            if world.world_size > 1:
                return work()
            refuse_too_many(nproc)
            return run_local(LocalGroup(work, threads_per_rank(settings, nproc), Limits(settings.timeout)), nproc)


def profile_job(request: TrainRequest, folder: Path, warmup: int, steps: int) -> int:
    """On each rank: train `warmup` steps, and `steps` more under the profiler; the trace goes to `folder`."""
    from stepladder.train.run import meeting  # torch, which the launcher does without
    from stepladder.train.trainer import Trainer

    settings = replace(request.settings, steps=warmup + steps, epochs=None)
    with meeting(request) as (build, recipe, comm):
        comm.phases.observer = Capture(folder, comm.world.rank, warmup, steps).observe
        recipe = recipe.sized(epochs=warmup + steps)  # as many as could be needed
        job = replace(build(), eval_data=None, best=None)
        Trainer(job, settings, recipe, comm).fit()
        comm.gather_bytes(b".")  # when the first rank leaves, all traces are there
    return 0


@dataclass(frozen=True)
class ProfiledScript:
    """A script as it is. threads: intra-op, or None for its own choice."""

    script: Script
    threads: int | None
    warmup: int
    steps: int

    def run(self, nproc: int, world: World, folder: Path) -> int:
        threads = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        observer = variables(CapturedSteps, folder=folder.absolute(), warmup=self.warmup, steps=self.steps)
        with environment(**threads, **QUIET, **observer):
            if world.world_size > 1:
                code, nproc = subprocess.call(self.script.command()), world.world_size
            else:
                code = run_script(self.script, Options(), Topology(nproc=str(nproc)))
        if not code and world.is_first:  # a rank leaves when the others' traces are there too
            self._refuse_short(folder, nproc)
        return code

    def _refuse_short(self, folder: Path, nproc: int) -> None:
        """Raises InputError where a rank has made fewer steps than the window needs."""
        script, needed = self.script, self.warmup + self.steps
        counts = [int(file.read_text()) for file in folder.glob("rank-*.steps")]
        made = min(counts) if len(counts) >= nproc else 0
        if made == 0:
            raise InputError(
                f"{script.name} made no optimizer step: only steps of a torch.optim.Optimizer are seen",
                f"stepladder run --nproc {nproc} {' '.join([script.name, *script.args])}, to see what it does",
            )
        if made < needed:
            most = min(self.steps, max(1, made - 1))
            raise InputError(
                f"{script.name} made {made} optimizer steps, but --warmup {self.warmup} and"
                f" --steps {self.steps} need {needed}",
                f"--warmup {made - most} --steps {most}" if made > 1 else "let it train for longer",
            )
