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


@dataclass(frozen=True)
class Cause:
    """speaks: what of the symptoms speaks for it; false where nothing does.  text: with {} for that."""

    speaks: Callable[[Symptoms], Any]
    text: str


def likely_cause(symptoms: Symptoms) -> str:
    """The first cause that the symptoms speak for, as a sentence."""
    return next((cause.text.format(found) for cause in CAUSES if (found := cause.speaks(symptoms))), UNKNOWN)


def changed_buffers(symptoms: Symptoms) -> str:
    return ", ".join(symptoms.answers[0]["buffers"]) if symptoms.found.kind == "buffer" else ""


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


CAUSES = (
    Cause(
        lambda s: " and ".join(map(str, sorted(set(s.values("threads"))))),
        "another thread count: ranks compute with {} threads; leave torch.set_num_threads to --threads",
    ),
    Cause(
        lambda s: s.found.step == 0 and s.found.kind in ("parameter", "buffer"),
        "weights initialised by the rank or the number of processes: seed them by --seed alone",
    ),
    Cause(
        lambda s: s.values("data") or s.values("samples"),
        "a rank-seeded random number in the data: build makes other data by rank or number of processes",
    ),
    Cause(different_counts, "a mean of means: for one batch the loss counts {}, by the number of processes"),
    Cause(
        lambda s: s.values("loss"),
        "a rank-seeded random number: with equal weights, batch and seed the loss is another on another rank or"
        " number of processes",
    ),
    Cause(changed_buffers, "a buffer that forward changes ({}), from what one rank alone has seen"),
    Cause(
        lambda s: any(answer["again"] != answer["loss"] for answer in s.answers),
        "state kept from one call of the loss to the next: a random generator of the job's own, a counter or a"
        " buffer; draw from torch's default generator, which is seeded for each pass",
    ),
    Cause(
        is_no_sum,
        "a mean of means: the loss of a batch is not the sum over its parts; return the sum and what it counts (or"
        " the loss relates samples of a batch to each other: --microbatch)",
    ),
    Cause(
        lambda s: s.one_pass and s.answers[0]["batch_norm"],
        "a batch-norm: it sees each process's own share in one pass; with --microbatch it does not",
    ),
    Cause(
        lambda s: s.one_pass and s.answers[0]["dropout"],
        "dropout: its random numbers are drawn per share in one pass; with --microbatch they are not",
    ),
    Cause(
        lambda s: s.resumed,
        "state that a snapshot does not hold: what is neither parameter, buffer nor optimizer state",
    ),
    Cause(
        lambda s: not s.exact and s.found.step > 1 and (s.found.relative or 1) < 1e-2,
        "rounding that training has amplified, if the steps before agree; with --sync exact there is none",
    ),
)
UNKNOWN = (
    "not found: the job's loss gives every rank the same answer; look at what else reads the number of processes"
)
