"""What can be profiled, a job or an unmodified script, and how its ranks are run under the profiler."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from stepladder.core.cores import refuse_too_many, threads_per_rank
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.world import World
from stepladder.launcher.local.group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.ranks import run_local
from stepladder.launcher.nodes.rendezvous_flags import RendezvousFlags
from stepladder.launcher.options import Options
from stepladder.launcher.run import run_script
from stepladder.launcher.script import Script
from stepladder.launcher.topology import Topology
from stepladder.tools.profiler.script_observer import CapturedSteps
from stepladder.tools.steps.hook import environment, observed_by

QUIET = {"KINETO_LOG_LEVEL": "99"}  # torch 2.13's prints two lines per rank otherwise


@dataclass(frozen=True)
class Schedule:
    """steps: optimizer steps that are recorded, after `warmup` others."""

    warmup: int
    steps: int

    @property
    def end(self) -> int:
        return self.warmup + self.steps


class ProfiledSubject(Protocol):
    """What is profiled. The traces of its ranks go to `folder`; what is returned is an exit code."""

    @property
    def name(self) -> str: ...

    def run(self, nproc: int, folder: Path) -> int:
        """Start so many ranks here. Raises InputError where they make too few steps, or cannot be started."""

    def be_rank(self, world: World, folder: Path) -> int:
        """Be one of the ranks that another launcher has started."""


@dataclass(frozen=True)
class ProfiledJob:
    """A recipe or job file. given: of its Config."""

    path: Path
    given: dict[str, Any]
    settings: Settings
    schedule: Schedule

    @property
    def name(self) -> str:
        return self.path.stem

    def run(self, nproc: int, folder: Path) -> int:
        refuse_too_many(nproc)
        with environment(**QUIET):
            group = LocalGroup(threads_per_rank(self.settings, nproc), Limits(self.settings.timeout))
            return run_local(group, rank_of_job, self._asked(folder), nproc, max_restarts=0)

    def be_rank(self, world: World, folder: Path) -> int:
        with environment(**QUIET):
            return rank_of_job(*self._asked(folder))

    def _asked(self, folder: Path) -> tuple[Any, ...]:
        """The arguments of `profile_job`."""
        settings = replace(self.settings, run_dir=folder / "run", snapshot_every=10**9, progress=False)
        return TrainRequest(self.path, self.given, settings), folder, self.schedule.warmup, self.schedule.steps


def rank_of_job(*args: Any) -> int:
    """Imports torch where the launcher does not."""
    from stepladder.tools.profiler.of_job import profile_job

    return profile_job(*args)


@dataclass(frozen=True)
class ProfiledScript:
    """A script as it is. threads: intra-op, or None for its own choice."""

    script: Script
    schedule: Schedule
    threads: int | None

    @property
    def name(self) -> str:
        return Path(self.script.name).stem

    def run(self, nproc: int, folder: Path) -> int:
        with self._observed(folder):
            code = run_script(self.script, Options(), Topology(nproc=str(nproc)), RendezvousFlags())
        if not code:
            self._refuse_short(folder, nproc)
        return code

    def be_rank(self, world: World, folder: Path) -> int:
        with self._observed(folder):
            code = subprocess.call(self.script.command())
        if not code and world.is_first:  # a rank leaves when the others' traces are there too
            self._refuse_short(folder, world.world_size)
        return code

    @contextmanager
    def _observed(self, folder: Path) -> Iterator[None]:
        """Scripts that are started in this block leave their traces in `folder`."""
        threads = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        about = {"folder": folder.absolute(), "warmup": self.schedule.warmup, "steps": self.schedule.steps}
        with environment(**threads, **QUIET), observed_by(CapturedSteps, **about):
            yield

    def _refuse_short(self, folder: Path, nproc: int) -> None:
        """Raises InputError where a rank has made fewer steps than the window needs."""
        script, schedule = self.script, self.schedule
        counts = [int(file.read_text()) for file in folder.glob("rank-*.steps")]
        made = min(counts) if len(counts) >= nproc else 0
        if made == 0:
            raise InputError(
                f"{script.name} made no optimizer step: only steps of a torch.optim.Optimizer are seen",
                f"stepladder run --nproc {nproc} {' '.join([script.name, *script.args])}, to see what it does",
            )
        if made < schedule.end:
            most = max(1, made - 1)
            raise InputError(
                f"{script.name} made {made} optimizer steps, but --warmup {schedule.warmup} and"
                f" --steps {schedule.steps} need {schedule.end}",
                "let it train for longer"
                if made < 2
                else f"--warmup {made - min(schedule.steps, most)} --steps {min(schedule.steps, most)}",
            )
