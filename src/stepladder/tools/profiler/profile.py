"""`stepladder profile`: runs a job or a script under torch.profiler, and says where its steps go."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.tools.pages.page import write_whole
from stepladder.tools.profiler.advice import Advice, Profile, advise
from stepladder.tools.profiler.clocks import align, merge
from stepladder.tools.profiler.parts import as_json, rank_profiles, top_operators
from stepladder.tools.profiler.trace import Trace

RESULT, MERGED, TENSORBOARD = "profile.json", "merged.json", "tensorboard"
Run = Callable[[Path], int]  # runs the ranks; their traces go to the folder; the exit code


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


def record(name: str, run: Run, out: Path, world: World | None = None) -> Found | int:
    """Run the ranks, and leave in `out` what their traces say; or the exit code of ranks that failed.

    world: of one of several ranks that another launcher has started, perhaps on several machines. Their traces
    meet beside `out`, which all of them must see; the first rank's is the result, the others' an exit code.
    """
    refuse_foreign(out)
    if world is None or world.world_size == 1:
        with tempfile.TemporaryDirectory(prefix="stepladder-profile-") as scratch:
            return run(Path(scratch)) or examined(name, Path(scratch), out)
    shared = out.with_name(f"{out.name}.traces")
    if not world.is_first:
        return run(shared)
    shutil.rmtree(shared, ignore_errors=True)  # before it meets the others, who write only after they have met
    shared.mkdir(parents=True)
    try:
        return run(shared) or examined(name, shared, out)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


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
