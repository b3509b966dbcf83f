"""`stepladder profile`: runs a job or a script under torch.profiler, and says where its steps go."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from stepladder.core.cores import refuse_too_many, threads_per_rank
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.launcher.local.group import LocalGroup
from stepladder.launcher.local.ranks import run_local
from stepladder.launcher.nodes.rendezvous_flags import RendezvousFlags
from stepladder.launcher.options import Options
from stepladder.launcher.run import run_script
from stepladder.launcher.script import Script
from stepladder.launcher.topology import Topology
from stepladder.tools.page import write_whole
from stepladder.tools.profiler import script_observer
from stepladder.tools.profiler.advice import Advice, Profile, advise
from stepladder.tools.profiler.clocks import align, merge
from stepladder.tools.profiler.parts import as_json, rank_profiles, top_operators
from stepladder.tools.profiler.trace import Trace
from stepladder.tools.steps.hook import environment, observed_by

RESULT, MERGED, TENSORBOARD = "profile.json", "merged.json", "tensorboard"
QUIET = {"KINETO_LOG_LEVEL": "99"}  # torch 2.13's prints two lines per rank otherwise
Run = Callable[[Path], int]  # runs the ranks; their traces go to the folder; the exit code


@dataclass(frozen=True)
class Schedule:
    """steps: optimizer steps that are recorded, after `warmup` others."""

    warmup: int
    steps: int

    @property
    def end(self) -> int:
        return self.warmup + self.steps


@dataclass(frozen=True)
class Found:
    """What `profile` has found, and where it lies. clock: how the ranks' clocks were aligned."""

    job: str
    out: Path
    clock: str
    profile: Profile
    advice: list[Advice]

    def as_json(self) -> dict[str, Any]:
        operators = [asdict(operator) for operator in self.profile.operators]
        return {
            "schema": 1, "job": self.job, "out": str(self.out), "steps": self.profile.ranks[0].steps,
            "clock": self.clock, "ranks": [as_json(rank) for rank in self.profile.ranks],
            "operators": operators, "advice": [asdict(one) for one in self.advice],
        }  # fmt: skip


def of_job(path: Path, given: dict[str, Any], settings: Settings, nproc: int, schedule: Schedule) -> Run:
    """How to run a job for its profile. Raises InputError for more processes than this machine should start."""
    refuse_too_many(nproc)

    def run(folder: Path) -> int:
        own = replace(settings, run_dir=folder / "run", snapshot_every=10**9, progress=False)
        args = (path, given, own, folder, schedule.warmup, schedule.steps)
        with environment(**QUIET):
            group = LocalGroup(threads_per_rank(settings, nproc), settings.timeout)
            return run_local(group, rank_of_job, args, nproc, max_restarts=0)

    return run


def of_rank(path: Path, given: dict[str, Any], settings: Settings, schedule: Schedule) -> Run:
    """How to be one of a job's ranks, in this process."""

    def run(folder: Path) -> int:
        own = replace(settings, run_dir=folder / "run", snapshot_every=10**9, progress=False)
        with environment(**QUIET):
            return rank_of_job(path, given, own, folder, schedule.warmup, schedule.steps)

    return run


def rank_of_job(*args: Any) -> int:
    """Imports torch where the launcher does not."""
    from stepladder.tools.profiler.of_job import profile_job

    return profile_job(*args)


def of_script(script: Script, nproc: int, schedule: Schedule, threads: int | None) -> Run:
    """How to run a script for its profile. Raises InputError, at the run, where it ends before the window does."""

    def run(folder: Path) -> int:
        with observed(folder, schedule, threads):
            code = run_script(script, Options(), Topology(nproc=str(nproc)), RendezvousFlags())
        if not code:
            refuse_short(script, folder, nproc, schedule)
        return code

    return run


def of_script_s_rank(script: Script, world: World, schedule: Schedule, threads: int | None) -> Run:
    """How to run a script as one rank that another launcher has started. Raises InputError as `of_script` does."""

    def run(folder: Path) -> int:
        with observed(folder, schedule, threads):
            code = subprocess.call(script.command())
        if not code and world.is_first:  # a rank leaves when the others' traces are there too
            refuse_short(script, folder, world.world_size, schedule)
        return code

    return run


@contextmanager
def observed(folder: Path, schedule: Schedule, threads: int | None) -> Iterator[None]:
    """Scripts that are started in this block leave their traces in `folder`."""
    about = {
        script_observer.FOLDER: str(folder.absolute()), script_observer.WARMUP: str(schedule.warmup),
        script_observer.STEPS: str(schedule.steps), **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    }  # fmt: skip
    with observed_by(script_observer.__name__, **about, **QUIET):
        yield


def refuse_short(script: Script, folder: Path, nproc: int, schedule: Schedule) -> None:
    """Raises InputError where a rank has made fewer steps than the window needs."""
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


def record(name: str, run: Run, out: Path) -> Found | int:
    """Run the ranks, and leave in `out` what their traces say; or the exit code of ranks that failed."""
    refuse_foreign(out)
    with tempfile.TemporaryDirectory(prefix="stepladder-profile-") as scratch:
        code = run(Path(scratch))
        if code:
            return code
        return examined(name, Path(scratch), out)


def record_as_rank(name: str, run: Run, out: Path, world: World) -> Found | int:
    """The same as one of several ranks that another launcher has started, perhaps on several machines: their
    traces meet beside `out`, which all of them must see. The first rank's is the result, the others' an exit code.
    """
    refuse_foreign(out)
    scratch = out.with_name(f"{out.name}.traces")
    if world.is_first:  # before it meets the others, who write only after they have met
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    try:
        return run(scratch) or (examined(name, scratch, out) if world.is_first else 0)
    finally:
        if world.is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def examined(name: str, folder: Path, out: Path) -> Found:
    """What the traces of a folder say; they move to `out`."""
    files = sorted(folder.glob("*.pt.trace.json"))
    traces = sorted(map(Trace, files), key=lambda trace: trace.rank)
    clock = align(traces)
    profile = Profile(rank_profiles(traces), top_operators(traces))
    found = Found(name, out, clock, profile, advise(profile))
    store(found, traces, files)
    return found


def store(found: Found, traces: list[Trace], files: list[Path]) -> None:
    """In the place of an earlier profile. Its result comes last, and marks the folder as ours."""
    out = found.out
    shutil.rmtree(out / TENSORBOARD, ignore_errors=True)
    (out / TENSORBOARD).mkdir(parents=True)
    for file in files:
        shutil.move(file, out / TENSORBOARD / file.name)
    merge(traces, found.clock, out / MERGED)
    write_whole(out / RESULT, json.dumps(found.as_json(), indent=1))


def refuse_foreign(out: Path) -> None:
    """Raises InputError where a profile would have to replace something else."""
    if blocked := [folder for folder in out.absolute().parents if folder.exists() and not folder.is_dir()]:
        raise InputError(f"--out {out}: {blocked[0]} is no folder", "--out another folder")
    is_there = out.is_symlink() or out.exists()  # a link in a circle does not exist
    if is_there and not (out / RESULT).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} is there already, and no profile", "--out another folder")
    nearest = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    try:
        Path(tempfile.mkdtemp(dir=nearest)).rmdir()
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}", "--out another folder") from error


# -- how it is shown -----------------------------------------------------------------------------------------


def as_tables(found: Found) -> Iterator[Table]:
    """For the terminal: a row per rank, a row per operator."""
    profile = found.profile
    count = profile.ranks[0].steps
    shown = Table(title=f"{found.job}: ms per step, mean of {count} step(s)")
    order = ("data", "forward", "backward", "communication", "waiting", "optimizer", "other")
    for head in ("rank", "step", *order, "overlapped", "Python", "memory MB", *["GPU MB"] * profile.on_gpu):
        shown.add_column(head, justify="right")
    for rank in profile.ranks:
        parts = [milliseconds(rank.parts[part]) for part in order]
        gpu = [megabytes(rank.peak_gpu_bytes)] if profile.on_gpu else []
        shown.add_row(
            str(rank.rank), milliseconds(rank.seconds), *parts, milliseconds(rank.overlapped),
            milliseconds(rank.python), megabytes(rank.peak_bytes), *gpu,
        )  # fmt: skip
    yield shown
    most = Table(title="operators that take most, of their own")
    for head in ("operator", "ms per step", "of the step", "calls per step"):
        most.add_column(head, justify="left" if head == "operator" else "right")
    for operator in profile.operators:
        share = f"{operator.seconds / profile.seconds:.0%}"
        most.add_row(operator.name[:70], milliseconds(operator.seconds), share, f"{operator.calls:g}")
    yield most


def milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.2f}"


def megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.0f}"


def sentences(found: Found) -> Iterator[str]:
    for number, advice in enumerate(found.advice, start=1):
        yield f"{number}. {advice.text}"
    yield f"{found.out / MERGED}: all ranks on one time axis ({found.clock}), for ui.perfetto.dev"
    yield f"{found.out / TENSORBOARD}: a trace per rank; docs/see.md says how TensorBoard shows them"
