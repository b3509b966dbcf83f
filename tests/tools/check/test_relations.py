"""Relations with frozen weights: several ranks compared with one process, with no rule involved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from check_recordings import evidence_of, forward, step, train_pass
from stepladder.tools.check.check import Report, Request, check
from stepladder.tools.check.probe.noise import normalize_by_running_statistics
from stepladder.tools.check.probe.patching import wrap
from stepladder.tools.check.recording import Recording
from stepladder.tools.check.relations import gradients, rates, samples_read, shown
from stepladder.tools.check.relations.comparison import causes_of, describe_not_compared, finding_of
from stepladder.tools.check.relations.frozen_runs import FrozenRuns, Violation
from stepladder.tools.check.rules.all_rules import drop_consequences, drop_known
from stepladder.tools.check.rules.evidence import CHECK_TEXTS
from stepladder.tools.check.rules.model import gradients_of_one_rank
from stepladder.tools.check.rules.process import shared_gpus
from stepladder.tools.findings.finding import Finding, Location

DATA_SET = "p"


def number(text: str, line: int = 9) -> dict[str, Any]:
    return {"k": "print", "at": ["train.py", line, "train"], "text": text}


def mean_gradient(*elements: float, rows: float = 1.0) -> dict[str, Any]:
    """Return the event of one step, whose gradient has these elements."""
    return {
        "k": "meangradient",
        "optimizer": 0,
        "steps": 1,
        "rows": rows,
        "sums": {"weight": [rows * element for element in elements]},
        "squares": rows * sum(element * element for element in elements),
    }


def run_of(*ranks: list[dict[str, Any]]) -> Recording:
    return evidence_of(*ranks).run


def frozen(
    reference: list[dict[str, Any]],
    *ranks: list[dict[str, Any]],
    shuffled: list[dict[str, Any]] | None = None,
    reweighted: list[dict[str, Any]] | None = None,
) -> FrozenRuns:
    return FrozenRuns(
        run_of(reference),
        run_of(*ranks),
        run_of(shuffled) if shuffled else None,
        run_of(reweighted) if reweighted else None,
    )


def test_a_number_that_is_halved_on_two_ranks_is_found() -> None:
    runs = frozen([number("loss 1.0132")], [number("loss 0.5066")], [])
    (violation,) = shown.violations(runs)
    assert violation.ratio == pytest.approx(0.5)
    assert violation.evidence.splitlines() == [
        "with the same weights",
        "on one process 1.0132; other random numbers change it by 0",
        "on rank 0        0.5066, 0.5 times as much",
    ]


def test_a_count_that_is_zero_on_one_process_is_compared() -> None:
    (violation,) = shown.violations(frozen([number("skipped 0")], [number("skipped 3")], []))
    assert math.isinf(violation.certainty)


def test_what_is_shown_before_a_model_is_called_is_no_result() -> None:
    """Such as the port of the process group, another one in each run."""
    before = [[number(f"port {port}"), forward(), number("loss 1.0132")] for port in (29500, 31893)]
    assert list(shown.violations(frozen(*before, shuffled=[]))) == []


def finding_by(rule: str, line: int = 1) -> Finding:
    return CHECK_TEXTS.finding(rule, Location("train.py", line))


def test_a_relation_is_left_out_only_where_a_finding_says_why_it_does_not_hold() -> None:
    assert causes_of(map(finding_by, ("unsafe-load", "small-batch-norm", "set-epoch"))) == {}
    assert causes_of([finding_by("not-wrapped")]) == {"gradients": "not-wrapped"}
    for rule in ("overlapping-shards", "changed-outside"):
        assert causes_of([finding_by(rule)]).keys() == {"gradients", "shown-numbers"}
    for rule in ("padded-evaluation", "mean-of-means", "mean-of-means.training"):
        assert causes_of([finding_by(rule)]) == {}, "of some lines alone"
    assert describe_not_compared({"gradients": "not-wrapped"}) == [
        "gradients: not compared, since not-wrapped explains it"
    ]


def test_a_padded_evaluation_explains_a_number_that_has_no_cause_of_its_own() -> None:
    padded, wrong = finding_by("padded-evaluation"), finding_by("local-count", 3)
    assert drop_consequences([padded, wrong, finding_by("shown-numbers", 7)]) == [padded, wrong]


def test_nothing_is_said_twice_of_a_rule_or_of_a_line() -> None:
    known = [finding_by("mean-of-means", 3), finding_by("local-count", 5)]
    compared = [finding_by("shown-numbers", line) for line in (3, 7)] + [
        finding_by("local-count", 9)
    ]
    assert drop_known(compared, known) == [finding_by("shown-numbers", 7)]


def test_rounding_of_another_order_is_no_difference() -> None:
    runs = frozen([number("loss 1.01322")], [number("loss 1.01321")], [])
    assert list(shown.violations(runs)) == []


def test_what_other_random_numbers_change_may_differ() -> None:
    reference, compared = [number("loss 1.00")], [number("loss 1.10")]
    assert list(shown.violations(frozen(reference, compared)))
    weights = [number("loss 7.00")]
    noisy = frozen(reference, compared, shuffled=[number("loss 1.05")], reweighted=weights)
    quiet = frozen(reference, compared, shuffled=[number("loss 1.00")], reweighted=weights)
    assert list(shown.violations(noisy)) == []
    assert list(shown.violations(quiet))


def test_a_number_that_is_the_same_with_other_weights_is_a_setting() -> None:
    """Such as the number of batches, the learning rate and the number of ranks."""
    lines = [number("lr 0.1 batch 10/50")]
    runs = frozen(lines, [number("lr 0.2 batch 10/25")], shuffled=lines, reweighted=lines)
    assert list(shown.violations(runs)) == []


def test_each_rank_may_show_the_number_of_its_share() -> None:
    runs = frozen([number("loss 1.5")], [number("loss 1.0")], [number("loss 2.0")])
    assert list(shown.violations(runs)) == []
    runs = frozen([number("loss 1.5")], [number("loss 1.0")], [number("loss 1.0")])
    assert list(shown.violations(runs))


def test_batches_of_a_line_that_shows_each_may_differ() -> None:
    reference = [number(f"loss {value}") for value in (1.0, 1.4, 0.7, 1.2, 0.8, 1.1)]
    compared = [number(f"loss {value}") for value in (1.1, 0.9, 1.3)]
    assert list(shown.violations(frozen(reference, compared))) == []


def test_a_gradient_that_is_not_averaged_is_found() -> None:
    reference = [mean_gradient(1.0, 2.0)]
    assert list(gradients.violations(frozen(reference, reference, reference))) == []
    halved = [mean_gradient(0.5, 1.0)]
    (violation,) = gradients.violations(frozen(reference, halved, halved))
    assert violation.ratio == pytest.approx(0.5)
    assert violation.evidence.splitlines()[1:] == ["weight                         differs by 50 %"]


def test_a_parameter_without_a_gradient_that_one_process_gives_it_is_found() -> None:
    reference, without = [mean_gradient(1.0, 2.0)], mean_gradient(1.0, 2.0) | {"sums": {}}
    runs = frozen(reference, reference, [without], shuffled=reference)
    assert list(gradients.violations(runs)) == []
    (violation,) = gradients.violations(runs, has_same_batches=True)
    assert violation.evidence == "rank 1: weight has no gradient"


def test_a_gradient_of_which_noise_moves_as_much_is_no_violation() -> None:
    runs = frozen(
        [mean_gradient(1.0, 2.0)], [mean_gradient(1.1, 2.0)], shuffled=[mean_gradient(0.95, 2.0)]
    )
    assert list(gradients.violations(runs)) == []


@pytest.mark.parametrize(
    ("states", "rows", "is_found"),
    [(["s", "s"], 4.0, True), (["s", "t"], 4.0, False), (["s", "s"], 6.0, False)],
    ids=["nothing is drawn", "dropout", "an evaluation has rows, too"],
)
def test_gradients_of_the_same_batches_differ_by_rounding_alone(
    states: list[str], rows: float, is_found: bool
) -> None:
    """A loss with class weights moves them less than other random numbers do."""

    def trained(batches: list[list[int]], mean: float, count: float) -> list[dict[str, Any]]:
        events = [mean_gradient(mean, 2.0, rows=count), *train_pass(1, batches)]
        drawn = iter(states)
        return [e | ({"random": [next(drawn)]} if e["k"] == "prestep" else {}) for e in events]

    runs = frozen(
        trained([[0, 1], [2, 3]], 1.0, 4.0),
        trained([[0], [2]], 1.1, rows / 2),
        trained([[1], [3]], 1.1, rows / 2),
        shuffled=[mean_gradient(0.95, 2.0)],
    )
    assert list(gradients.violations(runs)) == []
    found = list(gradients.violations(runs, has_same_batches=True))
    assert ["no mean over samples" in item.evidence for item in found] == [True] * is_found


def exchanged(local: list[float], used: list[float], optimizer: str) -> list[dict[str, Any]]:
    """Return steps with the gradients that a backward pass has left, and those that are used."""
    before, after = step(1)
    left = {"k": "gradients", "sums": local}
    return [{"k": "optimizer", "cls": optimizer}, left, before | {"sums": used}, after]


@pytest.mark.parametrize(
    ("relation", "ratio", "used", "optimizer", "expected"),
    [
        ("gradients", 2.0, [4.0, 2.0], "SGD", ("accumulation-mean", "warning")),
        ("gradients", 2.0, [4.0, 2.0], "AdamW", ("accumulation-mean", "note")),
        ("gradients", 0.5, [1.0, 0.5], "SGD", ("mean-divided-twice", "error")),
        ("gradients", 1.4, [1.0, 1.0], "SGD", ("gradients", "warning")),
        ("shown-numbers", 2.0, [], "SGD", ("local-count", "error")),
        ("shown-numbers", 0.5, [], "SGD", ("mean-divided-twice", "error")),
        ("shown-numbers", 1.3, [], "SGD", ("shown-numbers", "warning")),
        ("samples", math.nan, [], "SGD", ("samples-lost", "warning")),
    ],
)
def test_a_violation_has_the_cause_whose_facts_are_true(
    relation: str, ratio: float, used: list[float], optimizer: str, expected: tuple[str, str]
) -> None:
    ranks = [exchanged(local, used, optimizer) for local in ([1.0, -2.0], [3.0, 4.0])]
    violation = Violation(relation, None, 9.0, "seen", ratio)
    finding = finding_of(violation, frozen([], *ranks), evidence_of(*ranks))
    assert (finding.rule, finding.severity) == expected
    assert finding.evidence == "seen"


def test_gradients_of_one_rank_that_all_use_need_no_run_on_one_process() -> None:
    def find(*used: list[float]) -> list[Finding]:
        locals_of_ranks = [1.0, -2.0], [3.0, 4.0]
        ranks = [exchanged(*pair, "SGD") for pair in zip(locals_of_ranks, used, strict=True)]
        return list(gradients_of_one_rank(evidence_of(*ranks)))

    (finding,) = find([3.0, 4.0], [3.0, 4.0])
    assert finding.rule == "not-wrapped" and "backward passes of rank 1" in finding.evidence
    assert find([2.0, 1.0], [2.0, 1.0]) == [], "the average"
    assert find([1.0, -2.0], [3.0, 4.0]) == [], "each has its own"


def test_gradients_that_one_rank_changes_after_the_average_are_not_those_of_one_rank() -> None:
    ranks = [exchanged([2.0, 1.0], used, "SGD") for used in ([2.0, 1.0], [4.0, 1.0])]
    violation = Violation("gradients", None, 9.0, "seen")
    assert finding_of(violation, frozen([], *ranks), evidence_of(*ranks)).rule == "gradients"


def test_a_learning_rate_may_make_up_for_a_sum_of_gradients() -> None:
    def made(gradient: float, rate: float) -> list[dict[str, Any]]:
        return [*step(1, lr=[rate]), mean_gradient(gradient, 2 * gradient)]

    summed = made(2.0, 0.05)
    assert list(gradients.violations(frozen(made(1.0, 0.1), summed, summed))) == []
    summed = made(2.0, 0.1)
    assert list(gradients.violations(frozen(made(1.0, 0.1), summed, summed)))


def steps_with_rates(*values: float) -> list[dict[str, Any]]:
    return [event for number, rate in enumerate(values, 1) for event in step(number, lr=[rate])]


@pytest.mark.parametrize(
    ("one", "two", "is_found"),
    [
        ([0.1, 0.1, 0.01, 0.01], [0.1, 0.1], True),  # falls after two steps
        ([0.1, 0.1, 0.01, 0.01], [0.1, 0.01], False),  # after an epoch
        ([0.1, 0.1, 0.01, 0.01], [0.1, 0.1, 0.01, 0.01], False),  # a loop of four steps
        ([0.1, 0.08, 0.06, 0.04], [0.1, 0.06], False),  # between the last two of one process
        ([0.1, 0.07, 0.04, 0.02], [0.1, 0.07], True),
        ([0.1, 0.09, 0.05, 0.03], [0.1, 0.06], False),  # moved by a warm-up of some steps
        ([0.1, 0.1, 0.1, 0.1], [0.15, 0.2], False),  # scaled by the number of ranks
    ],
)
def test_a_rate_that_falls_by_steps_is_another_one_after_the_same_samples(
    one: list[float], two: list[float], is_found: bool
) -> None:
    runs = frozen(steps_with_rates(*one), *[steps_with_rates(*two)] * 2)
    assert bool(list(rates.violations(runs))) == is_found


def test_a_rate_of_a_run_that_was_cut_may_be_that_of_a_loop_of_steps() -> None:
    whole = steps_with_rates(0.1, 0.1)
    cut = [*whole, {"k": "enough"}]
    reference = steps_with_rates(0.1, 0.1, 0.01, 0.01)
    assert list(rates.violations(frozen(reference, cut, cut))) == []
    runs = frozen(reference, whole, whole)
    (violation,) = rates.violations(runs)
    finding = finding_of(violation, runs, evidence_of(whole, whole))
    assert (finding.rule, finding.severity) == ("learning-rate", "warning")


def test_twice_as_many_ranks_are_compared_where_one_process_is_too_few() -> None:
    runs = FrozenRuns(
        run_of([number("hits 30")], [number("hits 34")]), run_of(*[[number("hits 16")]] * 4)
    )
    (violation,) = shown.violations(runs)
    assert violation.evidence.splitlines()[1].startswith("on 2 processes 32;")
    averaged, summed = mean_gradient(1.0, 2.0), mean_gradient(2.0, 4.0)
    runs = FrozenRuns(run_of([averaged], [averaged]), run_of(*[[summed]] * 4))
    (violation,) = gradients.violations(runs)
    assert "2 times that of 2 processes" in violation.evidence
    assert finding_of(violation, runs, evidence_of([], [])).rule == "accumulation-mean"


@pytest.mark.parametrize(
    ("gpus", "text", "rules"),
    [
        (("cuda:0", "cuda:0"), "", ["device-per-rank"]),
        (("cuda:0", "cuda:1"), "", []),
        (("", ""), "", []),
        (("cuda:0", "cuda:0"), "os.environ.update(RANK='0', WORLD_SIZE='1')", []),
    ],
)
def test_ranks_of_one_node_that_share_a_gpu_are_named(
    gpus: tuple[str, str], text: str, rules: list[str]
) -> None:
    built = [[{"k": "ddp", "parameters": {}, "gpu": gpu}] for gpu in gpus]
    assert [f.rule for f in shared_gpus(evidence_of(*built, text=text))] == rules


def test_samples_that_one_process_reads_and_several_do_not_are_named() -> None:
    own = [train_pass(1, [[0, 1, 2], [3, 4, 5]])]
    halves = [train_pass(1, [[0]]), train_pass(1, [[3]])]
    (violation,) = samples_read.violations(frozen(own[0], *halves))
    assert "4 of the 6 samples" in violation.evidence and "1, 2, 4" in violation.evidence
    shares = [train_pass(1, [[0, 1, 2]]), train_pass(1, [[3, 4]])]
    assert list(samples_read.violations(frozen(own[0], *shares))) == [], "a remainder"
    unfinished = [events[:-1] for events in halves]
    assert list(samples_read.violations(frozen(own[0], *unfinished))) == [], "the rest may come"


def test_a_synchronized_norm_does_not_depend_on_the_batch_in_a_neutral_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", nn.SyncBatchNorm.forward)
    wrap(nn.SyncBatchNorm, "forward", normalize_by_running_statistics)
    layer = nn.SyncBatchNorm(3)
    values = 5 * torch.randn(8, 3) + 2
    torch.testing.assert_close(layer(values), values / math.sqrt(1 + layer.eps))
    assert layer.running_mean is not None and not layer.running_mean.any()


SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 6)
data = TensorDataset(x, x @ torch.randn(6, 1))
test_x = torch.randn(50, 6)
test_y = test_x.sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 1))
model = {model}
torch.manual_seed(rank)  # dropout
optimizer = torch.optim.SGD(net.parameters(), lr=0.05 * ranks)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        {after_backward}
        optimizer.step()
    net.eval()
    with torch.no_grad():
        own = slice(rank, None, ranks)
        errors = (net(test_x[own]) - test_y[own]).square()
        total = torch.stack([errors.sum(), torch.tensor(float(len(errors)))])
        {reduction}
    net.train()
    if rank == 0:
        print(f"epoch {{epoch}} of 3, {{len(loader)}} batches: test {{float(total[0] / total[1]):.4f}}")
dist.destroy_process_group()
"""
RIGHT = {
    "model": "DistributedDataParallel(net)",
    "after_backward": "pass",
    "reduction": "dist.all_reduce(total)",
}
# Mistakes, each with the relation that does not hold.
WRONG = {
    "a gradient divided by the number of ranks once more": (
        "mean-divided-twice",
        {"after_backward": "[p.grad.div_(ranks) for p in net.parameters()]"},
    ),
    "a gradient that one rank doubles in a model with dropout": (
        "gradients",
        {"after_backward": "net[0].weight.grad.mul_(1 + rank)"},
    ),
    "counts that are not added up": ("local-count", {"reduction": "dist.all_reduce(total[:1])"}),
    "a sum over the ranks that is squared": (
        "mean-divided-twice",
        {"reduction": "dist.all_reduce(total); total[0] /= ranks"},
    ),
}


def run_check(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, relations_only: bool = False
) -> Report:
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(folder)
    return check(Request(Path("train.py"), relations_only=relations_only))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_without_a_mistake_holds_all_relations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, a scaled learning rate and the number of batches differ legally."""
    report = run_check(tmp_path, SCRIPT.format(**RIGHT), monkeypatch)
    assert (report.findings, report.not_checked) == ([], None)
    assert report.held == [
        "samples: 96 samples, each once an epoch, in 3 epochs",
        "weights: the same on 2 ranks before 18 of 18 recorded steps",
        "learning rate: 0.1, the same on all ranks",
        "calls: 3 collectives in the same order on all ranks",
        "training: 4 of 4 weight tensors changed; no loss or gradient is nan",
        "gradients: with the same weights, the mean of 24 steps is that of one process",
        "numbers: with the same weights, 1 line as on one process",
    ]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("dist.all_reduce(total)", []), ("dist.all_reduce(total[:1])", ["shown-numbers"])],
)
def test_a_script_that_needs_several_processes_is_compared_with_twice_as_many(
    reduction: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCRIPT.format(**RIGHT | {"reduction": reduction})
    text = text.replace("torch.manual_seed(0)", "assert ranks > 1\ntorch.manual_seed(0)", 1)
    report = run_check(tmp_path, text, monkeypatch, relations_only=True)
    assert [finding.rule for finding in report.findings] == expected
    assert report.held[5:7] == [
        "the script needs several processes: 4 are compared with 2",
        "gradients: with the same weights, the mean of 12 steps is that of 2 processes",
    ]


SHARDED = """net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("scale", "expected"), [("1", []), ("ranks", ["accumulation-mean"])])
def test_gradients_of_shards_are_compared_as_wholes(
    scale: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCRIPT.format(**RIGHT | {"model": SHARDED}).replace(
        ".backward()", f".mul({scale}).backward()"
    )
    report = run_check(tmp_path, text, monkeypatch, relations_only=True)
    assert [finding.rule for finding in report.findings] == expected
    holds = "gradients: with the same weights, the mean of 24 steps is that of one process"
    assert (holds in report.held) == (not expected)
    assert "weights: each rank holds a part of them" in report.held
    assert not any("0 of 4 weight tensors" in line for line in report.held)


SERVES = """
import socket
server = socket.create_server(("127.0.0.1", 28531)) if rank == 0 else None  # for metrics
torch.manual_seed(0)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_runs_that_serve_at_one_port_are_compared_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCRIPT.format(**RIGHT).replace("torch.manual_seed(0)", SERVES, 1)
    report = run_check(tmp_path, text, monkeypatch)
    assert any(line.startswith("numbers: with the same weights") for line in report.held)


@pytest.mark.slow
@pytest.mark.ranks
def test_another_finding_does_not_stop_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCRIPT.format(**RIGHT | {"reduction": "dist.all_reduce(total[:1])"})
    text = text.replace("sampler.set_epoch(epoch)", "pass")
    report = run_check(tmp_path, text, monkeypatch)
    assert {finding.rule for finding in report.findings} == {"set-epoch", "local-count"}
    assert any(line.startswith("gradients: with the same weights") for line in report.held)


FEDERATED = """import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, server = dist.get_rank(), dist.get_world_size() - 1
torch.manual_seed(rank)
net = nn.Linear(6, 1)
weights = torch.zeros(7)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.randn(40, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
for round in range(1000):
    if rank == server:
        for client in range(server):
            dist.send(weights, client)
        total, part = torch.zeros(7), torch.zeros(7)
        for client in range(server):
            dist.recv(part, client)
            total += part
        weights = total / server
        continue
    dist.recv(weights, server)
    nn.utils.vector_to_parameters(weights, net.parameters())
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    dist.send(nn.utils.parameters_to_vector(net.parameters()).detach(), server)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_weights_that_a_server_averages_are_a_method_and_its_end_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(FEDERATED)
    monkeypatch.chdir(tmp_path)
    report = check(Request(Path("train.py"), nproc=3, epochs=8))
    assert "not-wrapped" not in {finding.rule for finding in report.findings}
    assert report.not_checked is None
    assert "40 steps on each, then the check ended it" in report.run_summary


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_without_a_rule_is_found(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relation, changes = WRONG[mistake]
    report = run_check(tmp_path, SCRIPT.format(**RIGHT | changes), monkeypatch, relations_only=True)
    assert [finding.rule for finding in report.findings] == [relation]
