"""What a batch is made of, and what its loss depends on, are the same on any number of processes."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from processes import run
from stepladder.tools.check.events import (
    Backward,
    Batch,
    Forward,
    OptimizerStep,
    PassStart,
    ProbeEvent,
)
from stepladder.tools.check.recording import RankLog
from stepladder.tools.convert.convert import ConversionRequest, convert
from stepladder.tools.convert.helpers import HELPERS, IMPORTS

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""
DICE = f"""{HEAD}
torch.manual_seed(0)
x = torch.randn(53, 6)  # of the last batch one process has 3 rows, and one 2
y = (x.mean(1, keepdim=True) + torch.linspace(-1, 1, 53)[:, None] > 0).float()
loader = DataLoader(TensorDataset(x, y), 12, shuffle=True)
net = nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for epoch in range(3):
    for rows, targets in loader:
        optimizer.zero_grad()
        shares = net(rows).sigmoid()
        loss = 1 - 2 * (shares * targets).sum() / (shares.sum() + targets.sum())
        loss.backward()
        optimizer.step()
    print(f"{{loss.item():.5f}}")
"""
SMALLER_LAST_BATCH = f"""{HEAD}
torch.manual_seed(0)
x = torch.randn(45, 6)
loader = DataLoader(TensorDataset(x), 8, shuffle=True)
maker, judge = nn.Linear(3, 6), nn.Linear(6, 1)
maker_step = torch.optim.Adam(maker.parameters(), lr=0.01)
judge_step = torch.optim.Adam(judge.parameters(), lr=0.01)
for epoch in range(3):
    total = 0.0
    for (real,) in loader:
        made = maker(real[:, :3])
        judge_step.zero_grad()
        (judge(made.detach()).square() + (judge(real) - 1).square()).mean().backward()
        judge_step.step()
        maker_step.zero_grad()
        loss = (judge(made) - 1).square().mean() + 0.1 * (made - real).abs().mean()
        loss.backward()
        maker_step.step()
        total += loss.item() * len(real)
    print(f"{{total / len(x):.5f}}")
"""
# Of nine batches one is left over, of twelve none.
ACCUMULATED = f"""{HEAD}
torch.manual_seed(0)
x = torch.randn(96, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
net = nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for number, (rows, targets) in enumerate(loader):
        loss = (net(rows) - targets).square().mean() / 2
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    print(f"{{loss.item():.5f}}")
"""
THREE_TRAININGS = (
    HEAD
    + "".join(
        f"""

def train_{number}(net, loader):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    print(f"{{net.weight.sum().item():.4f}}")
"""
        for number in range(3)
    )
    + """
torch.manual_seed(0)
data = torch.arange(48 * 8).reshape(48, 8) % 7 / 7
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8)
train_0(nn.Linear(8, 1), loader)
train_1(nn.Linear(8, 1), loader)
train_2(nn.Linear(8, 1), loader)
"""
)
IN_ORDER = f"""{HEAD}
torch.manual_seed(0)
x, y = torch.rand(200, 8), torch.randint(0, 2, (200,))
x[:, 0] += y
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
test_loader = DataLoader(TensorDataset(x, y), batch_size=12)
net = nn.Linear(8, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
for epoch in range(6):
    for rows, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(rows), labels).backward()
        optimizer.step()
    predictions = []
    with torch.no_grad():
        for rows, labels in test_loader:
            predictions += net(rows).argmax(1).tolist()
    print("right:", sum(p == t for p, t in zip(predictions, y.tolist())))
"""
AS_IN_A_NOTEBOOK = f"""{HEAD}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def loss(self, x):
        return self.layer(x).square().mean()


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

import math

loader = DataLoader(TensorDataset(torch.arange(48.0 * 8).reshape(48, 8) / 384), 8)
test_loader = DataLoader(TensorDataset(torch.arange(48.0 * 8).reshape(48, 8) / 384), 8)
for epoch in range(3):
    for x, in loader:
        optimizer.zero_grad()
        net.loss(x).backward()
        optimizer.step()
    total = 0.0
    with torch.no_grad():
        for x, in test_loader:
            total += net.loss(x).item()
    print(math.floor(total))
"""
SOME_BATCHES = f"""{HEAD}

def mean_loss(net, loader, batches):
    total, batches = 0.0, min(batches, len(loader))
    with torch.no_grad():
        for i, (x, y) in enumerate(loader):
            if i == batches:
                break
            total += nn.functional.mse_loss(net(x), y).item()
    return total / batches


torch.manual_seed(0)
data = torch.arange(48 * 8).reshape(48, 8) % 7 / 7
data = TensorDataset(data, data.sum(1, keepdim=True))
loader, test_loader = DataLoader(data, 8, shuffle=True), DataLoader(data, 8)
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
step = 0
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        step += 1
        if step % 3 == 0:
            print(f"{{mean_loss(net, test_loader, 2):.4f}}")
            mean_loss(net, loader, 2)
"""
METERS = f"""{HEAD}
class Meter:
    total = count = 0

    def update(self, value, n):
        self.total += value * n
        self.count += n
        self.mean = self.total / self.count


def note(metrics, value, n):
    metrics["loss"] += value * n


torch.manual_seed(0)
x = torch.randn(48, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 12, shuffle=True)
net = nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    losses = Meter()
    metrics = {{"loss": 0.0}}
    for rows, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(rows), targets)
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), len(rows))
        note(metrics, loss.item(), len(rows))
    print(f"{{metrics['loss'] / 48:.4f}}")
    print("loss {{losses.mean:.4f}}".format(losses=losses))
"""
SHAPED = f"""{HEAD}
torch.manual_seed(0)
batch_size = 12
x = torch.randn(48, 6)
loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size, shuffle=True)
net = nn.Linear(6, 6)
nn.init.zeros_(net.weight)  # an error of 100 %, of each part of a sample, too
nn.init.zeros_(net.bias)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    total = 0
    for rows, targets in loader:
        optimizer.zero_grad()
        outputs = net(rows)
        nn.functional.mse_loss(outputs, targets).backward()
        optimizer.step()
        errors = (outputs - targets).view(batch_size, -1).norm(dim=1)
        total += (errors / targets.view(batch_size, -1).norm(dim=1)).sum().item()
    print(f"{{total / len(loader.dataset):.4f}}")
"""
BY_FORWARD = f"""{HEAD}
torch.manual_seed(0)
x = torch.randn(48, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 12, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(6, 1)

    def forward(self, x):
        return self.layers(x)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
for epoch in range(3):
    total = 0
    for rows, targets in loader:
        optimizer.zero_grad()
        loss = (net.forward(rows) - targets).square().sum()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"{{total:.4f}}")
"""
GAN_BY_HAND = """\
import torch
from torch import nn

torch.manual_seed(0)
made, judged = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
of_made = torch.optim.SGD(made.parameters(), lr=0.01)
of_judged = torch.optim.SGD(judged.parameters(), lr=0.01)
for step in range(20):
    real = torch.randn(8, 2) + 1
    noise = torch.randn(8, 4)
    fake = made(noise)
    loss = judged(fake.detach()).square().mean() + (judged(real) - 1).square().mean()
    of_judged.zero_grad()
    loss.backward()
    of_judged.step()
    noise = torch.randn(8, 4)
    of_made.zero_grad()
    (judged(made(noise)) - 1).square().mean().backward()
    of_made.step()
"""

DERIVED_ITEM = f"""{HEAD}
torch.manual_seed(0)
x = torch.randn(48, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 12, shuffle=True)
test_loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
net = nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for epoch in range(3):
    for rows, targets in loader:
        optimizer.zero_grad()
        (net(rows) - targets).square().mean().backward()
        optimizer.step()
    found = {{"count": 0, "squares": 0.0, "error": 0.0}}
    with torch.no_grad():
        for rows, targets in test_loader:
            found["count"] += len(rows)
            found["squares"] += (net(rows) - targets).square().sum().item()
            found["error"] = (found["squares"] / found["count"]) ** 0.5
    print(f"{{found['error']:.4f}}")
"""
BEFORE_THE_LOOP = f"""{HEAD}
best = 9.0


def main():
    global best
    torch.manual_seed(0)
    x = torch.randn(48, 6)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 12, shuffle=True)
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    history = {{"loss": []}}
    if len(x) > 100:
        patience = 5
    else:
        patience = 2
    for epoch in range(3):
        total = 0
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = (net(rows) - targets).square().mean()
            loss.backward()
            optimizer.step()
            total += loss.item() / len(loader)
        history["loss"].append(total)
        if total < best:
            best = total
        else:
            patience -= 1
        print(f"{{total:.4f}}")
    print(len(history["loss"]))


main()
"""

slow = pytest.mark.slow
ranks = pytest.mark.ranks


def convert_text(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> str:
    """Convert a script up to a rung; return its text, which is written as train_ddp.py."""
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(folder)
    result = convert(ConversionRequest(folder / "train.py", (), last))
    assert result.stopped == ""
    (folder / "train_ddp.py").write_text(result.files["train.py"])
    return result.files["train.py"]


@ranks
@slow
def test_a_snapshot_has_what_has_a_value_before_the_loop_and_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = convert_text(BEFORE_THE_LOOP, tmp_path, monkeypatch, "g")
    (saving,) = [line for line in converted.splitlines() if line.startswith("        save_snap")]
    assert {"history=history", "best=best", "patience=patience"} <= {
        *re.findall(r"\w+=\w+", saving)
    }


@ranks
@slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DICE, "        shares = gather_rows(net(rows)).sigmoid()\n        targets = gather_rows("),
        (SMALLER_LAST_BATCH, "weigh_by_rows(maker)"),
        pytest.param(THREE_TRAININGS, "    net = DistributedData", marks=pytest.mark.corpus),
        (IN_ORDER, "    predictions = sum_over_processes(predictions)"),
        pytest.param(SOME_BATCHES, "last_saved = load_snapshot(", marks=pytest.mark.corpus),
        (METERS, "losses.update(mean_over_processes(loss.item()), len(rows))"),
        (BY_FORWARD, "        (loss * dist.get_world_size()).backward()"),
        (SHAPED, "batch_size = share_of_batch(batch_size)"),
        (DERIVED_ITEM, "(net.module(rows) - targets).square().sum()"),
        (AS_IN_A_NOTEBOOK, "join_processes()\nshow_on_one_process()\nnet = Net()"),
    ],
    ids=[
        "a ratio of sums",
        "a smaller last batch",
        "three trainings",
        "in order",
        "some batches",
        "meters",
        "by forward",
        "shaped",
        "derived item",
        "as in a notebook",
    ],
)
def test_two_processes_show_the_numbers_of_one(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = "g" if text == SOME_BATCHES else "f"
    converted = convert_text(text, tmp_path, monkeypatch, last)
    assert converted.count(expected) == (3 if text == THREE_TRAININGS else 1)
    alone = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=60)
    together = run("run", "--nproc", 2, "train_ddp.py", cwd=tmp_path)
    assert together.returncode == 0, together.stderr
    if text != AS_IN_A_NOTEBOOK:  # without a seed
        lines = [f"[rank 0] {line}" for line in alone.stdout.splitlines()]
        assert together.stdout.splitlines() == lines


@ranks
@slow
@pytest.mark.corpus
def test_a_gradient_that_few_batches_leave_is_no_part_of_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "load_snapshot(" in convert_text(ACCUMULATED, tmp_path, monkeypatch, "g")


@ranks
@slow
@pytest.mark.corpus
def test_what_is_made_of_shares_is_not_shared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = convert_text(GAN_BY_HAND, tmp_path, monkeypatch, "c")
    shared = [line.strip() for line in text.splitlines() if "= share_rows(" in line]
    assert shared == ["real = share_rows(real)", "noise = share_rows(noise)"]


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_sample_of_a_smaller_last_batch_is_dealt_once(drop_last: bool) -> None:
    """Where it has fewer samples than there are processes, a line says so."""
    for length, batch, size in itertools.product(range(1, 40), (4, 12), (1, 2, 4)):
        rest = length % batch
        samplers = [share_of(rank, size, range(length), batch, drop_last) for rank in range(size)]
        if 0 < rest < size and not drop_last:
            with pytest.raises(SystemExit, match=f"a last batch of {rest} has no sample for each"):
                list(samplers[0])
            continue
        shares = [list(sampler) for sampler in samplers]
        assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
        assert sorted(itertools.chain(*shares)) == [*range(length - rest * drop_last)]
        batches = {-(-len(share) // (batch // size)) for share in shares}
        assert batches == {(length - rest) // batch + (rest > 0 and not drop_last)}


def share_of(rank: int, size: int, *arguments: Any) -> Any:
    """Return the share that a process takes of a sampler, as a converted script does."""
    distributed = SimpleNamespace(
        get_rank=lambda: rank, get_world_size=lambda: size, broadcast_object_list=lambda _: None
    )
    names: dict[str, Any] = {
        "dist": distributed,
        "islice": itertools.islice,
        "DataLoader": SimpleNamespace(),
    }
    exec(f"import sys\n{HELPERS['ShareOfSampler']}\n{HELPERS['require_share']}", names)
    return names["ShareOfSampler"](*arguments)


def test_parts_of_all_processes_are_in_the_order_of_the_batches() -> None:
    def join(first: Any, second: Any, *sizes: list[int]) -> Any:
        names: dict[str, Any] = {
            "torch": torch,
            "DataLoader": SimpleNamespace(given=sizes[0]),
            "gather_objects": lambda value: [*sizes] if value is sizes[0] else [first, second],
        }
        exec("\n".join([*IMPORTS_OF_ITERATION, HELPERS["in_order"]]), names)
        return names["in_order"]([first, second])

    by_sample = join([1, 2, 5], [3, 4], [2, 1], [2])
    assert by_sample == [[1, 2], [3, 4], [5]]
    by_batch = join(["a", "c"], ["b"], [2, 1], [2])
    assert by_batch == [["a"], ["b"], ["c"]]
    assert join([1], [2, 3], [2, 1], [2]) == [[1], [2, 3]]
    rows = join(torch.tensor([[1], [2], [5]]), None, [2, 1], [])
    assert torch.cat(rows).flatten().tolist() == [1, 2, 5]


IMPORTS_OF_ITERATION = [IMPORTS[name] for name in ("accumulate", "chain", "zip_longest")]


def test_sums_of_items_and_numbers_of_numpy_are_those_of_python() -> None:
    def call(name: str, value: Any, *parts: Any) -> Any:
        names = {"gather_objects": lambda _: [value, *parts], "chain": itertools.chain}
        exec(HELPERS[name], names)
        return names[name](value)  # type: ignore[operator]

    assert call("sum_items_over_processes", [1, 2], [3, 0]) == [4, 2]
    assert call("sum_items_over_processes", {"a": 1}, {"b": 2, "a": 1}) == {"a": 2, "b": 2}
    assert call("sum_items_over_processes", np.array([1, 2]), np.array([3, 4])).tolist() == [4, 6]
    plain = call("to_plain", {"losses": [np.float64(0.5), (1, np.int64(2))], "text": "a"})
    assert repr(plain) == "{'losses': [0.5, (1, 2)], 'text': 'a'}"


def test_a_teacher_does_not_end_the_pass_of_its_student() -> None:
    student, teacher = Forward(root=1, grad=True), Forward(root=2, grad=False)
    step: list[ProbeEvent] = [
        student,
        teacher,
        Backward(),
        OptimizerStep(optimizer=0, step=0, lr=[0.1], numel=1),
    ]
    evaluation: list[ProbeEvent] = [Forward(root=1, grad=False)]
    passes = RankLog(0, [*step, *step, *evaluation, *step]).all_passes
    assert [(item.is_training, len(item.batches)) for item in passes] == [
        (True, 2),
        (False, 1),
        (True, 1),
    ]


def test_an_evaluation_that_keeps_gradients_is_told_by_the_mode_of_the_model() -> None:
    training, evaluation = Forward(root=1, moded=1, moded_on=1), Forward(root=1, moded=1)
    frozen = Forward(root=2, moded=1)  # a teacher
    passes = RankLog(0, [frozen, training, Backward(), evaluation, evaluation]).all_passes
    assert [(item.is_training, len(item.batches)) for item in passes] == [(True, 1), (False, 2)]


def test_a_pass_that_was_left_gets_no_step_of_the_pass_around_it() -> None:
    outer, inner = PassStart(number=1, loader=1), PassStart(number=2, loader=1)
    batches = [Batch(number=number, indices=None, rows=[], size=8) for number in (1, 2, 1)]
    events = [outer, batches[0], Backward(), inner, batches[1], batches[2], Backward()]
    first, second = RankLog(0, events).passes
    assert (first.is_training, second.is_training) == (True, False)
