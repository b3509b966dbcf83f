"""Why two trainings differ: what the job answers to the same questions on every rank, and what that
speaks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd as Dropout

from stepladder.core.order import derive_seed
from stepladder.core.plan import Span
from stepladder.core.settings import Settings, TrainRequest
from stepladder.tools.verify.trial import Difference
from stepladder.train.batch_norm import find_batch_norms
from stepladder.train.fingerprints import fingerprint
from stepladder.train.job import Job
from stepladder.train.job_runner import join_process_group
from stepladder.train.run_spec import RunSpec

PROBED_SAMPLES = 8  # at least: enough for two uneven parts
ROUNDING = 1e-4  # of a loss in fp32, over a batch and over its parts

NONDETERMINISTIC = "a non-deterministic operation, or a random number without a seed: two equal runs differ as well"


@dataclass(frozen=True)
class Symptoms:
    """What is known of a difference. answers: those of every rank, on both numbers of processes.

    resumed: one of the two runs was stopped and resumed.
    """

    found: Difference
    answers: list[dict[str, Any]]
    settings: Settings
    resumed: bool

    @property
    def exact(self) -> bool:
        """Equal bits were asked for."""
        return self.settings.sync == "exact"

    @property
    def one_pass(self) -> bool:
        """Each rank takes its share in one pass."""
        return not self.exact and self.settings.microbatch is None

    def values(self, name: str) -> list[Any]:
        """Every rank's answer, if they are not all the same; else nothing."""
        values = [answer[name] for answer in self.answers]
        return values if any(value != values[0] for value in values) else []


def likely_cause(symptoms: Symptoms) -> str:
    """The first cause that the symptoms speak for, as a sentence."""
    return next(text.format(what) for speaks, text in CAUSES if (what := speaks(symptoms)))


def different_counts(symptoms: Symptoms) -> str:
    """What the loss counts for one batch, where ranks do not agree."""
    counts = {count for _, count in (answer["loss"] for answer in symptoms.answers)}
    return " and ".join(f"{count:g}" for count in sorted(counts)) if len(counts) > 1 else ""


def is_no_sum(symptoms: Symptoms) -> bool:
    """Whether the loss of a batch is another than that of its parts."""
    answer = symptoms.answers[0]
    if symptoms.exact or not answer["parts"]:
        return False
    whole, parts = answer["whole"], [sum(values) for values in zip(*answer["parts"], strict=True)]
    means = [total / count for total, count in (whole, parts) if count]
    return len(means) == 2 and abs(means[0] - means[1]) > ROUNDING * max(map(abs, means))


# What of the symptoms speaks for a cause, and the cause, with {} for that.
CAUSES: tuple[tuple[Callable[[Symptoms], Any], str], ...] = (
    (
        lambda s: " and ".join(map(str, sorted(set(s.values("threads"))))),
        "another thread count: ranks compute with {} threads; leave torch.set_num_threads to --threads",
    ),
    (
        lambda s: s.found.step == 0 and s.found.kind in ("parameter", "buffer"),
        "weights initialised by the rank or the number of processes: seed them by --seed alone",
    ),
    (
        lambda s: s.values("data") or s.values("samples"),
        "a rank-seeded random number in the data: build makes other data by rank or number of processes",
    ),
    (
        different_counts,
        "a mean of means: for one batch the loss counts {}, by the number of processes",
    ),
    (
        lambda s: s.values("loss"),
        "a rank-seeded random number: with equal weights, batch and seed the loss is another on another rank or"
        " number of processes",
    ),
    (
        lambda s: s.found.kind == "buffer" and ", ".join(s.answers[0]["buffers"]),
        "a buffer that forward changes ({}), from what one rank alone has seen",
    ),
    (
        lambda s: any(answer["again"] != answer["loss"] for answer in s.answers),
        "state kept from one call of the loss to the next: a random generator of the job's own, a counter or a"
        " buffer; draw from torch's default generator, which is seeded for each pass",
    ),
    (
        is_no_sum,
        "a mean of means: the loss of a batch is not the sum over its parts; return the sum and what it counts (or"
        " the loss relates samples of a batch to each other: --microbatch)",
    ),
    (
        lambda s: s.one_pass and s.answers[0]["batch_norm"],
        "a batch-norm: it sees each process's own share in one pass; with --microbatch it does not",
    ),
    (
        lambda s: s.one_pass and s.answers[0]["dropout"],
        "dropout: its random numbers are drawn per share in one pass; with --microbatch they are not",
    ),
    (
        lambda s: s.resumed,
        "state that a snapshot does not hold: what is neither parameter, buffer nor optimizer state",
    ),
    (
        lambda s: not s.exact and s.found.step > 1 and (s.found.relative or 1) < 1e-2,
        "rounding that training has amplified, if the steps before agree; with --sync exact there is none",
    ),
    (
        lambda s: True,
        "not found: the job's loss gives every rank the same answer; look at what else reads the number of"
        " processes",
    ),
)


def answer(request: TrainRequest, folder: Path) -> int:
    """Leave this rank's answers in `folder`: the same questions for every rank and number of
    processes.
    """
    with join_process_group(request) as (build, recipe, comm):
        job = build()
        spec = RunSpec.make(job, request.settings, recipe, comm)
        torch.set_num_threads(spec.threads)
        job.model.to(comm.device)
        comm.broadcast_model(job.model)
        answers = Probe(job, spec).answers()
    (folder / f"{comm.world.rank}.json").write_text(json.dumps(answers), encoding="utf-8")
    return 0


class Probe:
    """Asks a job's loss the same thing in several ways, with equal weights, data and seeds."""

    def __init__(self, job: Job, spec: RunSpec) -> None:
        self.job, self.spec, self.model = job, spec, job.model
        lo, hi = spec.plan.batch(0)
        self.count = min(hi - lo, max(spec.plan.microbatch, PROBED_SAMPLES))

    def answers(self) -> dict[str, Any]:
        norms = find_batch_norms(self.model)
        known = {id(b) for layer in norms for b in layer.buffers()}
        watched = {
            name: fingerprint(b) for name, b in self.model.named_buffers() if id(b) not in known
        }
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
            "loss": first,
            "again": again,
            "whole": self.ask(0, self.count),
            "parts": [self.ask(0, third), self.ask(third, self.count)] if third else [],
            "buffers": changed,
            "batch_norm": bool(norms),
            "dropout": any(isinstance(m, Dropout) and m.p for m in self.model.modules()),
        }

    def batch(self, lo: int, hi: int) -> Any:
        indices = self.spec.plan.indices(0, Span(0, lo, hi))
        return next(iter(self.spec.train_source.batches([(0, indices)])))[1]

    @torch.no_grad()
    def ask(self, lo: int, hi: int) -> list[float]:
        """The loss's sum and count over samples [lo, hi) of the first step."""
        batch = self.batch(lo, hi)
        torch.manual_seed(derive_seed(self.spec.plan.seed, "probe"))
        result = self.job.loss(self.model, batch)
        total, count = result if isinstance(result, tuple) else (result * (hi - lo), hi - lo)
        return [float(total), float(count)]


def leaves(tree: Any) -> list[Any]:
    """The tensors and other values of a nested batch, in order."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves(value)]
    return leaves(vars(tree)) if is_dataclass(tree) and not isinstance(tree, type) else [tree]
