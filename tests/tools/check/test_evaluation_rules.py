"""Rules about evaluations and metrics, on recordings made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from check_recordings import (
    COLL,
    ONE,
    ZERO,
    Events,
    backward,
    epochs,
    eval_pass,
    forward,
    rules_of,
    step,
    steps,
    train_pass,
)


def with_graph(events: Events) -> Events:
    return [e | {"grad": True} if e["k"] == "forward" else e for e in events]


TRAINED = epochs(ZERO, [[2, 0], [4, 6]], loader=2)
OTHERS = epochs(ONE, [[1, 3], [5, 7]], loader=2)
PADDED = eval_pass(3, [[0, 2], [4]])


def test_an_evaluation_with_gradients_is_one_for_all_rules() -> None:
    """Without `no_grad` the samples count twice, too, and dropout is as active."""
    padded = [
        [*TRAINED, *with_graph(PADDED), COLL],
        [*OTHERS, *with_graph(eval_pass(3, [[1, 3], [0]])), COLL],
    ]
    assert rules_of(*padded) == ["eval-keeps-graph", "padded-evaluation"]
    other_split = [*OTHERS, *with_graph(eval_pass(3, [[2, 3], [0]]))]
    assert rules_of(padded[0], other_split) == ["eval-keeps-graph", "overlapping-shards"]
    dropout = [e | {"live": 1} if e["k"] == "forward" else e for e in with_graph(PADDED)]
    assert rules_of([*TRAINED, *dropout], OTHERS) == ["eval-keeps-graph", "no-eval-mode"]


def test_a_pass_over_training_data_before_a_backward_pass_is_no_evaluation() -> None:
    calls = with_graph(PADDED)
    of_training_data = [e | {"loader": 2} if e["k"] == "pass" else e for e in calls]
    assert rules_of([*TRAINED, *of_training_data], OTHERS) == []
    assert rules_of([*TRAINED, *calls, backward(0.1), *step(5)], OTHERS) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("parameters: 5,000", True),
        ("parameters: 5000.", True),
        ("parameters: 10,000", False),
        ("parameters of this shard: 5,000", False),
        ("seconds: 5000.25", False),
    ],
)
def test_a_number_of_parameters_of_one_shard_is_named(text: str, found: bool) -> None:
    trained = [
        event | {"numel": 5000} if event["k"] == "step" else event for event in steps(step(1))
    ]
    trained = [{"k": "print", "text": text}, *trained]
    calls = [e | {"wrapped": FSDP} if e["k"] == "forward" else e for e in trained]
    assert rules_of(calls, calls) == ["one-rank-metric"] * found
    whole = [{"k": "sharding", "weights": {}, "strategy": "NO_SHARD"}, *calls]
    assert rules_of(whole, whole) == []
    assert rules_of(trained, trained) == [], "all ranks have all parameters"


def test_an_evaluation_that_drops_its_last_samples_is_named() -> None:
    def named(*last: int, **loader: Any) -> bool:
        events = [[*epochs(ZERO, [[1, 0], [3, 2]]), *eval_pass(3, [[0, 2], [4]], **loader)]]
        events += [[*epochs(ONE, [[4, 5], [6, 7]]), *eval_pass(3, [[1, 3], [*last]], **loader)]]
        return "samples-lost" in rules_of(*events)

    test = {"loader": 2, "fingerprint": "test", "length": 6, "base_length": 6, "shuffle": False}
    assert named(drop_last=True, **test)
    assert not named(5, drop_last=True, **test), "nothing is left to drop"
    assert not named(**test), "a subset on purpose"
    assert not named(drop_last=True, **test | {"fingerprint": "p"}), "the set that is trained on"


def evaluated_twice(*names: str) -> Events:
    """Return evaluations of one data set, of which each has rows by another name."""
    events: Events = train_pass(1, ZERO)
    for number, name in enumerate(names, 2):
        for event in eval_pass(number, [[0, 1, 2, 3]], distributed=False, loader=2):
            rows = [f"{name}{index}" for index in event.get("indices", ())]
            events.append(event | {"rows": rows} if event["k"] == "batch" else event)
    return events


def test_samples_that_change_from_evaluation_to_evaluation_are_named() -> None:
    assert rules_of(evaluated_twice("a", "b"), train_pass(1, ONE)) == ["augmented-evaluation"]
    assert rules_of(evaluated_twice("a", "a"), train_pass(1, ONE)) == []


FSDP = "FullyShardedDataParallel"


def test_a_loss_by_the_number_of_ranks_is_named_where_a_wrapper_averages() -> None:
    def trained(scale: float, wrapper: str) -> list[str]:
        events = [
            e
            for n in (1, 2)
            for e in [forward(wrapped=wrapper), backward(n, scale=scale), *step(n), COLL]
        ]
        events = [e | {"shape": [10, 10], "count": 100} if e["k"] == "coll" else e for e in events]
        return rules_of(events, events)

    assert trained(0.5, "DistributedDataParallel") == ["mean-divided-twice"]
    assert trained(1.0, "DistributedDataParallel") == []
    assert trained(0.5, "") == []


def test_a_loss_by_the_number_of_backward_passes_of_a_step_is_right() -> None:
    backwards = [forward(), backward(1, scale=0.5), forward(), backward(2, scale=0.5)]
    accumulated = [event for number in (1, 2) for event in [*backwards, *step(number)]]
    assert rules_of(accumulated, accumulated) == ["accumulation-sync"], "each pass communicates"


@pytest.mark.parametrize(
    ("counts", "found"), [((4, 2), True), ((4, 1), False), ((), False)], ids=str
)
def test_gathered_results_count_as_often_as_they_are_added_up(
    counts: tuple[int, ...], found: bool
) -> None:
    """Results that are cut to the length of the data set, or of which nothing is known, are right."""
    gathered = [COLL | {"op": "all_gather"}]
    added = [{"k": "statistic", "value": 1.0, "is_mean": False, "count": n} for n in counts]
    ranks = [[*TRAINED, *PADDED], [*OTHERS, *eval_pass(3, [[1, 3], [0]])]]
    assert rules_of(*ranks) == [], "each rank shows what its own share gives"
    assert rules_of(*([*events, COLL] for events in ranks)) == ["padded-evaluation"]
    both = [[*events, *gathered, *added] for events in ranks]
    assert rules_of(*both) == ["padded-evaluation"] * found
