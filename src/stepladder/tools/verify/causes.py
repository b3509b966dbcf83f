"""Why two trainings differ: what the job answers to the same question on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepladder.tools.verify.difference import Difference

ROUNDING = 1e-4  # of a loss in fp32, over a batch and over its parts

NONDETERMINISTIC = (
    "a non-deterministic operation, or a random number without a seed: two equal runs differ as well"
)


@dataclass(frozen=True)
class Evidence:
    """What is known of a difference. answers: those of every rank, on both numbers of processes.

    exact: equal bits were asked for.  one_pass: each rank takes its share in one pass.  resumed: one of
    the two runs was stopped and resumed.
    """

    found: Difference
    answers: list[dict[str, Any]]
    exact: bool
    one_pass: bool
    resumed: bool

    def values(self, name: str) -> list[Any]:
        """Every rank's answer, if they are not all the same; else nothing."""
        values = [answer[name] for answer in self.answers]
        return values if any(value != values[0] for value in values) else []


def likely_cause(evidence: Evidence) -> str:
    """The first cause that the evidence speaks for, as a sentence."""
    return next((text for cause in CAUSES if (text := cause(evidence))), UNKNOWN)


def threads(evidence: Evidence) -> str:
    if values := evidence.values("threads"):
        numbers = " and ".join(map(str, sorted(set(values))))
        return (
            f"another thread count: ranks compute with {numbers} threads; leave torch.set_num_threads to --threads"
        )
    return ""


def start(evidence: Evidence) -> str:
    if evidence.found.step == 0 and evidence.found.kind in ("parameter", "buffer"):
        return "weights initialised by the rank or the number of processes: seed them by --seed alone"
    return ""


def data(evidence: Evidence) -> str:
    if evidence.values("data") or evidence.values("samples"):
        return "a rank-seeded random number in the data: build makes other data by rank or number of processes"
    return ""


def counts(evidence: Evidence) -> str:
    found = {count for _, count in (answer["loss"] for answer in evidence.answers)}
    if len(found) > 1:
        numbers = " and ".join(f"{count:g}" for count in sorted(found))
        return f"a mean of means: for one batch the loss counts {numbers}, by the number of processes"
    return ""


def rank_seeded(evidence: Evidence) -> str:
    if evidence.values("loss"):
        return (
            "a rank-seeded random number: with equal weights, batch and seed the loss is another on another"
            " rank or number of processes"
        )
    return ""


def changed_buffer(evidence: Evidence) -> str:
    names = evidence.answers[0]["buffers"]
    if names and evidence.found.kind == "buffer":
        return f"a buffer that forward changes ({', '.join(names)}), from what one rank alone has seen"
    return ""


def own_state(evidence: Evidence) -> str:
    if any(answer["again"] != answer["loss"] for answer in evidence.answers):
        return (
            "state kept from one call of the loss to the next: a random generator of the job's own, a counter or a"
            " buffer; draw from torch's default generator, which is seeded for each pass"
        )
    return ""


def not_a_sum(evidence: Evidence) -> str:
    answer = evidence.answers[0]
    if evidence.exact or not answer["parts"]:
        return ""
    whole, parts = answer["whole"], [sum(values) for values in zip(*answer["parts"], strict=True)]
    means = [total / count for total, count in (whole, parts) if count]
    if len(means) == 2 and abs(means[0] - means[1]) > ROUNDING * max(map(abs, means)):
        return (
            "a mean of means: the loss of a batch is not the sum over its parts; return the sum and what it counts"
            " (or the loss relates samples of a batch to each other: --microbatch)"
        )
    return ""


def batch_norm(evidence: Evidence) -> str:
    if evidence.one_pass and evidence.answers[0]["batch_norm"]:
        return "a batch-norm: it sees each process's own share in one pass; with --microbatch it does not"
    return ""


def dropout(evidence: Evidence) -> str:
    if evidence.one_pass and evidence.answers[0]["dropout"]:
        return "dropout: its random numbers are drawn per share in one pass; with --microbatch they are not"
    return ""


def not_saved(evidence: Evidence) -> str:
    if evidence.resumed:
        return "state that a snapshot does not hold: what is neither parameter, buffer nor optimizer state"
    return ""


def rounding(evidence: Evidence) -> str:
    if not evidence.exact and evidence.found.step > 1 and (evidence.found.relative or 1) < 1e-2:
        return "rounding that training has amplified, if the steps before agree; with --sync exact there is none"
    return ""


CAUSES: list[Callable[[Evidence], str]] = [
    threads, start, data, counts, rank_seeded, changed_buffer, own_state, not_a_sum, batch_norm, dropout,
    not_saved, rounding,
]  # fmt: skip
UNKNOWN = (
    "not found: the job's loss gives every rank the same answer; look at what else reads the number of processes"
)
