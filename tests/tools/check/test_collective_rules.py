"""Rules about collectives and hangs, on recordings made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from check_recordings import (
    COLL,
    ONE,
    ZERO,
    Events,
    backward,
    eval_pass,
    evidence_of,
    forward,
    rules_of,
    train_pass,
)
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.rank.stacks import Frame
from stepladder.tools.check.rules.all_rules import apply_rules

ON_ONE_RANK = """def train():
    for x, y in loader:
        step(x, y)
    if rank == 0:
        dist.all_reduce(total)
for epoch in range(9):
    train()
"""


@pytest.mark.parametrize(("line", "rules"), [(8, []), (7, ["uneven-steps"])])
def test_a_model_that_one_rank_trains_for_itself_is_no_uneven_loop(
    line: int, rules: list[str]
) -> None:
    """With a loss of its own, at another line than that of the model of all ranks."""
    steps = [event for n in (1, 2) for event in (forward(), backward(at=["train.py", 7, "main"]))]
    own = [forward(), backward(at=["train.py", line, "main"])]
    assert rules_of([*steps, *own], steps) == rules


def test_a_collective_of_one_rank_is_no_uneven_loop() -> None:
    """The rank that waits there has left the loop, and the batches are as many on all ranks."""
    at = {"at": ["train.py", 2, "train"], "way": "train:3 < <module>:7"}
    passes = [train_pass(1, [[0, 2], [4, 6]])[:-1], train_pass(1, [[1, 3], [5, 7], [8, 9]])[:-1]]
    zero, one = ([event | at for event in events] for events in passes)
    waits = COLL | {"way": "train:5 < <module>:7", "at": ["train.py", 5, "train"]}
    evidence = evidence_of([*zero, waits], one, text=ON_ONE_RANK, has_stalled=True)
    (finding,) = apply_rules(evidence)
    assert finding.rule == "collective-order"
    assert "`if rank == 0`, train.py:4" in finding.evidence
    everywhere = ON_ONE_RANK.replace("if rank == 0", "with timer")
    assert rules_of([*zero, waits], one, text=everywhere, has_stalled=True) == ["uneven-steps"]


SKIPS = """def train():
    for x, y in loader:
        loss.backward()
        if loss < 1:
            continue
        dist.all_reduce(loss)
    dist.barrier()
"""


def in_loop(*lines: int, backward_line: int = 3) -> Events:
    """Return what a rank does in SKIPS: a backward pass in one line, a collective in others."""
    events: Events = []
    for line in lines:
        place = {"at": ["train.py", line, "train"], "way": f"train:{line}"}
        done = [forward(), backward(1 / (1 + len(events)))] if line == backward_line else [COLL]
        events += [event | place for event in done]
    return events


def test_a_collective_that_one_rank_skips_is_named_with_the_if_that_decides_it() -> None:
    """DDP's backward pass is what meets it: another number of batches has nothing to do with it."""
    ranks = in_loop(3, 6, 3, 6), in_loop(3, 6, 3, 3)
    (finding,) = apply_rules(evidence_of(*ranks, text=SKIPS, has_stalled=True))
    assert (finding.rule, finding.location.line) == ("collective-order", 6)
    assert "rank 1 goes on" in finding.evidence
    assert "`if loss < 1`, train.py:4" in finding.evidence
    assert rules_of(in_loop(3, 6, 3, 3), in_loop(3, 6, 3, 3), text=SKIPS) == []


def test_an_evaluation_in_its_wrapper_by_one_rank_alone_is_named_where_the_run_fails() -> None:
    text = "for epoch in range(2):\n    train()\n    if first:\n        model(x)\nfirst = get_rank() == 0\n"
    built = {"k": "ddp", "parameters": {}, "buffers": True, "holds_buffers": True}
    trained = [built, *train_pass(1, ZERO)]
    place = {"at": ["train.py", 4, "<module>"], "way": "<module>:4"}
    alone = [event | place for event in eval_pass(2, ZERO, loader=2)]

    def named(*ranks: Events, has_finished: bool = False) -> bool:
        found = rules_of(*ranks, text=text, has_finished=has_finished)
        return "collective-order" in found

    other = train_pass(1, ONE)
    assert named([*trained, *alone], other)
    assert not named([*trained, *alone], other, has_finished=True)
    assert not named([*trained, *alone], [*other, *alone]), "both evaluate"
    assert not named([*trained, *alone, *train_pass(3, ZERO)], other), "it came further"
    assert not named([*trained[1:], *alone], other), "buffers are not broadcast"
    plain = built | {"holds_buffers": False}
    assert not named([plain, *trained[1:], *alone], other), "it has no buffers"
    assert not named([*trained, *alone], []), "the other rank has failed before it trained"


def test_a_rank_that_leaves_the_loop_early_skips_no_collective() -> None:
    evidence = evidence_of(in_loop(3, 6, 3, 6), in_loop(3, 6, 7), text=SKIPS, has_stalled=True)
    assert all("skip" not in finding.what for finding in apply_rules(evidence))


IN_ROUNDS = """def train():
    for number in range(9):
        for chunk in chunks:
            loss.backward()
        if loss > lowest:
            continue
        dist.all_reduce(loss)
"""


def test_a_rank_skips_a_collective_after_the_loop_of_its_backward_passes() -> None:
    events = [in_loop(*lines, backward_line=4) for lines in ([4, 4, 7], [4, 4, 4])]
    (finding,) = apply_rules(evidence_of(*events, text=IN_ROUNDS, has_stalled=True))
    assert (finding.rule, finding.location.line) == ("collective-order", 7)
    assert "`if loss > lowest`, train.py:5" in finding.evidence
    always = IN_ROUNDS.replace("if loss > lowest", "with timer").replace("continue", "pass")
    (finding,) = apply_rules(evidence_of(*events, text=always, has_stalled=True))
    assert finding.rule == "uneven-steps"


MAIN = [Frame("main", "train.py", 4), Frame("<module>", "train.py", 9)]


def waits_in(function: str, stack: list[Frame] = MAIN) -> list[list[Frame]]:
    return [[Frame(function, "/v/site-packages/torch/distributed/distributed_c10d.py", 1), *stack]]


def test_ranks_that_wait_for_each_other_are_named_with_the_line() -> None:
    receiving = [Frame("receive", "train.py", 2), *MAIN]
    statuses = [
        RankStatus(0, 0, threads=waits_in("barrier")),
        RankStatus(1, 0, threads=waits_in("recv", receiving)),
    ]
    (finding,) = apply_rules(
        evidence_of(
            [],
            [],
            text="def receive():\n    dist.recv(x)\n",
            has_stalled=True,
            deadlock=explain_hang(statuses),
        )
    )
    assert (finding.rule, finding.location.line, finding.location.rank) == ("hang", 2, 1)
    assert "rank 1 waits in recv, called by receive()" in finding.evidence


def left_early(way: str, *, returns: bool = False) -> list[list[dict[str, Any]]]:
    """Rank 0 is in a collective after one step of two, and rank 1 in its second backward pass."""
    at = {"at": ["train.py", 2, "train"]}
    passes = [train_pass(1, [[0, 2], [4, 6]])[:-5], train_pass(1, [[1, 3], [5, 7]])[:-3]]
    at["way"] = "train:2"
    zero, one = ([event | at for event in events] for events in passes)
    waits = COLL | {"op": "barrier", "way": way, "at": ["train.py", 5, "train"]}
    return [[*zero, waits, *([{"k": "did"}] if returns else [])], one]


BREAKS = """def train():
    for x, y in loader:
        if step(x, y):
            break
    dist.barrier()
"""
TORN_DOWN = [RankStatus(rank, 0, ProcessState.ABORTED, threads=[[]]) for rank in (0, 1)]


@pytest.mark.parametrize("deadlock", [None, explain_hang(TORN_DOWN)], ids=["ended", "aborted"])
def test_who_has_left_a_loop_is_read_from_what_ranks_have_recorded(deadlock: Any) -> None:
    """So it is the same whenever they are inspected, and whatever gloo has done to them by then."""
    state = {"text": BREAKS, "has_stalled": True, "deadlock": deadlock}
    (finding,) = apply_rules(evidence_of(*left_early("train:5"), **state))
    assert finding.rule == "uneven-steps"
    assert finding.evidence == (
        "rank 0 has left the loop after 1 steps, and rank 1 is in its step 2"
    )
    (finding,) = apply_rules(evidence_of(*left_early("train:3"), **state))
    assert finding.rule == "collective-order"


def test_a_rank_that_raised_has_left_no_loop() -> None:
    state = {"text": BREAKS, "has_stalled": True, "has_raised": True}
    assert rules_of(*left_early("train:5"), **state) == []


def test_parts_of_different_sizes_are_named_where_the_run_came_no_further() -> None:
    gathered = COLL | {"op": "all_gather", "way": "main:4", "at": ["train.py", 4, "main"]}
    sizes = [[gathered | {"shape": [size]}] for size in (53, 52)]
    statuses = [
        RankStatus(0, 0, threads=waits_in("all_gather")),
        RankStatus(1, 0, ProcessState.ABORTED, threads=waits_in("all_gather")),
    ]
    later = [gathered, gathered]  # rank 0 may have come further than the rank that gloo ended
    for more in ([], [gathered | {"shape": [53]}]):
        (finding,) = apply_rules(
            evidence_of(
                [*sizes[0], *more], sizes[1], has_finished=False, deadlock=explain_hang(statuses)
            )
        )
        assert finding.rule == "collective-order" and "pad the tensors" in finding.fix
        assert "of shape [53]" in finding.evidence and "of shape [52]" in finding.evidence
    assert rules_of([*sizes[0], *later], [*sizes[1], *later]) == []  # as NCCL can
