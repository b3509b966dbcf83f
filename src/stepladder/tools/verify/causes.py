"""Find the likely cause of a difference between two trainings.

A probe asks the job the same questions on every rank and for both numbers of processes. The first
row of CAUSES for which the answers give evidence is the likely cause.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd as Dropout

from stepladder.core.order import derive_seed
from stepladder.core.plan import Span
from stepladder.core.settings import Settings, TrainRequest
from stepladder.tools.trial.training import open_training
from stepladder.tools.verify.trial import Difference
from stepladder.train.batch_norm import find_batch_norms
from stepladder.train.fingerprints import fingerprint
from stepladder.train.job import Job
from stepladder.train.run_spec import RunSpec

MIN_PROBED_SAMPLES = 8  # enough for two uneven parts
LOSS_ROUNDING = 1e-4  # relative difference of an fp32 loss of a batch and of its parts
ROUNDING_LIMIT = 1e-2  # a larger relative difference is no amplified rounding

NONDETERMINISTIC = (
    "a non-deterministic operation, or a random number without a seed: two equal runs differ as"
    " well"
)
NO_KNOWN_CAUSE = (
    "not found: the job's loss gives every rank the same answer; look at what else reads the number"
    " of processes"
)


@dataclass(frozen=True)
class ProbeResult:
    """What one rank has measured on the first batch. A loss is a pair [sum, count]."""

    threads: int
    num_samples: int
    batch_hash: str
    loss: list[float]
    rerun_loss: list[float]
    eval_loss: list[float]
    eval_part_losses: list[list[float]]  # of two uneven parts of the batch
    changed_buffers: list[str]
    has_batch_norm: bool
    has_dropout: bool


@dataclass(frozen=True)
class Symptoms:
    """A difference and what is known of it.

    `results` has those of every rank, for both numbers of processes; `is_resumed` says whether one
    of the two trainings was stopped and resumed.
    """

    difference: Difference
    results: list[ProbeResult]
    settings: Settings
    is_resumed: bool

    @property
    def is_exact(self) -> bool:
        return self.settings.sync == "exact"

    @property
    def is_one_pass(self) -> bool:
        """Whether each rank computes its share of a batch in one forward pass."""
        return not self.is_exact and self.settings.microbatch is None

    def differs(self, name: str) -> bool:
        """Return whether ranks have different values in this field of ProbeResult."""
        values = [getattr(result, name) for result in self.results]
        return any(value != values[0] for value in values)


def find_likely_cause(symptoms: Symptoms) -> str:
    """Return the first cause for which there is evidence, as a sentence."""
    for find_evidence, text in CAUSES:
        evidence = find_evidence(symptoms)
        if evidence:
            return text.format(evidence)
    return NO_KNOWN_CAUSE


def _find_thread_counts(symptoms: Symptoms) -> str:
    if not symptoms.differs("threads"):
        return ""
    counts = {result.threads for result in symptoms.results}
    return " and ".join(map(str, sorted(counts)))


def _find_loss_counts(symptoms: Symptoms) -> str:
    """Return the counts that the loss gives for one batch, if ranks do not agree on them."""
    counts = {count for _, count in (result.loss for result in symptoms.results)}
    if len(counts) < 2:
        return ""
    return " and ".join(f"{count:g}" for count in sorted(counts))


def _find_changed_buffers(symptoms: Symptoms) -> str:
    if symptoms.difference.kind != "buffer":
        return ""
    return ", ".join(symptoms.results[0].changed_buffers)


def _has_other_initial_weights(symptoms: Symptoms) -> bool:
    difference = symptoms.difference
    return difference.step == 0 and difference.kind in ("parameter", "buffer")


def _has_other_data(symptoms: Symptoms) -> bool:
    return symptoms.differs("batch_hash") or symptoms.differs("num_samples")


def _is_loss_stateful(symptoms: Symptoms) -> bool:
    return any(result.rerun_loss != result.loss for result in symptoms.results)


def _is_loss_not_additive(symptoms: Symptoms) -> bool:
    """Return whether the loss of a batch differs from that of its parts together."""
    result = symptoms.results[0]
    if symptoms.is_exact or not result.eval_part_losses:
        return False
    total, count = result.eval_loss
    parts_total, parts_count = (
        sum(values) for values in zip(*result.eval_part_losses, strict=True)
    )
    if not count or not parts_count:
        return False
    mean = total / count
    parts_mean = parts_total / parts_count
    rounding = LOSS_ROUNDING * max(abs(mean), abs(parts_mean))
    return bool(abs(mean - parts_mean) > rounding)


def _is_amplified_rounding(symptoms: Symptoms) -> bool:
    difference = symptoms.difference
    relative = difference.relative or 1
    return not symptoms.is_exact and difference.step > 1 and relative < ROUNDING_LIMIT


# A function that returns the evidence for a cause, and the cause, with {} for the evidence.
CAUSES: tuple[tuple[Callable[[Symptoms], Any], str], ...] = (
    (
        _find_thread_counts,
        "another thread count: ranks compute with {} threads; leave torch.set_num_threads to"
        " --threads",
    ),
    (
        _has_other_initial_weights,
        "weights initialised by the rank or the number of processes: seed them by --seed alone",
    ),
    (
        _has_other_data,
        "a rank-seeded random number in the data: build makes other data by rank or number of"
        " processes",
    ),
    (
        _find_loss_counts,
        "a mean of means: for one batch the loss counts {}, by the number of processes",
    ),
    (
        lambda symptoms: symptoms.differs("loss"),
        "a rank-seeded random number: with equal weights, batch and seed the loss differs between"
        " ranks or numbers of processes",
    ),
    (
        _find_changed_buffers,
        "a buffer that forward changes ({}), from what one rank alone has computed",
    ),
    (
        _is_loss_stateful,
        "state kept from one call of the loss to the next: a random generator of the job's own, a"
        " counter or a buffer; draw from torch's default generator, which is seeded for each pass",
    ),
    (
        _is_loss_not_additive,
        "a mean of means: the loss of a batch is not the sum over its parts; return the sum and"
        " what it counts (or the loss relates samples of a batch to each other: --microbatch)",
    ),
    (
        lambda symptoms: symptoms.is_one_pass and symptoms.results[0].has_batch_norm,
        "a batch-norm: it sees each process's own share in one pass; with --microbatch it does not",
    ),
    (
        lambda symptoms: symptoms.is_one_pass and symptoms.results[0].has_dropout,
        "dropout: its random numbers are drawn per share in one pass; with --microbatch they are"
        " not",
    ),
    (
        lambda symptoms: symptoms.is_resumed,
        "state that a snapshot does not hold: what is neither parameter, buffer nor optimizer"
        " state",
    ),
    (
        _is_amplified_rounding,
        "rounding that training has amplified, if the steps before agree; with --sync exact there"
        " is none",
    ),
)


def write_probe_result(request: TrainRequest, folder: Path) -> int:
    """Probe the job on this rank and write the result to `folder`; return the exit code."""
    with open_training(request) as training:
        spec = training.make_spec()
        torch.set_num_threads(spec.threads)
        training.job.model.to(training.comm.device)
        training.comm.broadcast_model(training.job.model)
        result = _Probe(training.job, spec).run()
    path = _probe_file(folder, training.comm.world.rank)
    path.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return 0


def read_probe_results(folder: Path, nproc: int) -> list[ProbeResult]:
    paths = [_probe_file(folder, rank) for rank in range(nproc)]
    return [ProbeResult(**json.loads(path.read_bytes())) for path in paths]


def _probe_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


class _Probe:
    """Computes the loss of the first batch in several ways, with equal weights, data and seeds."""

    def __init__(self, job: Job, spec: RunSpec) -> None:
        self.job = job
        self.model = job.model
        self.spec = spec
        lo, hi = spec.plan.batch(0)
        self.num_samples = min(hi - lo, max(spec.plan.microbatch, MIN_PROBED_SAMPLES))

    def run(self) -> ProbeResult:
        count = self.num_samples
        norms = find_batch_norms(self.model)
        hashes = self.hash_buffers(norms)
        self.model.train()
        loss = self.compute_loss(0, count)
        rerun_loss = self.compute_loss(0, count)
        new_hashes = self.hash_buffers(norms)
        changed = [name for name, before in hashes.items() if new_hashes[name] != before]
        # Dropout and batch norm may depend on the batch; the loss itself may not.
        self.model.eval()
        values = list_leaves(self.load_batch(0, count))
        eval_loss = self.compute_loss(0, count)
        third = count // 3
        part_losses = []
        if third:
            part_losses = [self.compute_loss(0, third), self.compute_loss(third, count)]
        return ProbeResult(
            threads=torch.get_num_threads(),
            num_samples=self.spec.plan.num_samples,
            batch_hash=fingerprint([fingerprint(value) for value in values]).hex(),
            loss=loss,
            rerun_loss=rerun_loss,
            eval_loss=eval_loss,
            eval_part_losses=part_losses,
            changed_buffers=changed,
            has_batch_norm=bool(norms),
            has_dropout=any(isinstance(m, Dropout) and m.p for m in self.model.modules()),
        )

    def hash_buffers(self, norms: Sequence[torch.nn.Module]) -> dict[str, bytes]:
        """Return a hash of each buffer, without those of batch norms, which forward may change."""
        excluded = {id(buffer) for layer in norms for buffer in layer.buffers()}
        return {
            name: fingerprint(buffer)
            for name, buffer in self.model.named_buffers()
            if id(buffer) not in excluded
        }

    def load_batch(self, lo: int, hi: int) -> Any:
        indices = self.spec.plan.indices(0, Span(0, lo, hi))
        _, batch = next(iter(self.spec.train_source.batches([(0, indices)])))
        return batch

    @torch.no_grad()
    def compute_loss(self, lo: int, hi: int) -> list[float]:
        """Return the loss's sum and count over samples [lo, hi) of the first step."""
        batch = self.load_batch(lo, hi)
        torch.manual_seed(derive_seed(self.spec.plan.seed, "probe"))
        result = self.job.loss(self.model, batch)
        if isinstance(result, tuple):
            total, count = result
        else:
            count = hi - lo
            total = result * count
        return [float(total), float(count)]


def list_leaves(tree: Any) -> list[Any]:
    """Return the tensors and other values of a nested batch, in order."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in list_leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in list_leaves(value)]
    if is_dataclass(tree) and not isinstance(tree, type):
        return list_leaves(vars(tree))
    return [tree]
