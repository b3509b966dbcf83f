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
    evidence_of,
    forward,
    rules_of,
    step,
    steps,
    train_pass,
)
from stepladder.tools.check.rules.all_rules import apply_rules


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
