"""One training to compare with others, in a run directory of its own, and the bench that makes them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepladder.core import durable
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.storage.rundir import METRICS, RESULT
from stepladder.tools.ranks import on_ranks
from stepladder.tools.verify.on_ranks import ABOUT, STOPPED_BY_GUARD, answer, answer_file, last_step, train_trial
from stepladder.train.determinism import BufferChanged


@dataclass(frozen=True)
class Trial:
    """A training that has ended. sizes: processes, one number after the other where it was resumed."""

    folder: Path
    sizes: list[int]

    def read(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def steps(self) -> int:
        return int((self.read(ABOUT) or {})["steps"])

    @property
    def weights_sha256(self) -> str | None:
        return (self.read(RESULT) or {}).get("weights_sha256")

    def size_at(self, step: int) -> int:
        """The number of processes that trained this step."""
        ends = (last_step(self.steps, part, len(self.sizes)) for part in range(1, len(self.sizes)))
        return self.sizes[sum(end < step for end in ends)]

    def losses(self) -> dict[int, float]:
        lines = map(json.loads, (self.folder / METRICS).read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def remove(self) -> None:
        shutil.rmtree(self.folder)


@dataclass
class Bench:
    """Makes trials of one job. settings: as for `train`; asked: steps, or None.  tolerance: 0 means equal bits."""

    folder: Path
    job_file: Path
    given: dict[str, Any]
    settings: Settings
    asked: int | None
    tolerance: float
    count: int = field(default=0)

    def train(self, sizes: list[int]) -> Trial:
        """Train on so many processes; with several numbers, stop and resume on the next one."""
        self.count += 1
        trial = Trial(self.folder / f"trial-{self.count}", sizes)
        settings = replace(
            self.settings, run_dir=trial.folder, snapshot_every=1, keep=10**9, guard_every=1, progress=False
        )
        for number, size in enumerate(sizes, 1):
            try:
                self._run(train_part, (self.job_file, self.given, settings, self.asked, number, len(sizes)), size)
            except InputError:
                if not trial.read(STOPPED_BY_GUARD):
                    raise
            if trial.read(STOPPED_BY_GUARD):
                break
        return trial

    def ask(self, size: int) -> list[dict[str, Any]]:
        """Every rank's answers about the job, on so many processes."""
        self._run(answer, (self.job_file, self.given, replace(self.settings, run_dir=self.folder)), size)
        return [json.loads(answer_file(self.folder, size, rank).read_text()) for rank in range(size)]

    def _run(self, work: Any, args: tuple[Any, ...], size: int) -> None:
        on_ranks(work, args, size, self.settings.threads or 1, self.job_file)


def train_part(path: Path, given: dict[str, Any], settings: Settings, asked: int | None, *part: int) -> int:
    """What a rank does. A buffer that exact mode refuses is a difference that has a name before it happens."""
    try:
        return train_trial(path, given, settings, asked, *part)
    except BufferChanged as error:
        found = {"step": getattr(error, "step", 1), "tensor": error.buffer, "kind": "buffer", "cause": error.found}
        durable.write(settings.run_dir / STOPPED_BY_GUARD, json.dumps(found), fsync=False)
        raise
