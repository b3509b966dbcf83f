"""Each rule on a recording made by hand: the mistake is found, and what looks like it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from check_recordings import (
    LOADER,
    backward,
    batch,
    eval_pass,
    evidence_of,
    forward,
    rules_of,
    source,
    step,
    train_pass,
)
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.rank.stacks import Frame
from stepladder.tools.check.events import Fetch, PassStart, ProcessStart
from stepladder.tools.check.recording import read_recording
from stepladder.tools.check.rules.all_rules import apply_rules, apply_source_rules
from stepladder.tools.check.rules.evidence import CHECK_TEXTS, RunEvidence
from stepladder.tools.check.rules.samples import can_miss_by_chance
from stepladder.tools.probe.events import ProbeEvent

Events = list[dict[str, Any]]
ZERO = [[0, 2], [4, 6]]
ONE = [[1, 3], [5, 7]]
TOLD = {"k": "setepoch", "sampler": 7}


def epochs(rank: list[list[int]], second_epoch: list[list[int]], **loader_fields: Any) -> Events:
    return [*train_pass(1, rank, **loader_fields), *train_pass(2, second_epoch, 3, **loader_fields)]


def test_a_run_without_a_mistake_has_no_finding() -> None:
    zero = epochs(ZERO, [[1, 0], [3, 2]])
    events = epochs(ONE, [[4, 5], [6, 7]])
    assert rules_of(zero, events) == []


def steps(*steps_of_events: list[dict[str, Any]], between: Any = None) -> Events:
    return [
        event
        for events in steps_of_events
        for event in [
            forward(),
            backward(len(events) + events[0]["step"]),
            *(between or []),
            *events,
        ]
    ]


SAVED = {
    "k": "save",
    "path": "/w/s.pt",
    "existed": True,
    "model": True,
    "optimizer": True,
    "schedule": False,
    "random": True,
    "position": True,
    "prefixed": False,
    "bare": False,
    "keys": ["model"],
}
COLL = {"k": "coll", "op": "all_reduce", "group": "", "shape": [1], "count": 1, "ptr": 5}
FETCH = {"k": "fetch", "worker": -1, "count": 1}
SCHED = {"k": "sched", "schedule": 1, "cls": "CosineAnnealingLR", "horizon": 3, "direct": True}
ZERO_GRAD = {"k": "zero", "optimizer": 0}
NUMBERED = {"k": "numbered", "at": ["train.py", 1, ""], "count": 2}
MOVED = {"k": "moved", "source": "/w/s.tmp", "target": "/w/s.pt"}
EPOCH = [forward(rows=["a"]), backward(1), *step(1), SAVED | {"path": "/w/s.tmp"}, MOVED]
OTHER_EPOCH = [forward(rows=["b"]), backward(2), *step(2), SAVED | {"path": "/w/s.tmp"}, MOVED]
PLAIN = {"wrapped": "", "class": "Net"}
ALONE = [forward(**PLAIN), backward(2), *step(1), forward(**PLAIN), backward(3), *step(2)]


def weights_of(events: Events, digest: str) -> Events:
    return [e | {"weights": digest} if e["k"] == "forward" else e for e in events]


def other_grads(events: Events) -> Events:
    return [e | {"grads": {"w": "h"}} if e["k"] == "prestep" else e for e in events]


def with_weights(events: Events, digest: str) -> Events:
    return [e | {"before": {"w": digest}} if e["k"] == "prestep" else e for e in events]


def unsynced(rank: str, last: bool = False) -> Events:
    """Two steps of two backward passes each, of which only the first averages gradients."""
    return [
        e
        for n in (1, 2)
        for e in [
            forward(sync=False),
            backward(n, scale=0.5),
            forward(sync=last),
            backward(n + 2, scale=0.5),
            *step(n, grads=rank, before={"w": "w" if last else f"{rank}{n}"}),
        ]
    ]


def accumulated(*sizes: int) -> Events:
    """Two epochs of batches; a step after as many batches as each size says."""
    batches = [[forward(sync=False), backward(n, scale=1.0)] for n in range(sum(sizes))]
    ends = {sum(sizes[: n + 1]): step(n + 1) for n in range(len(sizes))}
    start = {"k": "pass", **LOADER}
    middle = [{"k": "endpass", "number": 1, "cut": False}, start | {"number": 2}]
    half = len(batches) // 2
    events: Events = [start | {"number": 1}]
    for number, passes in enumerate(batches, 1):
        events += [*passes, *ends.get(number, []), *(middle if number == half else [])]
    return [e | {"scale": 0.5} if e["k"] == "backward" else e for e in events]


def shards(*epochs: str) -> Events:
    """Steps on six rows of one shard each, in the order of each epoch."""
    names = "".join(epochs)
    rows = [[f"{shard}{row}" for row in range(6)] for shard in names]
    calls = [[forward(rows=six, size=6), backward(n)] for n, six in enumerate(rows, 1)]
    return [e for n, call in enumerate(calls, 1) for e in [*call, *step(n)]]


def sharded(events: Events, norm: float) -> Events:
    clips = [{"k": "clip", "ptrs": [1], "norm": norm}] * 2
    return [forward(wrapped="FullyShardedDataParallel"), *events, *clips]


BEST = SAVED | {"path": "/w/best.tmp", "optimizer": False, "position": False, "bare": True}
OF_A_PART = [SAVED | {"path": "/w/s.tmp", "numbered": True}, MOVED]

CASES: dict[str, tuple[str, Events, Events]] = {
    "a remainder without a step": (
        "accumulation-mean",
        accumulated(2, 2, 2, 2, 3, 2, 2, 3),
        [],
    ),
    "shards in an order of their own": (
        "overlapping-shards",
        shards("cabd", "abcd"),
        shards("cdef", "cdef"),
    ),
    "norms of parts": (
        "clip-before-average",
        sharded(steps(step(1)), 1.0),
        sharded(steps(step(1)), 2.0),
    ),
    "moments of one part": (
        "incomplete-snapshot",
        [*sharded(steps(step(1)), 1.0), *OF_A_PART],
        sharded(steps(step(1, before={"w": "x"})), 1.0),
    ),
    "the best of one share": (
        "one-rank-metric",
        [*eval_pass(1, ZERO), BEST],
        eval_pass(1, ONE),
    ),
    "the last one alone": ("sync-skipped", unsynced("a"), unsynced("b")),
    "other types": (
        "moved-after-wrapping",
        [{"k": "placed", "before": "cpu in float32", "after": "cpu in bfloat16"}, *steps(step(1))],
        steps(step(1)),
    ),
    "a wrapper in a wrapper": (
        "moved-after-wrapping",
        [{"k": "ddp", "parameters": {}, "nested": "DistributedDataParallel"}, *steps(step(1))],
        steps(step(1)),
    ),
    "splits of their own": (
        "leaked-split",
        [*train_pass(1, [[0, 1], [2, 3]]), *eval_pass(2, [[4, 5], [6]]), COLL],
        [*train_pass(1, [[4, 5], [6, 7]]), *eval_pass(2, [[0, 2], [3]]), COLL],
    ),
    "no number": (
        "not-finite",
        [
            *steps(step(1)),
            {"k": "notfinite", "what": "the loss", "value": "nan", "origin": "from a layer"},
        ],
        steps(step(1)),
    ),
    "all frozen": (
        "frozen-optimizer",
        steps(*(step(n, norm=0.0, frozen_names=["w"]) for n in (1, 2, 3))),
        steps(step(1)),
    ),
    "the same order twice": ("set-epoch", epochs(ZERO, ZERO), epochs(ONE, ONE)),
    "a constant epoch": ("set-epoch", [TOLD | {"value": 0}, *epochs(ZERO, ZERO)], epochs(ONE, ONE)),
    "all read all": ("same-samples", train_pass(1, [*ZERO, *ONE]), train_pass(1, [*ONE, *ZERO])),
    "one share": ("same-samples", train_pass(1, ZERO), train_pass(1, ZERO)),
    "own permutations": (
        "overlapping-shards",
        train_pass(1, [[0, 2], [4, 6]]),
        train_pass(1, [[0, 2], [4, 5]]),
    ),
    "a remainder": (
        "samples-lost",
        epochs([[0, 2], [4]], [[2, 0], [4]]),
        epochs([[1, 3], [5]], [[1, 3], [5]]),
    ),
    "a padded test set": (
        "padded-evaluation",
        eval_pass(1, [[0, 2], [4]]),
        eval_pass(1, [[1, 3], [0]]),
    ),
    "the same noise": (
        "same-augmentation",
        [FETCH | {"indices": [0], "used": {"torch": "s"}}],
        [FETCH | {"indices": [1], "used": {"torch": "s"}}],
    ),
    "an open file": (
        "file-over-fork",
        [{"k": "shared", "path": "dataset.file", "type": "File", "module": "h5py"}],
        [],
    ),
    "a file of the set": (
        "samples-lost",
        [
            {
                "k": "read",
                "path": f"/d/{n}",
                "pattern": "*",
                "beside": ["/d/0", "/d/1", "/d/2", "/d/3", "/d/4"],
            }
            for n in (0, 1)
        ]
        + train_pass(1, ZERO),
        [{"k": "read", "path": f"/d/{n}", "pattern": "*"} for n in (2, 3)] + train_pass(1, ONE),
    ),
    "one batch more": ("uneven-steps", train_pass(1, [[0, 2], [4, 6], [8, 9]]), train_pass(1, ONE)),
    "no wrapper": ("not-wrapped", ALONE, other_grads(ALONE)),
    "another weight": ("replicas-differ", steps(step(1), step(2)), steps(step(1), step(2, "x"))),
    "another weight, and gradients by hand": (
        "replicas-differ",
        [{"k": "who"}, *ALONE],
        [{"k": "who"}, *with_weights(ALONE, "x")],
    ),
    "changed between steps": (
        "changed-outside",
        steps(step(1), step(2)),
        steps(step(1), step(2, before={"w": "x"})),
    ),
    "no gradient": (
        "no-gradient",
        steps(*(step(n, before={"w": f"w{n - 1}", "v": "v"}) for n in (1, 2, 3))),
        steps(step(1)),
    ),
    "four samples a norm": (
        "small-batch-norm",
        [forward(size=4, norms=2)],
        [forward(size=4, norms=2)],
    ),
    "strange parameters": (
        "optimizer-params",
        steps(*(step(n, strangers=1, unheld=["head.weight"]) for n in (1, 2))),
        steps(step(1), step(2)),
    ),
    "four times sent": (
        "accumulation-sync",
        [forward(), backward(1), forward(), backward(2), *step(1)],
        steps(step(1)),
    ),
    "a sum of means": (
        "accumulation-mean",
        [e for n in (1, 2) for e in [*[forward(sync=False), backward(n, scale=1.0)] * 2, *step(n)]],
        [],
    ),
    "a gradient of zero": (
        "learns-nothing",
        steps(*(step(n, norm=0.0) for n in (1, 2, 3))),
        steps(step(1)),
    ),
    "a gradient of zero from a step on": (
        "learns-nothing",
        steps(*(step(n, matrix_norm=float(n < 3)) for n in range(1, 10))),
        steps(step(1)),
    ),
    "a constant loss": (
        "learns-nothing",
        [e for n in range(1, 7) for e in [backward(0.5), *step(n)]],
        steps(step(1)),
    ),
    "never zeroed": (
        "missing-zero-grad",
        steps(*(step(n, clean=n == 1) for n in (1, 2, 3))),
        steps(step(1)),
    ),
    "evaluation goes on": (
        "eval-stays",
        [
            e
            for n in (1, 2, 3)
            for e in [forward(moded=1, moded_on=int(n == 1)), backward(n), *step(n)]
        ],
        [],
    ),
    "it goes on, and each evaluation builds graphs": (
        "eval-stays",
        [
            *[forward(moded=1, moded_on=1), backward(1), *step(1), forward(moded=1)],
            *[e for n in (2, 3) for e in [forward(moded=1), backward(n), *step(n)]],
            forward(moded=1),
        ],
        [],
    ),
    "graphs": (
        "graph-kept",
        [e for n in range(1, 9) for e in [backward(n, alive=n), *step(n)]],
        steps(step(1)),
    ),
    "clipped first": (
        "clip-before-average",
        [{"k": "clip", "ptrs": [5]}, COLL],
        [{"k": "clip", "ptrs": [5]}, COLL],
    ),
    "softmax of a softmax": (
        "activation-twice",
        [e for n in (1, 2) for e in [backward(n, twice="softmax"), *step(n)]],
        [],
    ),
    "a ReLU of scores": (
        "activation-twice",
        [e for n in (1, 2) for e in [backward(n, twice="relu"), *step(n)]],
        [],
    ),
    "a graph for nothing": (
        "eval-keeps-graph",
        [
            *epochs(ZERO, [[2, 0], [4, 6]]),
            *(
                e | {"grad": True} if e["k"] == "forward" else e
                for e in eval_pass(3, ZERO, loader=2)
            ),
        ],
        [],
    ),
    "zeroed in between": (
        "gradients-discarded",
        [
            e
            for n in (1, 2)
            for e in [
                forward(sync=False),
                backward(n),
                ZERO_GRAD,
                forward(),
                backward(n + 2),
                *step(n),
                ZERO_GRAD,
            ]
        ],
        [],
    ),
    "both workers yield all": (
        "workers-repeat",
        train_pass(1, [[0, 2, 4, 6], [0, 2, 4, 6]], iterable=True, workers=2),
        train_pass(1, [[1, 3, 5, 7], [1, 3, 5, 7]], iterable=True, workers=2),
    ),
    "a number of its own": (
        "own-index",
        [NUMBERED | {"values": ["'a'", "'b'"], "digest": "s"}],
        [NUMBERED | {"values": ["'b'", "'c'"], "digest": "t"}],
    ),
    "dropout in a test": (
        "no-eval-mode",
        [e | {"live": 1} if e["k"] == "forward" else e for e in [*eval_pass(1, ZERO), COLL]],
        [*eval_pass(1, ONE), COLL],
    ),
    "an average of its own": (
        "replicas-differ",
        [*steps(step(1), step(2)), *weights_of(eval_pass(1, ZERO), "s"), COLL],
        [*steps(step(1), step(2)), *weights_of(eval_pass(1, ONE), "t"), COLL],
    ),
    "the same epoch in one run": (
        "resume-epoch",
        [
            *EPOCH,
            *OTHER_EPOCH,
            {"k": "load", "path": "/w/s.pt", "weights_only": "True"},
            *OTHER_EPOCH[:3],
        ],
        [],
    ),
    "other counts": ("mean-of-means", [COLL | {"mean_of": 6}], [COLL | {"mean_of": 2}]),
    "rank 0's own": (
        "one-rank-metric",
        [*eval_pass(1, ZERO), {"k": "print", "numbers": 1}],
        eval_pass(1, ONE),
    ),
    "twice a step": (
        "schedule-per-rank",
        [e for n in (1, 2, 3) for e in [*steps(step(n)), SCHED, SCHED]],
        steps(step(1), step(2), step(3)),
    ),
    "past its end": (
        "schedule-per-rank",
        [e for n in range(1, 7) for e in [*steps(step(n)), SCHED]],
        steps(step(1)),
    ),
    "two writers": ("many-writers", [SAVED | {"existed": False}], [SAVED | {"existed": False}]),
    "over the only copy": ("in-place-snapshot", [SAVED], []),
    "no optimizer": (
        "incomplete-snapshot",
        [*steps(step(1, state={"w": "m"})), SAVED | {"optimizer": False, "existed": False}],
        steps(step(1, state={"w": "m"})),
    ),
    "a prefix": (
        "module-prefix",
        [{"k": "loadsd", "more": 2, "fewer": 0, "own": 2, "strict": False}],
        [],
    ),
    "all of it": ("unsafe-load", [{"k": "load", "path": "s.pt", "weights_only": "False"}], []),
    "another collective": ("collective-order", [COLL], [COLL | {"op": "broadcast"}]),
    "one stays away": ("collective-order", [COLL], [{"k": "exit", "group": False}]),
    "a group at the end": (
        "no-destroy",
        [{"k": "init", "direct": True, "backend": "gloo"}, {"k": "exit", "group": True}],
        [],
    ),
}


def with_graph(events: Events) -> Events:
    return [e | {"grad": True} if e["k"] == "forward" else e for e in events]


TRAINED = epochs(ZERO, [[2, 0], [4, 6]], loader=2)
OTHERS = epochs(ONE, [[1, 3], [5, 7]], loader=2)
PADDED = eval_pass(3, [[0, 2], [4]])


def test_an_evaluation_with_gradients_is_one_for_all_rules() -> None:
    """Without `no_grad` the samples count twice, too, and dropout is as active."""
    padded = [[*TRAINED, *with_graph(PADDED)], [*OTHERS, *with_graph(eval_pass(3, [[1, 3], [0]]))]]
    assert rules_of(*padded) == ["eval-keeps-graph", "padded-evaluation"]
    other_split = [*OTHERS, *with_graph(eval_pass(3, [[2, 3], [0]]))]
    assert rules_of(padded[0], other_split) == ["eval-keeps-graph", "overlapping-shards"]
    dropout = [e | {"live": 1} if e["k"] == "forward" else e for e in with_graph(PADDED)]
    assert rules_of([*TRAINED, *dropout], OTHERS) == ["eval-keeps-graph", "no-eval-mode"]
    printed = [{"k": "print", "numbers": 1}]
    shares = [[*TRAINED, *with_graph(PADDED), *printed], [*OTHERS, *with_graph(eval_pass(3, ONE))]]
    assert "one-rank-metric" in rules_of(*shares)


def test_a_pass_over_training_data_before_a_backward_pass_is_no_evaluation() -> None:
    calls = with_graph(PADDED)
    of_training_data = [e | {"loader": 2} if e["k"] == "pass" else e for e in calls]
    assert rules_of([*TRAINED, *of_training_data], OTHERS) == []
    assert rules_of([*TRAINED, *calls, backward(0.1), *step(5)], OTHERS) == []


AVERAGES = {
    "added": "def f():\n    for x, y in loader:\n        total += criterion(model(x), y).item()\n"
    "    return total / len(loader)\n",
    "divided in place": "def f():\n    for x, y in loader:\n        loss += criterion(model(x), y).item()\n"
    "    loss /= max(1, len(loader))\n",
    "listed": "def f():\n    losses = [\n        criterion(model(x), y)\n        for x, y in loader\n    ]\n"
    "    return torch.stack(losses).mean()\n",
    "of each in a dictionary": "def f():\n    for x, y in loader:\n        sums += losses_and_metrics(model(x), y)\n"
    "        n += 1\n    return {k: v / n for k, v in sums.items()}\n",
    "by a name for the length": "def f():\n    batches = len(loader)\n    for x, y in loader:\n"
    "        total += criterion(model(x), y).item()\n    total /= batches\n",
    "at once": "def f():\n    return sum(mse(model(x), y).item() for x, y in loader) / len(loader)\n",
}
WEIGHTED = {
    "of each in a dictionary": "def f():\n    for x, y in loader:\n        sums += losses_and_metrics(model(x), y)\n"
    "        n += len(x)\n    return {k: v / n for k, v in sums.items()}\n",
    "a name for two numbers": "def f():\n    n = len(loader)\n    n = 4\n    for x, y in loader:\n"
    "        total += criterion(model(x), y).item()\n    total /= n\n",
    "by size": "def f():\n    losses = [criterion(model(x), y) * len(x) for x, y in loader]\n"
    "    return torch.stack(losses).sum() / n\n",
    "sums": "def f():\n    losses = [criterion(model(x), y, reduction='sum') for x, y in loader]\n"
    "    return torch.stack(losses).mean()\n",
    "by samples": "def f():\n    for x, y in loader:\n        total += criterion(model(x), y).item() * len(x)\n"
    "    return total / len(loader.dataset)\n",
}


ON_ONE_RANK = """def train():
    for x, y in loader:
        step(x, y)
    if rank == 0:
        dist.all_reduce(total)
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
    at = {"at": ["train.py", 2, "train"]}
    passes = [train_pass(1, [[0, 2], [4, 6]])[:-1], train_pass(1, [[1, 3], [5, 7], [8, 9]])[:-1]]
    zero, one = ([event | at for event in events] for events in passes)
    waits = COLL | {"way": "train:5", "at": ["train.py", 5, "train"]}
    evidence = evidence_of([*zero, waits], one, text=ON_ONE_RANK, has_stalled=True)
    (finding,) = apply_rules(evidence)
    assert finding.rule == "collective-order"
    assert "under `if rank == 0`" in finding.evidence
    everywhere = ON_ONE_RANK.replace("rank == 0", "local_rank != -1")
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
    unsynced_ranks = [[e | {"sync": False} for e in events] for events in ranks]
    assert rules_of(*unsynced_ranks, text=SKIPS) == []


def test_an_evaluation_in_its_wrapper_by_one_rank_alone_is_named_where_the_run_fails() -> None:
    text = "for epoch in range(2):\n    train()\n    if rank == 0:\n        model(x)\n"
    built = {"k": "ddp", "parameters": {}, "buffers": True}
    trained = [built, *train_pass(1, ZERO)]
    trained = [e | {"norms": 1} if e["k"] == "forward" else e for e in trained]
    place = {"at": ["train.py", 4, "<module>"], "way": "<module>:4"}
    alone = [event | place for event in eval_pass(2, ZERO, loader=2)]

    def named(*ranks: Events, text: str = text, has_finished: bool = False) -> bool:
        found = rules_of(*ranks, text=text, has_finished=has_finished)
        return "collective-order" in found

    other = train_pass(1, ONE)
    assert named([*trained, *alone], other)
    assert not named([*trained, *alone], other, has_finished=True)
    assert not named([*trained, *alone], [*other, *alone]), "both evaluate"
    assert not named([*trained, *alone], other, text=text.replace("rank ==", "n =="))
    assert not named([*trained, *alone, *train_pass(3, ZERO)], other), "it came further"
    assert not named([*trained[1:], *alone], other), "buffers are not broadcast"
    plain = [e | {"norms": 0} if e["k"] == "forward" else e for e in trained]
    assert not named([*plain, *alone], other), "no batch norm"


def test_a_rank_that_leaves_the_loop_early_skips_no_collective() -> None:
    evidence = evidence_of(in_loop(3, 6, 3, 6), in_loop(3, 6, 7), text=SKIPS, has_stalled=True)
    assert all("skip" not in finding.what for finding in apply_rules(evidence))


IN_ROUNDS = """def train():
    for number in range(9):
        for chunk in chunks:
            loss.backward()
        if CONDITION:
            continue
        dist.all_reduce(loss)
"""
COMES = (4, 4, 7)


@pytest.mark.parametrize(
    ("condition", "ranks", "rule"),
    [
        ("loss > lowest", ([*COMES, *COMES], [*COMES, 4, 4, 4]), "collective-order"),
        ("rank != 0", ([4, 4, 7], [4, 4, 4]), "collective-order"),
        ("loss > lowest", ([*COMES, 4, 7], [*COMES, 4, 4]), "uneven-steps"),
        ("loss > lowest", ([4, 4, 7], [4, 4, 4]), "uneven-steps"),
    ],
    ids=["as many as before", "by rank", "fewer than before", "first round"],
)
def test_a_rank_skips_a_collective_after_a_loop_or_stays_in_the_loop(
    condition: str, ranks: tuple[list[int], list[int]], rule: str
) -> None:
    text = IN_ROUNDS.replace("CONDITION", condition)
    events = [in_loop(*lines, backward_line=4) for lines in ranks]
    (finding,) = apply_rules(evidence_of(*events, text=text, has_stalled=True))
    assert finding.rule == rule
    if rule == "collective-order":
        assert finding.location.line == 7
        assert f"`if {condition}`, train.py:5" in finding.evidence


def test_a_training_without_a_step_is_named_and_one_by_hand_is_not() -> None:
    def trained(*weights: str) -> list[str]:
        passes = [backward(n, weights=digest) for n, digest in enumerate(weights, 1)]
        return rules_of(passes, [], text="optimizer = torch.optim.SGD(net.parameters(), 0.1)")

    assert trained(*"aaaaaa") == ["learns-nothing"]
    assert trained(*"aabbcc") == []
    assert trained(*"aa") == []


RESUMES = """if os.path.exists(path):
    net.load_state_dict(torch.load(path)["model"])
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (RESUMES, ["incomplete-snapshot"]),
        ("if args.resume:\n    load_checkpoint(args.resume)\n", ["incomplete-snapshot"]),
        ("if os.path.exists(path):\n    os.remove(path)\nmodel = torch.load(path)\n", []),
    ],
)
def test_the_best_model_is_a_snapshot_where_the_script_goes_on_from_it(
    text: str, found: list[str]
) -> None:
    looked = {"k": "looked", "path": "/w/best.pt", "at": ["train.py", 1, "<module>"]}
    best = SAVED | {"path": "/w/best.pt", "optimizer": False, "existed": False}
    trained = steps(step(1, state={"w": "m"}))
    assert rules_of([looked, *trained, best], trained, text=text) == found
    both = [looked, *trained, best, SAVED | {"path": "/w/last.pt", "existed": False}]
    assert rules_of(both, trained, text="if args.resume:\n    torch.load(args.resume)\n") == []


def with_fit(weight: float, shift: float = 0.0) -> Events:
    """Return a training pass of a rank with its own data, whose targets are inputs by a weight."""
    values = [number % 7 - 3 + shift for number in range(40)]
    fit = {"k": "fit", "number": 1, "count": 40, "weights": [[weight, 0.0]]}
    fit |= {"inputs": [values, [1.0] * 40], "targets": [[weight * value for value in values]]}
    return [*train_pass(1, ZERO, fingerprint=f"{weight} {shift}"), fit]


def test_ranks_whose_targets_contradict_each_other_are_named() -> None:
    def named(*ranks: Events) -> bool:
        return "own-task" in rules_of(*ranks)

    assert named(with_fit(1.0), with_fit(-2.0))
    assert not named(with_fit(1.0), with_fit(1.01)), "two shares of one task"
    assert not named(with_fit(1.0), with_fit(-2.0, shift=9.0)), "a task for other inputs"
    assert not named(with_fit(0.0), with_fit(-2.0)), "nothing that can be learned"


def drawn(rank: int, sums: list[float], *names: str) -> Events:
    """Two epochs of 48 samples: each rank reads a half of its samples again, and of the other's.

    The hashes of rows begin with a name for each epoch.
    """
    shares = [*range(24 * rank, 24 * rank + 24)], [*range(12), *range(24, 36)]
    events: Events = []
    for number, (name, share) in enumerate(zip(names, shares, strict=True), 1):
        rows = [f"{name}{index}" for index in share]
        read = {"rows": rows, "sums": [sums[index] for index in share]}
        one_pass = train_pass(number, [share], replicas=2)
        events += [event | read if event["k"] == "batch" else event for event in one_pass]
    return events


def test_ranks_that_hold_other_samples_under_the_same_indices_are_named() -> None:
    def named(*ranks: Events) -> bool:
        return "own-task" in rules_of(*ranks)

    def severity(*ranks: Events) -> str:
        return next(f.severity for f in apply_rules(evidence_of(*ranks)) if f.rule == "own-task")

    values = [float(number % 7) for number in range(48)]
    others = [float(number % 5) for number in range(48)]
    noisy = [value + 0.1 * other for value, other in zip(values, others, strict=True)]
    zero = drawn(0, values, "a", "a")
    ranks = zero, drawn(1, others, "b", "b")
    assert named(*ranks)
    assert severity(*ranks) == "warning"
    assert (
        severity([{"k": "draw", "fn": "randperm", "state": ""}, *ranks[0]], ranks[1]) == "warning"
    )
    assert severity([{"k": "draw", "fn": "randn", "state": ""}, *ranks[0]], ranks[1]) == "note"
    assert not named(zero, drawn(1, noisy, "b", "b")), "noise of each rank"
    assert not named(zero, drawn(1, values, "a", "a")), "the same data set"
    assert not named(zero, drawn(1, others, "b", "c")), "samples that are drawn as they are read"


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


DRAWS = """
for x in loader:
    noise = [
        torch.randn(2),
    ]
    gathered = gather(noise)
    print(len(gathered), loss)
    loss = model(x).sum()
    loss.backward()
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", False),
        ("model(x)", "model(x + noise[0])", True),
        ("print(len(gathered), loss)", "x.add_(noise[0])", True),
        ("gathered = gather(noise)", "if noise[0].any(): x = x.flip(0)", True),
        ("noise = [", "yield [", True),
        ("loss.backward()", "train(loss)", True),
    ],
)
def test_equal_draws_are_named_where_training_may_depend_on_them(
    old: str, new: str, found: bool
) -> None:
    draw = {"k": "draw", "at": ["train.py", 4, "<module>"], "fn": "randn"}
    ranks = [
        [e for n in (1, 2, 3) for e in [rows, draw | {"state": f"s{n}"}, backward(n), *step(n)]]
        for rows in [batch(1, [0, 2]), batch(1, [1, 3])]
    ]
    assert ("same-augmentation" in rules_of(*ranks, text=DRAWS.replace(old, new))) == found


def dropout_calls(rank: str, state: str) -> Events:
    """Return three steps of a model with a layer of dropout, on samples of one rank."""
    calls = [(n, f"{rank}{n}", f"{state}{n}") for n in (1, 2, 3)]
    return [
        event
        for n, row, random in calls
        for event in [forward(rows=[row], drops=1, random=random), backward(n), *step(n)]
    ]


def test_dropout_that_is_alike_on_two_ranks_is_named() -> None:
    text = "generator.manual_seed(0)\ntorch.manual_seed(0)\n"
    (finding,) = apply_rules(
        evidence_of(dropout_calls("a", "s"), dropout_calls("b", "s"), text=text)
    )
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
STORES = 'state = {"best": best}'


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ([STORES, "if new > best:", "    best = new"], True),
        ([STORES, "best = max(best, new)"], True),
        (["if new > best:", f"    {STORES}", "    best = new"], True),
        (["best = max(best, new)", STORES], False),
        (["if new > best:", "    best = new", STORES, "best = max(best, 0)"], False),
        (["if best > new:", f"    {STORES}", "else:", "    best = new"], False),
        ([STORES, "best = new"], False),
        (["for batch in loader:", f"    {STORES}", "best = max(best, new)"], False),
    ],
)
def test_a_best_value_that_is_compared_after_it_is_stored_is_named(
    body: list[str], found: bool
) -> None:
    saved = [SAVED | {"path": "/w/s.tmp", "keys": ["best"]}, MOVED]
    text = "\n    ".join(["for epoch in range(9):", *body])
    named = apply_rules(evidence_of([*steps(step(1)), *saved], [], text=text))
    assert ["the best value" in finding.what for finding in named] == [True] * found


@pytest.mark.parametrize(
    ("rate", "found"),
    [
        ("len(data) * world_size / seconds", True),
        ("epochs * len(loader.dataset) / (time.time() - start) * dist.get_world_size()", True),
        ("count * ranks / elapsed", True),
        ("len(data) / seconds", False),
        ("len(data) / (seconds * world_size)", False),
        ("len(sampler) * world_size / seconds", False),
        ("len(loader) * size * world_size / seconds", False),
        ("len(test_loader.dataset) * world_size / seconds", False),
        ("len(data) * world_size", False),
    ],
)
def test_a_throughput_that_counts_all_samples_for_each_rank_is_named(
    rate: str, found: bool
) -> None:
    text = f"sampler = DistributedSampler(data)\ncount = len(data)\nprint({rate})\n"
    trained = train_pass(1, ZERO), train_pass(1, ONE)
    assert rules_of(*trained, text=text) == ["inflated-throughput"] * found
    whole = train_pass(1, ZERO, replicas=1), train_pass(1, ONE, replicas=1)
    assert "inflated-throughput" not in rules_of(*whole, text=text)


SAYS = """def say(text):
    if rank == 0:
        print(f"[{rank}]", text)
say(f"accuracy {right / count}")
"""


def test_the_line_that_shows_a_metric_is_the_one_that_has_it() -> None:
    said = {"k": "print", "at": ["train.py", 3, "say"], "caller": ["train.py", 4, ""]}
    (finding,) = apply_rules(evidence_of([*eval_pass(1, ZERO), said], eval_pass(1, ONE), text=SAYS))
    assert (finding.rule, finding.location.line) == ("one-rank-metric", 4)
    own = SAYS.replace(", text)", ", right / count)")
    (finding,) = apply_rules(evidence_of([*eval_pass(1, ZERO), said], eval_pass(1, ONE), text=own))
    assert finding.location.line == 3


def test_a_share_that_is_divided_by_the_length_of_all_is_named_though_each_rank_prints() -> None:
    text = (
        "def evaluate(model, loader):\n    hits = 0\n    for x, y in loader:\n"
        "        hits += 1\n    print(hits / len({}))\n"
    )
    loop = ["train.py", 3, "evaluate"]
    said = {"k": "print", "numbers": 1, "at": ["train.py", 5, "evaluate"]}
    ranks = [[*eval_pass(1, share, at=loop), said] for share in (ZERO, ONE)]
    (finding,) = apply_rules(evidence_of(*ranks, text=text.format("loader.dataset")))
    assert (finding.rule, finding.location.line) == ("one-rank-metric", 5)
    assert "divided by the length of the whole data set" in finding.evidence
    assert rules_of(*ranks, text=text.format("loader")) == []
    named = (
        text.format("loader.dataset")
        .replace("hits = 0", "hits, size = 0, 1")
        .replace("len(loader.dataset)", "size")
    )
    assert rules_of(*ranks, text=named) == []
    named = named.replace("hits, size = 0, 1", "size = len(loader.dataset)")
    assert rules_of(*ranks, text=named) == ["one-rank-metric"]


BY_SAMPLES = {
    "by a count, over a name": "def f():\n    batches = (b for b in loader)\n    for x, y in batches:\n"
    "        total += F.cross_entropy(model(x), y).item()\n        n += len(x)\n    return total / n\n",
    "by a name for the data set": "def f():\n    size = len(loader.dataset)\n    for x, y in loader:\n"
    "        total += F.cross_entropy(model(x), y).item()\n    return total / size\n",
    "summed over the ranks": "loss_fn = nn.CrossEntropyLoss()\ndef f():\n    for x, y in loader:\n"
    "        total += loss_fn(model(x), y).item()\n"
    "    return fabric.all_gather(total).sum() / len(loader.dataset)\n",
    "gathered in each batch": "def f():\n    for x, y in loader:\n"
    "        total += accelerator.gather(F.mse_loss(model(x), y)).sum().item()\n"
    "    return total / len(loader.dataset)\n",
    "by the data set": "def f():\n    for x, y in loader:\n        total += F.cross_entropy(model(x), y).item()\n"
    "    return total / len(loader.dataset)\n",
    "by a count": "criterion = nn.MSELoss()\ndef f():\n    for x, y in loader:\n        loss = criterion(model(x), y)\n"
    "        total += loss.item()\n        n += len(x)\n    total /= n\n",
}
RIGHT_BY_SAMPLES = {
    "by a count, over a name": "def f():\n    batches = (b for b in loader)\n    for x, y in batches:\n"
    "        total += F.cross_entropy(model(x), y).item()\n        n += len(x)\n    return total / n\n",
    "by a name for the data set": "def f():\n    size = len(loader.dataset)\n    for x, y in loader:\n"
    "        total += F.cross_entropy(model(x), y).item()\n    return total / size\n",
    "sums": "def f():\n    for x, y in loader:\n        total += F.nll_loss(model(x), y, reduction='sum').item()\n"
    "    total /= len(loader.dataset)\n",
    "an object of sums": "criterion = nn.MSELoss(reduction='sum')\ndef f():\n    for x, y in loader:\n"
    "        total += criterion(model(x), y).item()\n    return total / len(loader.dataset)\n",
    "a function of the script's own": "c = nn.MSELoss()\ndef loss_sum(x, y):\n    return c(x, y) * len(x)\n"
    "def f():\n    for x, y in loader:\n        total += loss_sum(model(x), y).item()\n"
    "    return total / len(loader.dataset)\n",
    "gathered sums": "def f():\n    for x, y in loader:\n"
    "        total += accelerator.gather(F.mse_loss(model(x), y) * len(x)).sum().item()\n"
    "    return total / len(loader.dataset)\n",
    "right answers": "def f():\n    for x, y in loader:\n        total += (model(x) == y).sum().item()\n"
    "    return total / len(loader.dataset)\n",
}
DIVIDED_BACKWARD = "loss = F.mse_loss(model(x), y) / dist.get_world_size()\nloss.backward()\n"
REDUCED_TWICE = {
    "before and after": "def f(x):\n    x = x / world_size\n    dist.all_reduce(x)\n    return x / world_size\n",
    "by the collective": "def f(x):\n    y = 0\n    dist.all_reduce(x, op=dist.ReduceOp.AVG)\n    x /= world_size\n",
    "in place": "def f(p):\n    y = 0\n    dist.all_reduce(p.grad, dist.ReduceOp.AVG)\n    p.grad.div_(world_size)\n",
}
REDUCED_ONCE = {
    "after": "def f(x):\n    y = 0\n    dist.all_reduce(x)\n    return x / world_size\n",
    "before": "def f(x):\n    x = x / world_size\n    dist.all_reduce(x)\n    return x\n",
    "something else": "def f(x, n):\n    y = 0\n    dist.all_reduce(x, dist.ReduceOp.AVG)\n    n = n / world_size\n",
}


@pytest.mark.parametrize("name", [*BY_SAMPLES, *RIGHT_BY_SAMPLES])
def test_a_sum_of_means_by_samples_is_named_and_a_sum_of_sums_is_not(name: str) -> None:
    text = (BY_SAMPLES | RIGHT_BY_SAMPLES)[name]
    expected = ["mean-divided-twice"] if name in BY_SAMPLES else []
    assert evaluated_unevenly(text) == expected


@pytest.mark.parametrize("name", [*REDUCED_TWICE, *REDUCED_ONCE])
def test_a_value_that_is_averaged_twice_around_a_collective_is_named(name: str) -> None:
    text = (REDUCED_TWICE | REDUCED_ONCE)[name]
    calls = [[COLL | {"at": ["train.py", 3, "f"]}]] * 2
    expected = ["mean-divided-twice"] if name in REDUCED_TWICE else []
    assert rules_of(*calls, text=text) == expected


def test_a_loss_by_the_number_of_ranks_is_named_where_a_wrapper_averages() -> None:
    def trained(scale: float, wrapper: str) -> list[str]:
        events = [
            e
            for n in (1, 2)
            for e in [forward(wrapped=wrapper), backward(n, scale=scale), *step(n), COLL]
        ]
        events = [e | {"shape": [10, 10], "count": 100} if e["k"] == "coll" else e for e in events]
        return rules_of(events, events, text=DIVIDED_BACKWARD)

    assert trained(0.5, "DistributedDataParallel") == ["mean-divided-twice"]
    assert trained(1.0, "DistributedDataParallel") == []
    assert trained(0.5, "") == []


def evaluated_unevenly(text: str) -> list[str]:
    """Return the rules of an evaluation in this source, whose last batch is smaller."""
    line = next(n for n, line in enumerate(text.splitlines(), 1) if " in loader" in line)
    events = [e | {"at": ["train.py", line, "f"]} for e in eval_pass(1, [[0, 2], [4]])]
    return rules_of(events, text=text)


def test_an_evaluation_by_one_rank_alone_is_one_for_the_means_too() -> None:
    text = AVERAGES["added"]
    zero = [e | {"at": ["train.py", 2, "f"]} for e in eval_pass(1, [[0, 2], [4]])]
    assert rules_of(zero, [], text=text) == ["mean-of-means"]


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_of_means_of_uneven_batches_is_named_however_it_is_written(name: str) -> None:
    assert evaluated_unevenly(AVERAGES[name]) == ["mean-of-means"]


@pytest.mark.parametrize("name", WEIGHTED)
def test_an_average_over_samples_is_not_named(name: str) -> None:
    assert evaluated_unevenly(WEIGHTED[name]) == []


NUMBERS = "row = {film: number for number, film in enumerate(films)}\n"
COUNTED = """for x, y in loader:
    right += (model(x) == y).sum()
    count += len(y)
dist.all_reduce(right)
print((right / count).item())
"""


def test_a_sum_of_all_ranks_by_the_count_of_one_is_named_and_by_that_of_all_is_not() -> None:
    calls = [[COLL | {"at": ["train.py", 4, ""]}]] * 2
    assert rules_of(*calls, text=COUNTED) == ["local-count"]
    assert rules_of(*calls, text=COUNTED.replace("print", "dist.all_reduce(count)\nprint")) == []


@pytest.mark.parametrize("name", CASES)
def test_each_mistake_is_found_by_its_rule_alone(name: str) -> None:
    rule, zero, events = CASES[name]
    assert rules_of(zero, events, text=NUMBERS if rule == "own-index" else "") == [rule]


SOUND: dict[str, tuple[Events, Events]] = {
    "a window over two epochs": (accumulated(2, 2, 2, 2, 2, 2, 2, 2, 2), []),
    "a remainder with a step": (accumulated(2, 2, 1, 2, 2, 1), []),
    "shards that go round": (shards("abcd", "efgh", "a"), shards("efgh", "abcd", "e")),
    "shards of all": (shards("abcd", "eagf"), shards("efgh", "bhdc")),
    "one norm for all parts": (
        sharded(steps(step(1)), 1.0),
        sharded(steps(step(1, before={"w": "x"})), 1.0),
    ),
    "moments of each part": (
        [*sharded(steps(step(1)), 1.0), *OF_A_PART],
        [
            *sharded(steps(step(1, before={"w": "x"})), 1.0),
            OF_A_PART[0] | {"path": "/w/t.tmp"},
            MOVED | {"source": "/w/t.tmp", "target": "/w/t.pt"},
        ],
    ),
    "moments of what is not sharded": (
        [*sharded(steps(step(1)), 1.0), *OF_A_PART],
        sharded(steps(step(1)), 1.0),
    ),
    "the best of all shares": ([*eval_pass(1, ZERO), COLL, BEST], [*eval_pass(1, ONE), COLL]),
    "folds": (
        [*train_pass(1, [[0, 1], [2]]), *eval_pass(2, [[6]]), COLL],
        [*train_pass(1, [[3, 4], [5]]), *eval_pass(2, [[7]]), COLL],
    ),
    "the last one averages": (unsynced("a", last=True), unsynced("a", last=True)),
    "averaged by hand after no_sync": (unsynced("a"), unsynced("a")),
    "moved when all is trained": (
        [*steps(step(1)), {"k": "placed", "before": "cuda in float32", "after": "cpu in float32"}],
        steps(step(1)),
    ),
    "one split for all": (
        [*train_pass(1, [[0, 1], [2]], base_length=9), *eval_pass(2, [[6]]), COLL],
        [*train_pass(1, [[3, 4], [5]], base_length=9), *eval_pass(2, [[7]]), COLL],
    ),
    "what is trained is evaluated too": (
        [*train_pass(1, ZERO), *eval_pass(2, [[0, 1], [2, 3]]), COLL],
        [*train_pass(1, ONE), *eval_pass(2, [[4, 5], [6, 7]]), COLL],
    ),
    "one of two optimizers is frozen now and then": (
        steps(*(step(n, frozen_names=["w"] if n == 2 else []) for n in (1, 2, 3))),
        steps(step(1)),
    ),
    "another order in each epoch": (
        [TOLD | {"value": 1}, *epochs(ZERO, [[2, 0], [4, 6]])],
        epochs(ONE, [[1, 3], [7, 5]]),
    ),
    "drawn with replacement": (train_pass(1, [[0, 0], [0, 1]]), train_pass(1, [[0, 3], [3, 3]])),
    "padded, counted right": (
        [*eval_pass(1, [[0, 2], [4]]), COLL | {"value": [3.0]}],
        [*eval_pass(1, [[1, 3], [0]]), COLL | {"value": [2.0]}],
    ),
    "averaged by hand": (
        [*ALONE[:2], COLL | {"shape": [10, 10], "count": 100}, *ALONE[2:]],
        [*ALONE[:2], COLL | {"shape": [10, 10], "count": 100}, *ALONE[2:]],
    ),
    "noise of its own": (
        [FETCH | {"indices": [0], "used": {"torch": "s"}}],
        [FETCH | {"indices": [1], "used": {"torch": "t"}}],
    ),
    "a temporary name": (
        [
            SAVED | {"path": "/w/s.pt.tmp"},
            {"k": "moved", "source": "/w/s.pt.tmp", "target": "/w/s.pt"},
        ],
        [],
    ),
    "a metric of all": (
        [*eval_pass(1, ZERO), COLL, {"k": "print", "numbers": 1}],
        [*eval_pass(1, ONE), COLL],
    ),
    "no_sync": ([forward(sync=False), backward(1), forward(), backward(2), *step(1)], []),
    "once per epoch": ([*epochs(ZERO, [[0, 1], [2, 3]]), SCHED], epochs(ONE, [[4, 5], [6, 7]])),
    "last batches filled up": (
        train_pass(1, [[0, 2, 4], [6, 1, 3]], distributed=False),
        train_pass(1, [[5, 7, 1], [3, 0, 2]], distributed=False),
    ),
    "joined, and uneven": (
        [{"k": "join"}, *train_pass(1, [[0, 2], [4, 6], [8, 9]])],
        [{"k": "join"}, *train_pass(1, ONE)],
    ),
    "weights that are only read afterwards": (
        [
            *steps(step(1)),
            SAVED | {"optimizer": False, "position": False, "existed": False, "bare": True},
            {"k": "load", "path": "/w/s.pt", "weights_only": "True"},
            backward(0.1),
        ],
        [],
    ),
    "nothing is left to learn": (
        [
            e
            for n in range(1, 10)
            for e in [backward(max(0, 3 - n)), *step(n, matrix_norm=float(n < 3))]
        ],
        [],
    ),
    "two optimizers, of which each clears its own": (
        [
            e
            for n in (1, 2)
            for e in [forward(), backward(n), ZERO_GRAD | {"optimizer": 1}, *step(n), ZERO_GRAD]
        ],
        [],
    ),
    "weights without a hash": (
        [
            e
            for n in range(1, 7)
            for e in [backward(n), *step(n, before={"w": ""}, after={"w": ""})]
        ],
        [],
    ),
    "the same values in the same order": ([NUMBERED | {"values": ["'a'"], "digest": "s"}],) * 2,
    "an end of its own": (
        [{"k": "init", "direct": True, "backend": "gloo"}, {"k": "exit", "group": False}],
        [],
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_only_looks_like_a_mistake_is_not_named(name: str) -> None:
    assert rules_of(*SOUND[name]) == []


STATIC = {
    "fixed-port": "import os\nos.environ['MASTER_PORT'] = '12355'\n",
    "unsafe-load": "import torch\ntorch.load('s.pt', weights_only=False)\n",
    "device-per-rank": "import torch\nRANK = 0  # is_available\nmodel.to('cuda:0')\n",
    "cuda-only": "dist.init_process_group('nccl')\ndist.destroy_process_group()\n",
    "no-destroy": "dist.init_process_group('gloo')\n",
    "set-epoch": "for epoch in range(3):\n    sampler.set_epoch(0)\n",
    "clip-scaled": "s = GradScaler()\ns.scale(loss).backward()\nclip_grad_norm_(p, 1.0)\ns.step(optimizer)\n",
    "unscaled-batch": "s = DistributedSampler(d, shuffle=False)\nDataLoader(d, batch_size=32, "
    "sampler=s)\nSGD(m.parameters(), lr=0.1)\n",
}


@pytest.mark.parametrize("rule", STATIC)
def test_the_source_alone_says_it(rule: str) -> None:
    assert [finding.rule for finding in apply_source_rules(source(STATIC[rule]))] == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "os.environ.setdefault('MASTER_PORT', '29500')\n",
        "os.environ['MASTER_PORT'] = str(free_port())\n",
        "torch.load('s.pt', weights_only=True)\n",
        "with open('data.pkl', 'rb') as f:\n    pickle.load(f)\n",
        "device = f'cuda:{rank}' if torch.cuda.is_available() else 'cpu'\nRANK = 1\n",
        "device = torch.device('cuda:{}'.format(args.local_rank))\nRANK = 1  # is_available\n",
        "model.to('cuda:%d' % local_rank)\nRANK = 1  # is_available\n",
        "if 'WORLD_SIZE' not in os.environ:\n    os.environ['RANK'] = '0'\nmodel.to('cuda')  # is_available\n",
        "dist.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')\ndist.destroy_process_group()\n",
        "n = dist.get_world_size()\nDataLoader(d, batch_size=64 // n, sampler=DistributedSampler(d, "
        "shuffle=False))\nSGD(p, lr=0.1)\n",
        "s = GradScaler()\ns.scale(l).backward()\ns.unscale_(o)\nclip_grad_norm_(p, 1.0)\n",
        "def lr(n):\n    return 0.1 * n\nDataLoader(d, 8, sampler=DistributedSampler(d, shuffle=False))\n"
        "w -= lr(world_size) * grad / world_size\n",
        "lr = base * world_size\nDataLoader(d, 64, sampler=DistributedSampler(d, shuffle=False))\nSGD(p, lr=lr)\n",
    ],
)
def test_sound_source_has_no_finding(text: str) -> None:
    assert apply_source_rules(source(text)) == []


def test_a_comment_with_a_reason_takes_a_finding_back_and_one_without_does_not() -> None:
    zero = [COLL | {"at": ["train.py", 2, ""]}]
    events = [COLL | {"op": "broadcast"}]
    line = "import torch\nall_reduce(x)  # stepladder: ignore[collective-order]"
    assert rules_of(zero, events, text=line + " it is tried on purpose\n") == []
    assert rules_of(zero, events, text=line + "\n") == ["collective-order"]


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


def test_two_nodes_that_read_one_share_are_told_that_it_is_that_of_their_local_rank() -> None:
    passes = [train_pass(1, ZERO, sampler_rank=0) for _ in range(2)]
    text = 'sampler = DistributedSampler(data, rank=int(os.environ["LOCAL_RANK"]))\n'
    (finding,) = apply_rules(evidence_of(*passes, text=text))
    assert finding.rule == "same-samples"
    assert "take the share of rank 0, the local rank of each" in finding.evidence
    passes = [train_pass(1, ZERO, sampler_rank=rank) for rank in range(2)]
    (finding,) = apply_rules(evidence_of(*passes, text=text))
    assert "share of rank" not in finding.evidence


def left_early(way: str, *, returns: bool = False) -> list[list[dict[str, Any]]]:
    """Rank 0 is in a collective after one step of two, and rank 1 in its second backward pass."""
    at = {"at": ["train.py", 2, "train"]}
    passes = [train_pass(1, [[0, 2], [4, 6]])[:-5], train_pass(1, [[1, 3], [5, 7]])[:-3]]
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


@pytest.mark.parametrize(
    ("fields", "severity"),
    [
        ({"state": {"w": ""}}, "note"),
        ({"state": {"w": "-"}}, "warning"),  # it cannot be hashed, as where it is sharded
        ({"state": {"w": ""}, "lr": [0.2]}, "warning"),
    ],
)
def test_an_optimizer_without_state_is_hardly_missed(fields: Any, severity: str) -> None:
    saved = SAVED | {"optimizer": False, "existed": False}
    (finding,) = apply_rules(evidence_of([*steps(step(1), step(2, **fields)), saved]))
    assert (finding.rule, finding.severity) == ("incomplete-snapshot", severity)


def test_a_snapshot_that_lacks_random_state_alone_is_told_to_add_it_alone() -> None:
    saved = SAVED | {"random": False, "existed": False}
    (finding,) = apply_rules(evidence_of([forward(drops=1), *steps(step(1), step(2)), saved]))
    assert (finding.rule, finding.severity) == ("incomplete-snapshot", "note")
    assert "torch.get_rng_state()" in finding.fix and "optimizer" not in finding.fix


RESUMES = """if args.resume:
    model.load_state_dict(torch.load(path))
torch.save(model.state_dict(), path)
"""


def test_weights_are_a_snapshot_where_the_script_resumes_from_them() -> None:
    fields = {"optimizer": False, "position": False, "existed": False, "bare": True}
    saved = SAVED | fields | {"at": ["train.py", 3, ""]}
    trained = steps(step(1, state={"w": "m"}))
    (finding,) = apply_rules(evidence_of([*trained, saved], trained, text=RESUMES))
    assert finding.rule == "incomplete-snapshot"
    assert "holds weights; missing: the optimizer (it has state" in finding.evidence
    assert rules_of([*trained, saved], trained, text=RESUMES.replace("resume", "test")) == []


def test_ranks_that_save_one_file_at_once_are_counted_alike_whoever_is_first() -> None:
    def overwritten(first: bool, second: bool) -> str:
        saves = [[SAVED | {"existed": there}, SAVED] for there in (first, second)]
        findings = {f.rule: f for f in apply_rules(evidence_of(*saves))}
        return findings["in-place-snapshot"].evidence

    assert overwritten(False, True) == overwritten(True, False) == overwritten(False, False)
    assert "written 2 times, 1 time over the only copy" in overwritten(False, True)
    assert "written 2 times, 2 times over the only copy" in overwritten(True, True)


def test_a_file_of_another_kind_that_several_ranks_write_is_a_note() -> None:
    written = {"k": "wrote", "path": "/w/curve.png"}
    (finding,) = apply_rules(evidence_of([written], [written], is_single_process=False))
    assert (finding.rule, finding.severity) == ("many-writers", "note")
    assert rules_of([written], [written | {"path": "/w/curve-1.png"}]) == []


def test_ranks_that_put_the_second_into_a_name_write_one_file_if_they_start_together() -> None:
    ranks = [[{"k": "wrote", "path": f"/w/events.179572077{second}.vm"}] for second in (8, 9)]
    (finding,) = apply_rules(evidence_of(*ranks))
    assert finding.evidence == "ranks 0 and 1 write events.*.vm"
    processes = [[{"k": "wrote", "path": f"/w/events.1795720778.vm.{pid}"}] for pid in (81, 82)]
    assert rules_of(*processes) == []


BY_LOCAL_RANK_0 = """
gpu = int(os.environ["LOCAL_RANK"])
def keep(model):
    ...
    torch.save(model, path)
if gpu == 0:
    keep(model)
"""


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        (BY_LOCAL_RANK_0, "note"),
        (BY_LOCAL_RANK_0.replace("if gpu == 0", "if ready"), "error"),
        (BY_LOCAL_RANK_0 + "print(dist.get_rank())", "error"),
    ],
)
def test_a_file_of_local_rank_0_is_a_note_where_the_script_is_for_one_node(
    text: str, severity: str
) -> None:
    saved = [SAVED | {"existed": False}]
    findings = apply_rules(evidence_of(saved, saved, text=text))
    assert [(f.rule, f.severity) for f in findings if f.rule == "many-writers"] == [
        ("many-writers", severity)
    ]


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


def test_every_rule_has_a_text_of_its_own() -> None:
    assert {rule for rule, *_ in CASES.values()} | set(STATIC) | {
        "hang",
        "local-count",
        "mean-divided-twice",
        "resume-samples",
        "resume-lr",
        "resume-differs",
        "own-task",
        "inflated-throughput",
        "augmented-evaluation",
        "one-rank-loss",
        "uneven-targets",
    } == {rule.id for rule in CHECK_TEXTS.rules}
    assert all(
        text.what.endswith(".") and text.cause.endswith(".") and text.fix and text.example
        for text in CHECK_TEXTS.texts.values()
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
