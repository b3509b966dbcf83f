"""Rules about weights, gradients and steps, on recordings made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from check_recordings import ALONE, Events, backward, evidence_of, forward, rules_of, step, steps
from stepladder.tools.check.rules.all_rules import apply_rules


def test_a_training_without_a_step_is_named_and_one_by_hand_is_not() -> None:
    def trained(*weights: str) -> list[str]:
        passes = [backward(n, weights=digest) for n, digest in enumerate(weights, 1)]
        return rules_of([{"k": "optimizer"}, *passes], [])

    assert trained(*"aaaaaa") == ["learns-nothing"]
    assert trained(*"aabbcc") == []
    assert trained(*"aa") == []


def test_shards_of_other_weights_are_named_unless_weights_are_loaded_later() -> None:
    def cut(digest: str, *after: dict[str, Any]) -> Events:
        return [{"k": "sharding", "weights": {"head": digest}}, *after]

    trained = steps(step(1))
    load = {"k": "loadsd", "strict": True, "own": 2, "more": 0, "fewer": 0}
    assert rules_of(cut("a", *trained), cut("b", *trained)) == ["replicas-differ"]
    assert rules_of(cut("a", *trained), cut("a", *trained)) == []
    assert rules_of(cut("a", load, *trained), cut("b", load, *trained)) == []
    assert rules_of(cut("a"), cut("b")) == [], "nothing is trained"


@pytest.mark.parametrize(
    ("strategy", "severity"),
    [("", "note"), ("SHARD_GRAD_OP", "note"), ("NO_SHARD", "error"), ("HYBRID_SHARD", "error")],
)
def test_copies_of_other_weights_are_an_error_and_mixed_shards_a_note(
    strategy: str, severity: str
) -> None:
    ranks = [
        [{"k": "sharding", "weights": {"head": digest}, "strategy": strategy}, *steps(step(1))]
        for digest in "ab"
    ]
    (finding,) = apply_rules(evidence_of(*ranks))
    assert (finding.rule, finding.severity) == ("replicas-differ", severity)


@pytest.mark.parametrize(("other_sum", "found"), [(2.0002, []), (2.1, ["not-wrapped"])])
def test_gradients_that_differ_by_rounding_alone_were_exchanged(
    other_sum: float, found: list[str]
) -> None:
    """An exchange by messages from rank to rank is recorded by its result alone."""
    ranks = [
        [
            e | {"grads": {"w": digest}, "sums": [1.0, value]} if e["k"] == "prestep" else e
            for e in [{"k": "who"}, *ALONE]
        ]
        for digest, value in [("g", 2.0), ("h", other_sum)]
    ]
    assert rules_of(*ranks) == found


@pytest.mark.parametrize(("third", "found"), [("x", []), ("y", ["not-wrapped"])])
def test_weights_that_are_the_same_again_after_they_differed_were_averaged(
    third: str, found: list[str]
) -> None:
    """Federated averaging, or local steps: by messages from rank to rank, which are not recorded."""
    ranks = [
        [
            {"k": "who"},
            *(
                e | {"grads": {"w": name}, "before": {"w": weights}} if e["k"] == "prestep" else e
                for number, weights in enumerate(["w", name, "x" if name == "g" else third], 1)
                for e in [forward(wrapped=""), backward(number), *step(number)]
            ),
        ]
        for name in "gh"
    ]
    assert [rule for rule in rules_of(*ranks) if rule == "not-wrapped"] == found


@pytest.mark.parametrize(("factor", "found"), [(0.5, False), (1.0, True), (0.25, True)])
def test_gradients_that_the_script_divides_before_the_step_are_of_the_mean(
    factor: float, found: bool
) -> None:
    events: Events = []
    for number in (1, 2):
        before, after = step(number)
        passes = [forward(sync=False), backward(number, scale=1.0)] * 2
        left = {"k": "gradients", "sums": [2.0, -4.0]}
        used = {"sums": [2.0 * factor, -4.0 * factor]}
        events += [*passes, left, before | used, after]
    assert ("accumulation-mean" in rules_of(events, [])) == found


@pytest.mark.parametrize(
    ("event", "rules"),
    [
        ({"library": "horovod.torch", "averages": True}, []),
        ({"library": "TCPStore", "averages": False}, ["not-wrapped"]),
    ],
)
def test_a_library_that_averages_gradients_is_known_by_its_use(
    event: dict[str, Any], rules: list[str]
) -> None:
    other = [e | {"grads": {"w": "h"}} if e["k"] == "prestep" else e for e in ALONE]
    used = {"k": "othergroup", **event}
    assert rules_of([used, *ALONE], [used, *other]) == rules


@pytest.mark.parametrize(
    ("rates", "scheduled", "found"),
    [
        ([0.3, 0.2, 0.1, 0.0, 0.0, 0.0], True, True),
        ([0.0, 0.1, 0.2, 0.3, 0.2, 0.1, 0.0], True, False),  # a warm-up, and an end at 0
        ([0.0] * 6, True, False),
        ([0.3, 0.2, 0.1, 0.0, 0.0, 0.0], False, False),  # a player that waits for its turn
    ],
)
def test_a_rate_that_a_schedule_leaves_at_0_is_named_whoever_steps_it(
    rates: list[float], scheduled: bool, found: bool
) -> None:
    """A library may step a schedule once for each process, so that it is over half way."""
    schedule = {"k": "sched", "schedule": 1, "cls": "LambdaLR", "horizon": None, "direct": False}
    stepped = [schedule, schedule] if scheduled else []
    events = [e for n, rate in enumerate(rates, 1) for e in [*step(n, lr=[rate]), *stepped]]
    findings = [f for f in apply_rules(evidence_of(events, events)) if "schedule" in f.rule]
    assert [f.evidence for f in findings] == [
        "the learning rate is 0 in 3 of 6 steps; the schedule is stepped 12 times"
    ] * found
