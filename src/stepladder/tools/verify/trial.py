"""One training to compare with others, in a run directory of its own, and what each rank does for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stepladder.core import durable
from stepladder.core.plan import Plan
from stepladder.core.settings import TrainRequest
from stepladder.storage.rundir import METRICS, RESULT
from stepladder.train.determinism import BufferChanged
from stepladder.train.replica_check import ReplicasDiffer, fingerprint
from stepladder.train.run import meeting
from stepladder.train.spec import RunSpec
from stepladder.train.trainer import Trainer

ABOUT, STOPPED_BY_GUARD = "trial.json", "replicas-differ.json"
STEPS = 12


@dataclass(frozen=True)
class Trial:
    """A training that has ended. sizes: processes, one number after the other where it was resumed."""

    folder: Path
    sizes: list[int]

    def read(self, name: str) -> dict[str, Any]:
        """A file of the run directory; nothing where it is not there."""
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def steps(self) -> int:
        return int(self.read(ABOUT)["steps"])

    @property
    def weights_sha256(self) -> str | None:
        return self.read(RESULT).get("weights_sha256")

    def size_at(self, step: int) -> int:
        """The number of processes that trained this step."""
        ends = (last_step(self.steps, part, len(self.sizes)) for part in range(1, len(self.sizes)))
        return self.sizes[sum(end < step for end in ends)]

    def losses(self) -> dict[int, float]:
        lines = map(json.loads, (self.folder / METRICS).read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def train_part(request: TrainRequest, asked: int | None, part: int, parts: int) -> int:
    """What a rank does: train up to the end of one part of the steps. What the guard finds goes into a file."""
    run_dir = request.settings.run_dir
    with meeting(request) as (build, recipe, comm):
        job = replace(build(), eval_data=None, best=None)
        spec = RunSpec.of(job, request.settings, recipe, comm)
        steps = steps_to_train(spec.plan, spec.num_steps, asked)
        if comm.world.is_first:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / ABOUT).write_text(json.dumps({"steps": steps, "tensors": tensors_of(job.model)}))
        settings = replace(request.settings, steps=last_step(steps, part, parts))
        try:
            Trainer(job, settings, recipe, comm).fit()
        except ReplicasDiffer as error:
            _say_why(run_dir, step=error.at, tensor=error.tensor, kind=error.kind, cause=error.cause)
        except BufferChanged as error:  # of exact mode: a difference that has a name before it happens
            step = getattr(error, "step", 1)
            _say_why(run_dir, step=step, tensor=error.buffer, kind="buffer", cause=error.found)
            raise
    return 0


def _say_why(run_dir: Path, **found: Any) -> None:
    """Whole, for several ranks may say it at once. found: fields of Difference."""
    durable.write(run_dir / STOPPED_BY_GUARD, json.dumps(found), fsync=False)


def steps_to_train(plan: Plan, num_steps: int, asked: int | None) -> int:
    """About 12, or past the first epoch's end and its short last batch where that is near."""
    near = plan.steps_per_epoch + 1 if plan.steps_per_epoch < 2 * STEPS else STEPS
    return min(num_steps, asked or max(STEPS, near))


def last_step(steps: int, part: int, parts: int) -> int:
    """Where part 1, 2, ... of so many ends."""
    return max(part, steps * part // parts)


def tensors_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """Per tensor of a snapshot, in registration order, its kind and its value before the first step as a hash."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: ["parameter" if name in params else "buffer", fingerprint(tensor).hex()]
        for name, tensor in model.state_dict().items()
    }
