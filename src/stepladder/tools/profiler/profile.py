"""Run a job or a script under torch.profiler, and report where the time of its steps goes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepladder.core.durable import remove
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.output_file import write_output
from stepladder.core.scratch import temporary_folder
from stepladder.core.world import World
from stepladder.tools.profiler.advice import Advice, Profile, advise, describe_disturbance
from stepladder.tools.profiler.breakdown import (
    align_clocks,
    choose_typical_steps,
    find_crowded_host,
    find_disturbed_steps,
    find_top_operators,
    make_rank_profiles,
    measure_steps,
)
from stepladder.tools.profiler.merged_trace import write_merged_trace
from stepladder.tools.profiler.trace import Trace

RESULT = "profile.json"
MERGED = "merged.json"
TENSORBOARD = "tensorboard"
UNSTEADY_FACTOR = 1.5  # between the longest and the shortest of the typical steps
Run = Callable[[Path], int]  # runs the ranks, which write their traces to a folder; the exit code


@dataclass(frozen=True)
class ProfileResult:
    """The profile of a job, written to the folder `out`."""

    job: str
    out: Path
    clock: str  # how the ranks' clocks were aligned
    profile: Profile
    advice: list[Advice]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "job": self.job,
            "out": str(self.out),
            "steps": self.profile.ranks[0].steps,
            "disturbed_steps": self.profile.disturbed_steps,
            "clock": self.clock,
            "ranks": [rank.as_json() for rank in self.profile.ranks],
            "operators": [asdict(operator) for operator in self.profile.operators],
            "advice": [asdict(item) for item in self.advice],
        }

    def describe(self) -> Iterator[str]:
        """Yield the advice and the paths of the traces, as lines for the terminal."""
        for number, item in enumerate(self.advice, start=1):
            yield f"{number}. {item.text}"
        disturbance = describe_disturbance(self.profile)
        shortest, longest = self.profile.step_range
        if disturbance:
            yield disturbance
        elif longest > UNSTEADY_FACTOR * shortest:
            yield (
                f"Typical steps took {1e3 * shortest:.3g} to {1e3 * longest:.3g} ms: something else"
                " uses this machine, or steps differ. More --steps make the result steadier."
            )
        yield f"{self.out / MERGED}: all ranks on one time axis ({self.clock}), for ui.perfetto.dev"
        yield f"{self.out / TENSORBOARD}: a trace per rank, for TensorBoard with torch-tb-profiler"


def record_profile(name: str, run: Run, out: Path, world: World) -> ProfileResult | int:
    """Run the ranks, and write their profile to `out`.

    This process may be one of several ranks that another launcher has started on several machines.
    Then the ranks write their traces to a folder next to `out`, which all of them must see; only
    the first rank returns the result.

    Returns:
        The profile, or the exit code of ranks that failed or are not the first.
    """
    _validate_output_folder(out)
    if world.world_size == 1:
        with temporary_folder() as folder:
            return run(folder) or _examine_traces(name, folder, out)
    shared = out.with_name(f"{out.name}.traces")
    if not world.is_first:
        return run(shared)
    if shared.is_dir():  # rmtree would wait for the writer of a FIFO
        # The other ranks write only after they have joined this one, so this removes nothing of
        # theirs.
        shutil.rmtree(shared, ignore_errors=True)
    missing_parents = [parent for parent in shared.absolute().parents if not parent.exists()]
    shared.mkdir(parents=True)
    try:
        return run(shared) or _examine_traces(name, shared, out)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
        for parent in missing_parents:  # empty if there is no profile
            with suppress(OSError):
                parent.rmdir()


def _examine_traces(name: str, folder: Path, out: Path) -> ProfileResult:
    """Make the profile of a folder's traces, and move them to `out`; replace a profile there."""
    paths = sorted(folder.glob("*.pt.trace.json"))
    traces = sorted(map(Trace, paths), key=lambda trace: trace.rank)
    if not traces:
        raise InputError(
            f"{name} was stopped before its steps were recorded", "a later end, or fewer --steps"
        )
    clock = align_clocks(traces)
    step_times = measure_steps(traces)[choose_typical_steps(traces)] / 1e6
    profile = Profile(
        make_rank_profiles(traces),
        find_top_operators(traces),
        (float(step_times.min()), float(step_times.max())),
        int(find_disturbed_steps(traces).sum()),
        find_crowded_host(traces),
    )
    result = ProfileResult(name, out, clock, profile, advise(profile))
    remove(out / TENSORBOARD)
    (out / TENSORBOARD).mkdir(parents=True)
    for path in paths:
        shutil.move(path, out / TENSORBOARD / path.name)
    write_merged_trace(traces, clock, out / MERGED)
    # Last, because this file marks the folder as a profile that may be replaced.
    write_output(out / RESULT, json.dumps(result.as_json(), indent=1), "--out")
    return result


def _validate_output_folder(out: Path) -> None:
    """Raise InputError if a profile would have to replace something else."""
    parents = out.absolute().parents
    for parent in parents:
        if parent.exists() and not parent.is_dir():
            raise InputError(f"--out {out}: {parent} is not a folder", "--out another folder")
    exists = out.is_symlink() or out.exists()  # a circular link does not exist for exists()
    is_profile = (out / RESULT).is_file()
    if exists and not is_profile and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} is there already, and no profile", "--out another folder")
    nearest = next(folder for folder in (out.absolute(), *parents) if folder.is_dir())
    with as_input_error(f"--out {out} cannot be written", "--out another folder"):
        Path(tempfile.mkdtemp(dir=nearest)).rmdir()
