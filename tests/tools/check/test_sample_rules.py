"""Rules about samples and random numbers, on recordings made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_recordings import (
    LOADER,
    ZERO,
    Events,
    backward,
    batch,
    evidence_of,
    forward,
    rules_of,
    source,
    step,
    train_pass,
)
from stepladder.tools.check.events import Fetch, PassStart, ProcessStart
from stepladder.tools.check.recording import read_recording
from stepladder.tools.check.rules.all_rules import apply_rules
from stepladder.tools.check.rules.evidence import RunEvidence
from stepladder.tools.check.rules.samples import can_miss_by_chance
from stepladder.tools.probe.events import ProbeEvent


def test_ranks_that_hold_other_samples_are_named_before_both_have_read_one() -> None:
    def severities(second: list[float], replicas: int = 2, drawn: str = "randperm") -> list[str]:
        passes = [
            train_pass(1, [[*range(8 * rank, 8 * rank + 8)]], replicas=replicas, held=held)
            for rank, held in enumerate((values, second))
        ]
        draws = [{"k": "draw", "fn": drawn, "state": ""}]
        findings = apply_rules(evidence_of([*draws, *passes[0]], passes[1]))
        return [finding.severity for finding in findings if finding.rule == "own-task"]

    values = [float(number % 7) for number in range(16)]
    others = [float(number % 5) for number in range(16)]
    noisy = [value + 0.1 * other for value, other in zip(values, others, strict=True)]
    assert severities(others) == ["warning"]
    assert severities(others, drawn="randn") == ["note"]
    assert severities(values) == []
    assert severities(noisy) == [], "the same samples, with noise"
    assert severities([]) == [], "not known"
    assert severities(others, replicas=1) == [], "each reads all of its own"


def test_samples_that_each_rank_has_changed_in_its_own_way_are_named() -> None:
    def is_named(*held: list[float]) -> bool:
        passes = [
            train_pass(1, [[*range(8 * rank, 8 * rank + 8)]], replicas=2, held=values)
            for rank, values in enumerate(held)
        ]
        return "own-task" in rules_of(*passes)

    values = [float(number % 7) for number in range(16)]
    assert is_named(values, [(value - 3) / 2 for value in values])
    assert not is_named(values, [value * (1 + 1e-6) for value in values]), "rounding"
    assert not is_named(values, values)
    assert not is_named(values[:8], [2 * value for value in values[:8]]), "too few"


@pytest.mark.parametrize(
    ("given", "after", "found"),
    [
        ([2.0, 1.5], [], True),  # what is given to the model has changed
        ([], [], True),  # it is not known
        ([2.0, 1.0], [], False),  # the loader's own rows: what was drawn is shown, at most
        ([2.0, 1.0], [{"k": "draw", "at": ["train.py", 9, ""], "fn": "randn"}], True),
    ],
)
def test_equal_draws_are_named_where_training_may_depend_on_them(
    given: list[float], after: Events, found: bool
) -> None:
    drawn = [{"k": "draw", "at": ["train.py", 4, ""], "fn": "randn"}, forward(sums=given), *after]
    ranks = [
        [
            part
            for n in (1, 2, 3)
            for part in [
                batch(1, rows) | {"sums": [2.0, 1.0]},
                *(e | {"state": f"s{n}"} for e in drawn),
                backward(n),
            ]
        ]
        for rows in ([0, 2], [0, 3])
    ]
    assert ("same-augmentation" in rules_of(*ranks)) == found


def dropout_calls(rank: str, state: str) -> Events:
    """Return three steps of a model with a layer of dropout, on samples of one rank."""
    calls = [(n, f"{rank}{n}", f"{state}{n}") for n in (1, 2, 3)]
    return [
        event
        for n, row, random in calls
        for event in [forward(rows=[row], drops=1, random=random), backward(n), *step(n)]
    ]


def test_dropout_that_is_alike_on_two_ranks_is_named() -> None:
    seeded = [{"k": "seeded", "at": ["train.py", line, "main"]} for line in (1, 2)]
    ranks = dropout_calls("a", "s"), dropout_calls("b", "s")
    (finding,) = apply_rules(evidence_of([*seeded, *ranks[0]], ranks[1]))
    assert (finding.rule, finding.severity) == ("same-augmentation", "note")
    assert finding.location.line == 2
    assert rules_of(dropout_calls("a", "s"), dropout_calls("b", "t")) == []
    divided = [{"k": "divided"}, *dropout_calls("a", "s")]
    assert rules_of(divided, dropout_calls("b", "s")) == [], "parts of one model"


def test_dropout_that_is_alike_in_one_whole_epoch_is_named() -> None:
    """A test by rank 0 alone draws from the CPU's generator, which a GPU's dropout has not."""

    def two_epochs(rank: str, *states: str) -> Events:
        return [
            event
            for number, state in enumerate(states, 1)
            for event in [
                {"k": "pass", "number": number, **LOADER},
                *dropout_calls(rank, state),
                {"k": "endpass", "number": number, "cut": False},
            ]
        ]

    def named(*states: str) -> bool:
        ranks = (two_epochs("a", "s", "t"), two_epochs("b", *states))
        return "same-augmentation" in rules_of(*ranks)

    assert named("s", "u")
    assert not named("v", "u")
    assert not named("v", "s"), "other states in each epoch"


def test_two_nodes_that_read_one_share_are_told_that_it_is_that_of_their_local_rank() -> None:
    asked = {"k": "readrank", "name": "LOCAL_RANK"}
    passes = [[asked, *train_pass(1, ZERO, sampler_rank=0)] for _ in range(2)]
    (finding,) = apply_rules(evidence_of(*passes))
    assert finding.rule == "same-samples"
    assert "take the share of rank 0, the local rank of each" in finding.evidence
    passes = [[asked, *train_pass(1, ZERO, sampler_rank=rank)] for rank in range(2)]
    (finding,) = apply_rules(evidence_of(*passes))
    assert "share of rank" not in finding.evidence


def test_a_worker_belongs_to_the_process_that_made_it_also_where_it_has_no_rank(
    tmp_path: Path,
) -> None:
    def write(pid: int, *events: ProbeEvent) -> None:
        lines = [event.to_line(number, None) for number, event in enumerate(events, 1)]
        (tmp_path / f"{pid}.jsonl").write_bytes(b"".join(lines))

    fetches = [Fetch(indices=[n], used={"rng": "s"}, worker=n, parent=99) for n in (0, 1)]
    write(99, ProcessStart(rank=-1), PassStart(number=1))
    write(999, ProcessStart(rank=-1), fetches[0])
    write(1000, ProcessStart(rank=-1), fetches[1])
    recording = read_recording(tmp_path)
    (log,) = recording.ranks
    assert [event.worker for event in log.worker_events if isinstance(event, Fetch)] == [0, 1]
    (finding,) = apply_rules(RunEvidence(recording, source()))
    assert finding.evidence == (
        "worker 0 and worker 1 draw the same random numbers (rng generator) for samples [0] and [1]"
    )


@pytest.mark.parametrize(
    ("count", "unread_counts", "is_likely"),
    [
        (2, [96] * 5, True),  # one is to be expected
        (96, [96] * 5, False),  # the same in all passes
        (6, [20, 20], True),
        (20, [20, 20], False),
        (0, [0, 20], True),
        (200, [200, 200], False),  # a factorial of 200 is no float
    ],
)
def test_shuffled_remainders_have_samples_in_common_by_chance(
    count: int, unread_counts: list[int], is_likely: bool
) -> None:
    assert can_miss_by_chance(count, 300, unread_counts) is is_likely
