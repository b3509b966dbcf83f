"""`convert --to job`: a job of the script's own lines, or a sentence why there is none.

The job of docs/examples/one_process.py is made and trained by the test of docs/convert.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import refused, run
from stepladder.tools.convert.convert import ConversionRequest, Conversions, convert
from stepladder.tools.convert.job_fragments import Fragment, free_names, keep_needed

# All that a job takes: arguments, a summed loss, a schedule for each epoch, a limit of gradients.
OF_A_MODULE = """\
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=4)
args = parser.parse_args()
EPOCHS = 3


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.layers(x)


def distance(output, target):
    return (output - target).abs().mean() * args.hidden


torch.manual_seed(0)
x = torch.randn(120, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 20, shuffle=True)
test_loader = DataLoader(TensorDataset(x[:50], x[:50].sum(1, keepdim=True)), 25)
net = Net(args.hidden)
nn.init.zeros_(net.layers[0].bias)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, EPOCHS // 3)
for epoch in range(EPOCHS):
    net.train()
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        output = net(inputs)
        loss = (output - targets).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 100.0)
        optimizer.step()
        if step % 2 == 0:
            print(step, loss.item())
    schedule.step()
    total = 0.0
    with torch.no_grad():
        for inputs, targets in test_loader:
            total += distance(net(inputs), targets).item()
    print(epoch, total / len(test_loader))
"""
OF_A_CLASS = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.x[index].sum()}


class Trainer:
    def __init__(self, model, loader):
        self.model = model
        self.loader = loader
        self.optimizer = torch.optim.Adam(model.parameters())
        self.seen = 0

    def train_epoch(self):
        criterion = nn.MSELoss()
        for batch in self.loader:
            x = batch["x"]
            loss = criterion(self.model(x).squeeze(1), batch["y"])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.seen += len(x)

    def evaluate(self, loader):
        wrong = 0
        for batch in loader:
            with torch.no_grad():
                output = self.model(batch["x"]).squeeze(1)
            wrong += (output - batch["y"]).abs().gt(0.1).sum()
        return wrong

    def run(self, epochs, loader):
        for _ in range(epochs):
            self.train_epoch()
            print(self.seen, self.evaluate(loader))


if __name__ == "__main__":
    print(torch.randn(1))
    trainer = Trainer(nn.Linear(4, 1), DataLoader(Points(120), 20, drop_last=True))
    trainer.run(4, DataLoader(Points(60), batch_size=20))
"""
REFUSED = {
    "needs epoch for its loss": ("sum()\n", "sum() * (1 + epoch)\n"),
    "does not call step once for each batch": (
        "        optimizer.step()\n",
        "        if step % 2:\n            optimizer.step()\n",
    ),
    "neither a mean nor a sum over samples": (".sum()\n", ".sum().sqrt()\n"),
    "reads samples in an order of its own": (
        "20, shuffle=True",
        "20, sampler=torch.utils.data.RandomSampler(x)",
    ),
    "its losses are": ("        if step % 2 == 0:", "        net.layers[0].bias.data += 1\n        if True:"),
}  # fmt: skip

ranks = pytest.mark.ranks


def convert_in(folder: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> Conversions:
    monkeypatch.chdir(folder)
    return convert(ConversionRequest(folder / "train.py", args, to="job"))


def test_what_nothing_needs_is_left_out() -> None:
    lines = ["a = 1", "b = a", "c = 2", "b.append(c)", "log(b)", "print(b)", "d = [c for c in b]"]
    fragments = list(map(Fragment, lines))
    assert [fragment.text for fragment in keep_needed(fragments, {"d"})] == [*lines[:5], lines[6]]
    in_a_function = [fragment.text for fragment in keep_needed(fragments, {"d"}, "model")]
    assert in_a_function == [*lines[:4], lines[6]]
    assert free_names(list(map(Fragment, [lines[6], "e = d + f"]))) == {"b", "f"}


@pytest.mark.parametrize(
    ("line", "loads", "changes"),
    [
        ("args.lr = rate", {"args", "rate"}, {"args"}),
        ("def f(x):\n    y = x\n    return y + z", {"f", "z"}, {"f"}),
        ("import torch.nn as nn", {"nn"}, {"nn"}),
        ("values[i] += 1", {"values", "i"}, {"values"}),
        ("if a:\n    model.cuda()", {"a", "model"}, {"model"}),
    ],
)
def test_what_a_statement_reads_and_changes(line: str, loads: set[str], changes: set[str]) -> None:
    assert (Fragment(line).loads, Fragment(line).changes) == (loads, changes)


@ranks
@pytest.mark.slow
def test_a_script_of_one_module_becomes_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(OF_A_MODULE)
    result = convert_in(tmp_path, monkeypatch, ("--hidden", "8"))
    assert result.stopped == ""
    text = result.files["train.py"]
    top, _, build = text.partition("def build(config):")
    assert "class Net" in top and "epochs: int = 3" in top
    assert "EPOCHS = 3\n" in top and "    EPOCHS = config.epochs\n" in build
    assert "def distance" in build  # it reads the arguments, which are those of build
    assert "parser.parse_args(['--hidden', '8'])" in build
    assert "nn.init.zeros_" in build and "print" not in text
    assert "return loss, len(batch[0]) / config.global_batch" in build  # a sum
    assert '"total": (distance(net(inputs), targets) * len(batch[0]), len(batch[0]))' in build
    assert 'schedule=schedule,\n        schedule_per="epoch",\n        clip_norm=100.0,' in build


@ranks
@pytest.mark.slow
@pytest.mark.corpus
def test_a_class_that_trains_becomes_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(OF_A_CLASS)
    result = convert_in(tmp_path, monkeypatch, ())
    assert result.stopped == ""
    [proved] = result.rungs
    assert proved.not_judged[1:] == [
        "a job shuffles the samples, and the script does not",
        "a job trains the smaller last batch, too, and the script drops it",
        "lines before the training that the job leaves out draw random numbers",
    ]
    _, _, build = result.files["train.py"].partition("def build(config):")
    assert 'loss = criterion(model(x).squeeze(1), batch["y"])' in build
    assert '"wrong": ((output - batch["y"]).abs().gt(0.1).sum(), len(batch[\'x\']))' in build
    assert "trainer.model,\n" in build and "trainer.loader.dataset,\n" in build


@ranks
@pytest.mark.slow
@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_job_can_be_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    (tmp_path / "train.py").write_text(OF_A_MODULE.replace(*REFUSED[reason], 1))
    result = convert_in(tmp_path, monkeypatch, ())
    assert reason in result.stopped and not result.files


@ranks
@pytest.mark.parametrize("flags", [("--rung", "c"), ("--stop-signals",)])
def test_flags_of_a_script_are_refused_for_a_job(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(OF_A_CLASS)
    done = run("convert", "--to", "job", *flags, "train.py", cwd=tmp_path)
    refused(done, "HINT: stepladder convert --to job train.py")
