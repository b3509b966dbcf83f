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
class Symptoms:
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


def likely_cause(symptoms: Symptoms) -> str:
    """The first cause that the symptoms speaks for, as a sentence."""
    return next((text for cause in CAUSES if (text := cause(symptoms))), UNKNOWN)


def threads(symptoms: Symptoms) -> str:
    if values := symptoms.values("threads"):
        numbers = " and ".join(map(str, sorted(set(values))))
        return (
            f"another thread count: ranks compute with {numbers} threads; leave torch.set_num_threads to --threads"
        )
    return ""


def start(symptoms: Symptoms) -> str:
    if symptoms.found.step == 0 and symptoms.found.kind in ("parameter", "buffer"):
        return "weights initialised by the rank or the number of processes: seed them by --seed alone"
    return ""


def data(symptoms: Symptoms) -> str:
    if symptoms.values("data") or symptoms.values("samples"):
        return "a rank-seeded random number in the data: build makes other data by rank or number of processes"
    return ""


def counts(symptoms: Symptoms) -> str:
    found = {count for _, count in (answer["loss"] for answer in symptoms.answers)}
    if len(found) > 1:
        numbers = " and ".join(f"{count:g}" for count in sorted(found))
        return f"a mean of means: for one batch the loss counts {numbers}, by the number of processes"
    return ""


def rank_seeded(symptoms: Symptoms) -> str:
    if symptoms.values("loss"):
        return (
            "a rank-seeded random number: with equal weights, batch and seed the loss is another on another"
            " rank or number of processes"
        )
    return ""


def changed_buffer(symptoms: Symptoms) -> str:
    names = symptoms.answers[0]["buffers"]
    if names and symptoms.found.kind == "buffer":
        return f"a buffer that forward changes ({', '.join(names)}), from what one rank alone has seen"
    return ""


def own_state(symptoms: Symptoms) -> str:
    if any(answer["again"] != answer["loss"] for answer in symptoms.answers):
        return (
            "state kept from one call of the loss to the next: a random generator of the job's own, a counter or a"
            " buffer; draw from torch's default generator, which is seeded for each pass"
        )
    return ""


def not_a_sum(symptoms: Symptoms) -> str:
    answer = symptoms.answers[0]
    if symptoms.exact or not answer["parts"]:
        return ""
    whole, parts = answer["whole"], [sum(values) for values in zip(*answer["parts"], strict=True)]
    means = [total / count for total, count in (whole, parts) if count]
    if len(means) == 2 and abs(means[0] - means[1]) > ROUNDING * max(map(abs, means)):
        return (
            "a mean of means: the loss of a batch is not the sum over its parts; return the sum and what it counts"
            " (or the loss relates samples of a batch to each other: --microbatch)"
        )
    return ""


def batch_norm(symptoms: Symptoms) -> str:
    if symptoms.one_pass and symptoms.answers[0]["batch_norm"]:
        return "a batch-norm: it sees each process's own share in one pass; with --microbatch it does not"
    return ""


def dropout(symptoms: Symptoms) -> str:
    if symptoms.one_pass and symptoms.answers[0]["dropout"]:
        return "dropout: its random numbers are drawn per share in one pass; with --microbatch they are not"
    return ""


def not_saved(symptoms: Symptoms) -> str:
    if symptoms.resumed:
        return "state that a snapshot does not hold: what is neither parameter, buffer nor optimizer state"
    return ""


def rounding(symptoms: Symptoms) -> str:
    if not symptoms.exact and symptoms.found.step > 1 and (symptoms.found.relative or 1) < 1e-2:
        return "rounding that training has amplified, if the steps before agree; with --sync exact there is none"
    return ""


CAUSES: list[Callable[[Symptoms], str]] = [
    threads, start, data, counts, rank_seeded, changed_buffer, own_state, not_a_sum, batch_norm, dropout,
    not_saved, rounding,
]  # fmt: skip
UNKNOWN = (
    "not found: the job's loss gives every rank the same answer; look at what else reads the number of processes"
)
