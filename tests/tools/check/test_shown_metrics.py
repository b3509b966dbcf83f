"""Metrics and gradients that are known by their values, in recordings made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from check_recordings import backward, batch, eval_pass, evidence_of, forward, rules_of, train_pass
from stepladder.tools.check.probe.hooks_statistics import is_mean_over_batch
from stepladder.tools.check.rules.all_rules import apply_rules

Events = list[dict[str, Any]]
LOSSES = [0.5, 0.25, 1.5]
UNEVEN = [[0, 1], [2, 3], [4]]
OTHERS = [[5, 6], [7, 8], [9]]
SHOW = {"k": "print", "at": ["train.py", 9, "main"]}
REDUCE = {"k": "coll", "at": ["train.py", 8, "main"], "op": "all_reduce", "shape": [1], "count": 1}


def statistic(value: float, is_mean: bool = True) -> dict[str, Any]:
    return {"k": "statistic", "at": ["train.py", 7, "test"], "value": value, "is_mean": is_mean}


def evaluation(
    values: Sequence[float],
    batches: list[list[int]],
    *after: dict[str, Any],
    is_mean: bool = True,
    rank: int = 0,
) -> Events:
    """An evaluation after some training, with one value for each batch."""
    events: Events = [
        {**eval_pass(3, [])[0], "shuffle": False, "distributed": False, "replicas": None}
    ]
    for value, indices in zip(values, batches, strict=True):
        events += [batch(3, indices), forward(grad=False), statistic(value, is_mean)]
    trained = train_pass(1, [[4, 5], [6, 7]] if rank else [[0, 1], [2, 3]])
    return [*trained, *events, {"k": "endpass", "number": 3, "cut": False, "steps": 0}, *after]


def show(value: object) -> dict[str, Any]:
    return SHOW | {"text": f"loss {value}"}


MEAN_OF_MEANS, MEAN_OF_SAMPLES, BY_SAMPLES = "0.7500", "0.6000", "0.4500"


@pytest.mark.parametrize(
    ("value", "rules"),
    [
        (MEAN_OF_MEANS, ["mean-of-means"]),
        (MEAN_OF_SAMPLES, []),
        (BY_SAMPLES, ["mean-divided-twice"]),
        ("0.8", []),
        ("0.75", []),  # two digits may be a coincidence
    ],
)
def test_a_mean_that_is_shown_is_known_by_its_value(value: str, rules: list[str]) -> None:
    events = evaluation(LOSSES, UNEVEN, show(value))
    assert rules_of(events, train_pass(1, [[4, 5], [6, 7]])) == rules


TRAINS = """def train(loader):
    for x, y in loader:
        total += loss(x, y).item()
    return total / len(loader)
"""


@pytest.mark.parametrize(("value", "found"), [("0.750000", True), ("0.600000", False)])
def test_a_mean_of_means_of_a_training_is_a_note_on_the_line_that_shows_it(
    value: str, found: bool
) -> None:
    events = train_pass(1, UNEVEN)
    means = iter(LOSSES)
    trained: Events = []
    for event in events:
        line = 2 if event["k"] == "pass" else 9
        trained.append(event | {"at": ["train.py", line, "train"]})
        if event["k"] == "forward":
            trained.append(statistic(next(means)))
    findings = [
        finding
        for finding in apply_rules(evidence_of([*trained, show(value)], text=TRAINS))
        if finding.rule == "mean-of-means"
    ]
    assert [(f.severity, f.location.line) for f in findings] == [("note", 9)] * found


def test_the_exact_mean_of_another_pass_is_no_mean_of_means_by_chance() -> None:
    events = evaluation(LOSSES, UNEVEN, show(MEAN_OF_MEANS))
    first = next(number for number, event in enumerate(events) if event["k"] == "forward")
    trained = [*events[: first + 1], statistic(float(MEAN_OF_MEANS)), *events[first + 1 :]]
    second = [number for number, event in enumerate(trained) if event["k"] == "forward"][1]
    trained.insert(second + 1, statistic(float(MEAN_OF_MEANS)))
    assert rules_of(trained, train_pass(1, [[4, 5], [6, 7]])) == []


def test_a_zero_is_shown_for_any_small_number() -> None:
    events = evaluation([2e-8, 1e-8, 3e-8], UNEVEN, *[show("0.0000")] * 6)
    assert rules_of(events, train_pass(1, [[4, 5], [6, 7]])) == []


def test_a_number_that_is_shown_again_proves_nothing_more() -> None:
    events = evaluation(LOSSES, UNEVEN, *[show("0.75")] * 6)
    assert rules_of(events, train_pass(1, [[4, 5], [6, 7]])) == []


def test_a_share_of_hits_in_percent_is_a_mean_of_its_batches_too() -> None:
    hits = evaluation([2, 2, 0], UNEVEN, show("66.667"), is_mean=False)
    assert rules_of(hits, train_pass(1, [[4, 5], [6, 7]])) == ["mean-of-means"]
    by_samples = evaluation([2, 2, 0], UNEVEN, show("80.000"), is_mean=False)
    assert rules_of(by_samples, train_pass(1, [[4, 5], [6, 7]])) == []


def reduced_in_each_batch(values: list[float], rank: int, *after: dict[str, Any]) -> Events:
    events = evaluation(values, UNEVEN[:2], *after, rank=rank)
    return [
        part
        for event in events
        for part in (
            [event, REDUCE | {"value": [event["value"]]}] if "is_mean" in event else [event]
        )
    ]


@pytest.mark.parametrize(("value", "rules"), [("2.0000", ["local-count"]), ("1.0000", [])])
def test_a_mean_of_sums_over_the_ranks_is_named_too(value: str, rules: list[str]) -> None:
    first = reduced_in_each_batch([0.25, 0.75], 0, show(value))
    assert rules_of(first, reduced_in_each_batch([1.25, 1.75], 1)) == rules


def shares(*texts: str, after: Sequence[dict[str, Any]] = ()) -> list[Events]:
    hits = [[1, 2, 0], [2, 0, 0]]
    batches = [[[0, 1], [2, 3], [8, 9]], [[4, 5], [6, 7], [10, 11]]]
    return [
        evaluation(hits[rank], batches[rank], *after, show(text), is_mean=False, rank=rank)
        for rank, text in enumerate(texts)
    ]


def test_a_share_that_each_rank_prints_is_named_unless_its_rank_is() -> None:
    assert rules_of(*shares("50.00 %", "33.33 %")) == ["one-rank-metric"]
    assert rules_of(*shares("of rank 0: 50.00 %", "of rank 1: 33.33 %")) == []
    assert rules_of(*shares("3.2 s", "3.4 s")) == []


@pytest.mark.parametrize(("others", "rules"), [(OTHERS, ["one-rank-metric"]), (UNEVEN, [])])
def test_a_rank_that_evaluates_all_samples_shows_no_share(
    others: list[list[int]], rules: list[str]
) -> None:
    """Its running statistics may be others than those of the other rank."""
    first = evaluation([0.5123, 0.2519, 1.5317], UNEVEN, show(0.61202))
    assert rules_of(first, evaluation([0.4, 0.3, 1.2], others, rank=1)) == rules


def test_what_ranks_print_after_a_reduction_to_the_first_is_their_share() -> None:
    to_first = [REDUCE | {"op": "reduce", "value": [3.0]}]
    to_all = [REDUCE | {"value": [3.0]}]
    assert rules_of(*shares("41.67 %", "33.33 %", after=to_first)) == ["one-rank-metric"]
    assert rules_of(*shares("41.67 %", "41.67 %", after=to_all)) == []


SHARES = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]  # of the 8 samples


def counted(*texts: str) -> list[Events]:
    hits = [[2, 1], [1, 1]]
    return [
        evaluation(hits[rank], SHARES[rank], show(text), is_mean=False, rank=rank)
        for rank, text in enumerate(texts)
    ]


def test_a_sum_of_a_share_by_the_length_of_all_is_named_in_training_too() -> None:
    assert rules_of(*counted("37.500 %", "")) == ["one-rank-metric"]
    trained = [train_pass(1, share) for share in SHARES]
    part = [*trained[0][:2], statistic(2, False), *trained[0][2:7], statistic(1, False)]
    part += trained[0][7:]
    assert rules_of([*part, show("0.3750")], trained[1]) == ["one-rank-metric"]
    assert rules_of([*part, show("0.7500")], trained[1]) == []


def test_a_sum_of_all_by_the_count_of_one_is_named_by_its_value() -> None:
    to_all = REDUCE | {"value": [3.0]}
    for text, rules in (("125.00 %", ["local-count"]), ("62.50 %", [])):
        ranks = counted(text, "")
        assert rules_of([*ranks[0][:-1], to_all, ranks[0][-1]], [*ranks[1], to_all]) == rules


OWN_LOSSES = [[2.5, 1.25, 0.375], [3.125, 2.25, 1.25]]  # of two batches of 2, and one of 1
OF_RANK_0 = {"mean": "1.5750", "mean over batches": "1.3750", "sum": "4.1250"}


def trained(rank: int, *after: dict[str, Any], during: Sequence[dict[str, Any]] = ()) -> Events:
    """Two passes with a loss for each batch, and what is shown after each."""
    events: Events = []
    for number in (1, 2):
        made = train_pass(number, (UNEVEN, OTHERS)[rank], 3 * number, length=10)
        losses = iter(OWN_LOSSES[rank])
        for event in made[:-1]:
            events.append(event)
            if event["k"] == "forward":
                events += [statistic(next(losses)), *during]
        events += [made[-1], *after]
    return events


def notes_of(*ranks: Events) -> list[tuple[str, str]]:
    findings = apply_rules(evidence_of(*ranks, text="sampler.set_epoch(epoch)"))
    return [(f.severity, f.evidence) for f in findings if f.rule == "one-rank-loss"]


@pytest.mark.parametrize("name", OF_RANK_0)
def test_a_training_loss_of_one_rank_is_a_note_that_says_what_it_is(name: str) -> None:
    ((severity, text),) = notes_of(trained(0, show(OF_RANK_0[name])), trained(1))
    assert severity == "note"
    assert text.endswith("5 of 10 samples (batches: 3); the mean over all samples is 1.9875")
    assert name.split()[0] in text


@pytest.mark.parametrize(
    "text",
    [
        "rank 0: loss 1.5750",
        "[GPU0] loss 1.5750",
        "[0] loss 1.5750",
        "loss 1.9875",
        "loss of rank 0 1.5750, of all 1.9875",
        "loss 1.5750, of all 1.9875",
        "loss 1.58",
        "epoch 1, step 5",
    ],
)
def test_a_loss_that_is_of_all_or_names_its_rank_is_none(text: str) -> None:
    assert notes_of(trained(0, SHOW | {"text": text}), trained(1)) == []


def test_a_line_of_progress_or_one_that_is_of_one_rank_by_chance_is_none() -> None:
    assert notes_of(trained(0, during=[show("2.5000")]), trained(1)) == []
    assert notes_of(trained(0, show("1.5750")), trained(0)) == []
    other = [event for event in trained(0, show("1.5750")) if event["k"] != "print"]
    assert notes_of([*other, show("1.5750")], trained(1)) != []
    twice = trained(0, show("1.5750"), show("1.5800"))
    assert notes_of(twice, trained(1)) == []


def test_what_each_rank_shows_is_none_where_the_rank_is_named() -> None:
    own = ["1.5750", "2.4000"]
    named = [trained(rank, show(f"{own[rank]} on worker {rank}")) for rank in (0, 1)]
    assert notes_of(*named) == []
    assert len(notes_of(*(trained(rank, show(own[rank])) for rank in (0, 1)))) == 1


@pytest.mark.parametrize(("rows", "found"), [((4, 2), True), ((4, 4), False)])
def test_a_quotient_of_each_rank_that_is_reduced_is_known_by_its_value(
    rows: tuple[int, int], found: bool
) -> None:
    def evaluated(count: int) -> Events:
        total = statistic(1.5, is_mean=False)
        return [forward(grad=False, size=count), total, REDUCE | {"value": [1.5 / count]}]

    assert ("mean-of-means" in rules_of(*map(evaluated, rows))) == found


def test_a_mean_of_other_numbers_of_values_on_each_rank_is_known_where_it_is_reduced() -> None:
    ranks = [
        [statistic(mean) | {"count": count}, REDUCE | {"value": [mean]}]
        for mean, count in ((1.25, 6), (5.5, 2))
    ]
    assert rules_of(*ranks) == ["mean-of-means"]


def test_a_loss_of_logarithms_has_a_cause_of_its_own() -> None:
    losses = [backward(-1 / number, twice="no logarithm") for number in range(1, 4)]
    (finding,) = apply_rules(evidence_of([forward(), *losses]))
    assert finding.rule == "activation-twice"
    assert "log_softmax" in finding.fix


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"reduction": "mean"}, True),
        ({"reduction": "sum"}, False),
        ({"size_average": False}, False),
        ({"reduce": False}, False),
    ],
)
def test_a_loss_is_a_mean_unless_an_option_says_otherwise(
    options: dict[str, Any], expected: bool
) -> None:
    assert is_mean_over_batch(options) is expected


def logged(rank: int, *texts: str, before: bool = False) -> Events:
    """Steps, of each of which a number is shown before or after its backward pass."""
    events: Events = []
    for loss, text in zip(((2.5, 1.25, 0.375), (3.125, 2.25, 1.25))[rank], texts, strict=True):
        order = [backward(loss), SHOW | {"text": text}]
        events += [forward(), *(order[::-1] if before else order)]
    return events


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["loss 2.5000", "loss 1.2500", "loss 0.3750"], True),
        (["loss 10.000", "loss 5.0000", "loss 1.5000"], True),  # 4 micro-batches
        (["loss 2.8125", "loss 1.7500", "loss 0.8125"], False),  # the mean
        (["loss 2.5000", "loss 1.2500", "loss 0.8125"], False),  # not each time
        (["loss 2.5000 of 2.8125", "loss 1.2500 of 1.7500", "loss 0.3750 of 0.8125"], False),
        (["[rank 0] 2.5000", "[rank 0] 1.2500", "[rank 0] 0.3750"], False),
        (["loss 2.5000", "loss 1.8750", "loss 1.3750"], False),  # a running mean
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_line_that_shows_the_loss_of_a_ranks_own_batch_is_a_note(
    texts: list[str], found: bool, before: bool
) -> None:
    silent = [e for e in logged(1, "", "", "") if e["k"] != "print"]
    assert bool(notes_of(logged(0, *texts, before=before), silent)) == found


def test_a_count_with_repeated_samples_is_named_beside_a_metric_of_one_rank() -> None:
    """A value that each rank shows of its share, and a count that is added up over the ranks."""
    repeated = {"indices": [10, 0], "rows": ["row 10", "row 0"]}
    ranks = [
        [
            e
            | ({"distributed": True, "replicas": 2} if e["k"] == "pass" else {})
            | (repeated if e.get("indices") == [10, 11] else {})
            for e in events
        ]
        for events in shares("41.667 %", "33.333 %", after=[REDUCE | {"value": [6.0]}])
    ]
    assert {"padded-evaluation", "one-rank-metric"} <= set(rules_of(*ranks))
