"""What each rank does for `stepladder verify`: trains some steps, or answers questions about the job."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd as Dropout

from stepladder.core.order import key
from stepladder.core.plan import Plan, Span
from stepladder.core.settings import Settings, TrainRequest
from stepladder.train.batchnorm import batch_norms
from stepladder.train.job import Job
from stepladder.train.replica_check import ReplicasDiffer, fingerprint
from stepladder.train.run import meeting
from stepladder.train.spec import RunSpec
from stepladder.train.trainer import Trainer

ABOUT, STOPPED_BY_GUARD = "trial.json", "replicas-differ.json"
STEPS = 12
PROBED_SAMPLES = 8  # at least: enough for two uneven parts


def train_trial(
    path: Path, given: dict[str, Any], settings: Settings, asked: int | None, part: int, parts: int
) -> int:
    """Train up to the end of one part of the steps to verify. What the guard finds goes into a file."""
    with meeting(TrainRequest(path, given, settings)) as (build, recipe, comm):
        job = replace(build(), eval_data=None, best=None)
        spec = RunSpec.of(job, settings, recipe, comm)
        steps = steps_to_train(spec.plan, spec.num_steps, asked)
        if comm.world.is_first:
            settings.run_dir.mkdir(parents=True, exist_ok=True)
            write(settings.run_dir / ABOUT, {"steps": steps, "tensors": tensors_of(job.model)})
        try:
            Trainer(job, replace(settings, steps=last_step(steps, part, parts)), recipe, comm).fit()
        except ReplicasDiffer as error:
            if comm.world.is_first:
                found = {"step": error.at, "tensor": error.tensor, "kind": error.kind, "cause": error.cause}
                write(settings.run_dir / STOPPED_BY_GUARD, found)
    return 0


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


def answer(path: Path, given: dict[str, Any], settings: Settings) -> int:
    """Write this rank's answers about the job: the same questions for every rank and number of processes."""
    with meeting(TrainRequest(path, given, settings)) as (build, recipe, comm):
        job = build()
        spec = RunSpec.of(job, settings, recipe, comm)
        torch.set_num_threads(spec.threads)
        job.model.to(comm.device)
        comm.broadcast_model(job.model)
        answers = Probe(job, spec).answers()
    write(answer_file(settings.run_dir, comm.world.world_size, comm.world.rank), answers)
    return 0


class Probe:
    """Asks a job's loss the same thing in several ways, with equal weights, data and seeds."""

    def __init__(self, job: Job, spec: RunSpec) -> None:
        self.job, self.spec, self.model = job, spec, job.model
        lo, hi = spec.plan.batch(0)
        self.count = min(hi - lo, max(spec.plan.microbatch, PROBED_SAMPLES))

    def answers(self) -> dict[str, Any]:
        norms = batch_norms(self.model)
        known = {id(b) for layer in norms for b in layer.buffers()}
        watched = {name: fingerprint(b) for name, b in self.model.named_buffers() if id(b) not in known}
        self.model.train()
        first, again = self.ask(0, self.count), self.ask(0, self.count)
        buffers = dict(self.model.named_buffers())
        changed = [name for name, before in watched.items() if fingerprint(buffers[name]) != before]
        self.model.eval()  # dropout and batch norm may depend on the batch: the loss itself may not
        third = self.count // 3
        return {
            "threads": torch.get_num_threads(),
            "samples": self.spec.plan.num_samples,
            "data": fingerprint(list(map(fingerprint, leaves(self.batch(0, self.count))))).hex(),
            "loss": first, "again": again, "whole": self.ask(0, self.count),
            "parts": [self.ask(0, third), self.ask(third, self.count)] if third else [],
            "buffers": changed, "batch_norm": bool(norms),
            "dropout": any(isinstance(m, Dropout) and m.p for m in self.model.modules()),
        }  # fmt: skip

    def batch(self, lo: int, hi: int) -> Any:
        indices = self.spec.plan.indices(0, Span(0, lo, hi))
        return next(iter(self.spec.train_source.batches([(0, indices)])))[1]

    @torch.no_grad()
    def ask(self, lo: int, hi: int) -> list[float]:
        """The loss's sum and count over samples [lo, hi) of the first step."""
        batch = self.batch(lo, hi)
        torch.manual_seed(key(self.spec.plan.seed, "probe"))
        result = self.job.loss(self.model, batch)
        total, count = result if isinstance(result, tuple) else (result * (hi - lo), hi - lo)
        return [float(total), float(count)]


def answer_file(folder: Path, world_size: int, rank: int) -> Path:
    return folder / f"answers-{world_size}.rank-{rank}.json"


def leaves(tree: Any) -> list[Any]:
    """The tensors and other values of a nested batch, in order."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves(value)]
    return leaves(asdict(tree)) if is_dataclass(tree) and not isinstance(tree, type) else [tree]


def write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))
