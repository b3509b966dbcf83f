"""Each rule on a recording made by hand: the mistake is found, and what looks like it is not."""

from __future__ import annotations

import pytest

from check_recordings import (
    ALONE,
    COLL,
    LOADER,
    MOVED,
    ONE,
    SAVED,
    ZERO,
    Events,
    backward,
    epochs,
    eval_pass,
    forward,
    rules_of,
    source,
    step,
    steps,
    train_pass,
)
from stepladder.tools.check.rules.all_rules import apply_source_rules
from stepladder.tools.check.rules.evidence import CHECK_TEXTS

TOLD = {"k": "setepoch", "sampler": 7}


def test_a_run_without_a_mistake_has_no_finding() -> None:
    zero = epochs(ZERO, [[1, 0], [3, 2]])
    events = epochs(ONE, [[4, 5], [6, 7]])
    assert rules_of(zero, events) == []


FETCH = {"k": "fetch", "worker": -1, "count": 1}
SCHED = {"k": "sched", "schedule": 1, "cls": "CosineAnnealingLR", "horizon": 3, "direct": True}
ZERO_GRAD = {"k": "zero", "optimizer": 0}
EPOCH = [forward(rows=["a"]), backward(1), *step(1), SAVED | {"path": "/w/s.tmp"}, MOVED]
OTHER_EPOCH = [forward(rows=["b"]), backward(2), *step(2), SAVED | {"path": "/w/s.tmp"}, MOVED]


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
            *step(n, f"{rank}{n}", rank, before={"w": "w" if n == 1 else f"{rank}1"}),
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


BEST = SAVED | {"path": "/w/kept", "existed": False, "optimizer": False, "position": False}
LOADED = {"k": "load", "path": "/w/s.pt"}
OF_A_PART = [SAVED | {"path": "/w/s.tmp", "numbered": True}, MOVED]
CASES: dict[str, tuple[str, Events, Events]] = {
    "a remainder without a step": ("accumulation-mean", accumulated(2, 2, 2, 2, 3, 2, 2, 3), []),
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
    "the best of one share": ("one-rank-metric", [*eval_pass(1, ZERO), BEST], eval_pass(1, ONE)),
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
        [*eval_pass(1, [[0, 2], [4]]), COLL],
        [*eval_pass(1, [[1, 3], [0]]), COLL],
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
    "one batch more": ("uneven-steps", train_pass(1, [[0, 2], [4, 6], [8, 9]]), train_pass(1, ONE)),
    "no wrapper": ("not-wrapped", ALONE, other_grads(ALONE)),
    "another rate": ("replicas-differ", steps(step(1)), steps(step(1, lr=[0.2]))),
    "few samples of one epoch": (
        "set-epoch",
        epochs([[0], [2]], [[0], [2]], epoch=0, length=4, base_length=4),
        epochs([[1], [3]], [[1], [3]], epoch=0, length=4, base_length=4),
    ),
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
    "NCCL alone": ("cuda-only", [{"k": "init", "direct": True, "backend": "nccl"}], []),
    "no optimizer": (
        "incomplete-snapshot",
        [LOADED, *steps(step(1, state={"w": "m"})), SAVED | {"optimizer": False, "existed": False}],
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


@pytest.mark.parametrize("name", CASES)
def test_each_mistake_is_found_by_its_rule_alone(name: str) -> None:
    rule, zero, events = CASES[name]
    assert rules_of(zero, events) == [rule]


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
    "clip-scaled": "s = GradScaler()\ns.scale(loss).backward()\nclip_grad_norm_(p, 1.0)\ns.step(optimizer)\n",
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


def test_every_rule_has_a_text_of_its_own() -> None:
    assert {rule for rule, *_ in CASES.values()} | set(STATIC) | {
        "hang",
        "local-count",
        "mean-divided-twice",
        "resume-samples",
        "resume-lr",
        "resume-differs",
        "preempted",
        "own-task",
        "augmented-evaluation",
        "one-rank-loss",
        "one-rank-metric",
        "mean-of-means",
        "uneven-targets",
        "gradients",
        "learning-rate",
        "shown-numbers",
        "device-per-rank",
    } == {rule.id for rule in CHECK_TEXTS.rules}
    assert all(
        text.what.endswith(".") and text.cause.endswith(".") and text.fix and text.example
        for text in CHECK_TEXTS.texts.values()
    )
