"""A script of one process is converted as far as runs prove it, and is said why no further."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from processes import run
from stepladder.cli.convert import write_files
from stepladder.tools.convert import convert as converting
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.convert import ConversionRequest, Conversions, Converter, convert
from stepladder.tools.convert.ladder import RUNGS, Rung, compose
from stepladder.tools.convert.proof import RungProof
from stepladder.tools.convert.source import Edit, EditedText

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "one_process.py"
BY_HAND = """\
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 4)


def take(step):
    return data[8 * step : 8 * step + 8]


for step in range(8):
    optimizer.zero_grad()
    model(take(step)).square().mean().backward()
    optimizer.step()
"""

BATCH_NORM = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(net, loader):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(3):
        for (x,) in loader:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    print(len(net.layers))


net = nn.Module()
net.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
net.forward = net.layers.forward
train(net, DataLoader(TensorDataset(torch.randn(240, 4)), 40, shuffle=True))
print(net.layers[0].weight.sum().item())
"""

pytestmark = pytest.mark.ranks


def convert_in(folder: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> Conversions:
    monkeypatch.chdir(folder)
    return convert(ConversionRequest(folder / "train.py", (), last))


def convert_script(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> str:
    """Convert a script up to a rung, and return the text of train_ddp.py, which is written."""
    shutil.copy(Path(__file__).parent / "scripts" / f"{name}.py", folder / "train.py")
    result = convert_in(folder, monkeypatch, last)
    assert result.stopped == ""
    (folder / "train_ddp.py").write_text(result.files["train.py"])
    return result.files["train.py"]


@pytest.mark.slow
def test_samples_that_are_cut_by_hand_need_a_name_and_are_shared_as_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    result = convert_in(tmp_path, monkeypatch, "b")
    assert "train.py:14 calls the model with rows that have no name: write" in result.stopped
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    cut = "data[8 * step : 8 * step + 8]"
    (tmp_path / "train.py").write_text(BY_HAND.replace("model(take(step))", f"model({cut})"))
    result = convert_in(tmp_path, monkeypatch, "c")
    assert result.stopped == ""
    assert f"model(share_rows({cut}))" in result.files["train.py"]
    one_line = BY_HAND.replace("    model(take(step))", "    x = take(step); model(x)")
    (tmp_path / "train.py").write_text(one_line.replace("backward()\n    opt", "backward(); opt"))
    result = convert_in(tmp_path, monkeypatch, "c")
    assert result.stopped == ""
    assert "    x = share_rows(x)\n    model(x)" in result.files["train.py"]


@pytest.mark.slow
def test_batches_that_no_loader_cuts_give_the_same_numbers_on_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = convert_script("cut_by_hand", tmp_path, monkeypatch, "f")
    assert "        batch = share_rows(batch)\n        loss =" in text
    starts = ((), ("--nproc", "2"), ("--nproc", "4"))
    runs = [run("run", *flags, "train_ddp.py", cwd=tmp_path) for flags in starts]
    assert [done.returncode for done in runs] == [0, 0, 0]
    lines = [done.stdout.replace("[rank 0] ", "").splitlines()[-4:] for done in runs]
    assert lines[0] == lines[1] == lines[2]
    refused = run("run", "--nproc", "3", "train_ddp.py", cwd=tmp_path)
    assert refused.returncode
    assert "a batch of 40 has no equal shares for 3 processes" in refused.stdout + refused.stderr


@pytest.mark.slow
@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cut_by_hand", '"rng": GeneratorState(rng)'),
        ("windows", "losses['held out'] = mean_over_processes(losses['held out'])"),
        ("windows", "if step % steps_between_snapshots == 0:\n        save_snapshot("),
    ],
)
def test_a_training_without_a_loader_is_resumed(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected in convert_script(name, tmp_path, monkeypatch, RUNGS[-1].letter)
    assert run("run", "--nproc", "2", "train_ddp.py", cwd=tmp_path).returncode == 0


@pytest.mark.slow
@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "expected", "absent"),
    [
        (
            "masked",
            ["(losses * mask).sum() / mean_in_training(mask.sum())", "mean_by_batches(sum(losses)"],
            "mean_over_processes(sum(losses)",
        ),
        ("redrawn", ["share_samples(DataLoader("], "draw_own_numbers()"),
    ],
)
def test_a_converted_script_prints_the_numbers_of_one_process(
    name: str, expected: list[str], absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = convert_script(name, tmp_path, monkeypatch, "f")
    assert all(each in text for each in expected)
    assert absent not in text
    one = run("run", "--independent", "train.py", cwd=tmp_path)
    two = run("run", "--nproc", "2", "train_ddp.py", cwd=tmp_path)
    assert [one.returncode, two.returncode] == [0, 0]
    assert one.stdout.splitlines()[-3:] == two.stdout.replace("[rank 0] ", "").splitlines()[-3:]


@pytest.mark.slow
@pytest.mark.corpus
def test_a_loop_of_steps_around_another_one_saves_every_some_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = convert_script("two_models", tmp_path, monkeypatch, "g")
    assert "    if (turn + 1) % steps_between_snapshots == 0:\n        save_snapshot(" in text


FIXED_SIZE = ("loss = (output", "loss = (torch.zeros(SIZE, 1) + output")
LATE = """\
import random

import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memory = []
for epoch in range(20):
    memory.append(torch.randn(4))
    if len(memory) < 10:
        continue
    for step in range(4):
        x = torch.stack(random.sample(memory, 8))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    sample = torch.randn(3, 4)
    print(model(sample).mean().item())
"""


@pytest.mark.slow
def test_what_is_no_share_of_a_batch_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parent / "scripts" / "two_models.py").read_text()
    (tmp_path / "train.py").write_text(text.replace(*FIXED_SIZE))
    expected = "fails at `loss = (torch.zeros(SIZE, 1) + output - 2 * x).square().mean()`"
    assert expected in convert_in(tmp_path, monkeypatch, "b").stopped


@pytest.mark.slow
def test_a_call_that_trains_nothing_gets_all_rows_and_a_training_may_begin_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(LATE)
    result = convert_in(tmp_path, monkeypatch, "c")
    assert result.stopped == ""
    assert re.findall("(.*) = share_rows", result.files["train.py"]) == ["        x"]


CARRIED = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lstm, state = nn.LSTM(4, 8), None
optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)
for x, in DataLoader(TensorDataset(torch.randn(64, 3, 4)), 8):
    optimizer.zero_grad()
    output, state = lstm(x, state)
    state = tuple(each.detach() for each in state)
    output.square().mean().backward()
    optimizer.step()
"""
ONE_LINE = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loaders = [DataLoader(TensorDataset(torch.randn(count, 4)), 8) for count in (64, 33)]
for epoch in range(2):
    for x, in loaders[0]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        print(sum(model(x).sum().item() for x, in loaders[1]))
"""


@pytest.mark.slow
def test_a_line_for_two_kinds_of_loaders_shares_each_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_count = "8, shuffle=count == 64) for count in"
    (tmp_path / "train.py").write_text(ONE_LINE.replace("8) for count in", by_count))
    result = convert_in(tmp_path, monkeypatch, "e")
    assert result.stopped == ""
    text = result.files["train.py"]
    assert "share_samples(DataLoader" not in text
    (tmp_path / "train_ddp.py").write_text(text)
    shown = [run("run", *flags, "train_ddp.py", cwd=tmp_path) for flags in ((), ("--nproc", "2"))]
    assert [done.returncode for done in shown] == [0, 0]
    numbers = [re.findall(r"-?\d+\.\d+", done.stdout) for done in shown]
    assert len(numbers[0]) == 2
    one, two = ([float(each) for each in some] for some in numbers)
    assert two == pytest.approx(one, rel=1e-3)


SIZE_IN_THE_LOOP = """\
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_loader(name, options):
    print(name)
    return DataLoader(TensorDataset(torch.randn(64, 4)), **options)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(config):
    options = {"drop_last": True, "batch_size": config["size"]}
    loader = make_loader(options=options, name="train")
    print(f"batches of {config['size']}")
    net = nn.Linear(4, 1)
    optimizer = make_optimizer(net)
    ones = torch.ones(config["size"], 1)
    loss = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        for x, in loader:
            optimizer.zero_grad()
            loss(net(x), ones).backward()
            optimizer.step()
    print(copy.deepcopy(net)(x).mean().item())


if __name__ == "__main__":
    torch.manual_seed(0)
    train({"size": 9})
"""


@pytest.mark.slow
@pytest.mark.corpus
def test_what_is_made_by_the_batch_size_is_of_the_share_and_functions_that_end_wrap_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SIZE_IN_THE_LOOP)
    result = convert_in(tmp_path, monkeypatch, "e")
    assert result.stopped == ""
    assert result.num_processes == 3  # a batch of 9 has no equal shares for 2
    assert all("on 2 processes" not in line for rung in result.rungs for line in rung.proof.holds)
    text = result.files["train.py"]
    lines = [line.strip() for line in text.splitlines()]
    made = lines.index('loader = make_loader(options=options, name="train")')
    assert lines[made + 1] == """config["size"] = share_of_batch(config["size"])"""
    assert lines[made + 2] == """print(f"batches of {sum_over_processes(config['size'])}")"""
    made = lines.index("optimizer = make_optimizer(net)")
    assert lines[made - 1] == "net = DistributedDataParallel(net)"
    assert text.count("= DistributedDataParallel(") == 1


CALLED_BY_A_GLOBAL_NAME = """\
import torch
from torch.utils.data import DataLoader, TensorDataset


def step(x, optimizer):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def train(net, loader, test_loader):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        for x, in loader:
            step(x, optimizer)
    results = torch.zeros(len(test_loader.dataset))
    for number, (x,) in enumerate(test_loader):
        results[8 * number : 8 * number + 8] = net(x).detach().squeeze()
    print(results.std().item())


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
net = torch.nn.Linear(4, 1)
test_loader = DataLoader(TensorDataset(torch.randn(31, 4)), 8)
train(net, DataLoader(data, 8, shuffle=True), test_loader)
"""


@pytest.mark.slow
@pytest.mark.corpus
def test_a_model_is_wrapped_where_training_calls_it_and_what_needs_all_results_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(CALLED_BY_A_GLOBAL_NAME)
    result = convert_in(tmp_path, monkeypatch, "e")
    assert result.stopped == ""
    assert "\nnet = DistributedDataParallel(net)\n" in result.files["train.py"]
    d = result.rungs[3]
    assert d.proof.not_taken and "share_batches" not in result.files["train.py"]


@pytest.mark.slow
def test_an_evaluation_that_shows_each_batch_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes have different numbers of batches: they would wait for each other without end."""
    lines = "    for x, in loaders[1]:\n        print(model(x).mean().item())\n"
    text = re.sub(r"    with torch.no_grad.*", "", ONE_LINE, flags=re.DOTALL) + lines
    by_count = "8, shuffle=count == 64) for count in"
    (tmp_path / "train.py").write_text(text.replace("8) for count in", by_count))
    result = convert_in(tmp_path, monkeypatch, "e")
    assert result.stopped == ""
    assert result.rungs[3].proof.not_taken == ["train.py:14 shows something in each batch"]
    assert "share_ordered" not in result.files["train.py"]


PAIRS = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
size = 32
loader = DataLoader(TensorDataset(torch.randn(320, 8)), size, shuffle=True, drop_last=True)
net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for x, in loader:
        first, second = net(x + 0.1 * torch.randn(size, 8)), net(x + 0.1 * torch.randn(size, 8))
        loss = nn.functional.cross_entropy(first @ second.T, torch.arange(size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_a_loss_over_the_pairs_of_a_batch_is_left_to_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(PAIRS)
    result = convert_in(tmp_path, monkeypatch, "c")
    assert [rung.rung.letter for rung in result.rungs] == ["a", "b"]
    assert "train.py:15: the loss compares the samples of a batch" in result.stopped


def wrap_under_another_name(conversion: Conversion) -> Edits:
    file = conversion.files[conversion.main]
    name = "torch.nn.parallel.DistributedDataParallel"
    yield file.insert_before(file.tree.body[-1], f"wrapped = {name}(net)")


@pytest.mark.slow
def test_processes_that_make_steps_with_their_own_gradients_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(CALLED_BY_A_GLOBAL_NAME)
    c = replace(RUNGS[2], alternatives=(wrap_under_another_name,))
    monkeypatch.setattr(converting, "RUNGS", (*RUNGS[:2], c))
    assert "each process makes steps with its own" in convert_in(tmp_path, monkeypatch, "c").stopped


@pytest.mark.slow
def test_modules_from_other_folders_of_the_repository_are_put_beside_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for folder in (".git", "lib", "project"):
        (root / folder).mkdir(parents=True)
    head, _, tail = SIZE_IN_THE_LOOP.partition("def make_optimizer")
    (root / "lib" / "__init__.py").write_text("")
    (root / "lib" / "data.py").write_text(head)
    path = "import sys\nsys.path.append('..')\nfrom lib.data import *\n"
    (root / "project" / "train.py").write_text(f"{path}def make_optimizer{tail}")
    before = {path: path.read_text() for path in root.rglob("*.py")}
    result = convert_in(root / "project", monkeypatch, "c")
    assert result.stopped == ""
    assert set(result.sources) == {"train.py", "lib/__init__.py", "lib/data.py"}
    assert {path: path.read_text() for path in root.rglob("*.py")} == before
    target = root / "project" / "train_ddp.py"
    written = write_files(result, root / "project" / "train.py", target)
    assert {path.relative_to(root / "project").as_posix() for path in written} == {
        f"train_ddp/{name}" for name in result.sources
    }
    done = run("run", "--nproc", "3", "train_ddp/train.py", cwd=root / "project")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CARRIED, "train.py:9 gives the model what it has returned a step before"),
        (
            ONE_LINE.replace("(64, 33)", "map(int, (64, 33))"),
            "train.py:7 makes loaders for training and for evaluation: write a line for",
        ),
    ],
)
def test_samples_that_cannot_be_shared_are_left_to_a_person(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert (
        f"b, share the training samples: {reason}" in convert_in(tmp_path, monkeypatch, "b").stopped
    )


def test_a_folder_has_all_files_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "nets").mkdir(parents=True)
    (root / "nets" / "__init__.py").write_text("1")
    monkeypatch.chdir(tmp_path)  # the script is in another folder
    sources = {"train.py": "from nets import a", "nets/a.py": "import torch", "nets/b.py": ""}
    changed = {name: sources[name] for name in ("nets/a.py", "train.py")}
    result = Conversions([], changed, "", sources)
    written = write_files(result, root / "train.py", root / "train_ddp.py")
    names = [path.relative_to(root / "train_ddp").as_posix() for path in written]
    assert names == [*sources, "nets/__init__.py"]
    assert [path.read_text() for path in written] == [*sources.values(), "1"]


@pytest.mark.slow
def test_files_of_other_folders_are_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for folder in (root, elsewhere):
        folder.mkdir()
    text = "import torch\nfirst = torch.zeros(1)\n"
    for name in ("linked.py", "inside.py"):
        (elsewhere / name).write_text(text)
    (root / "linked.py").symlink_to(elsewhere / "linked.py")
    (root / "nets").symlink_to(elsewhere)
    (root / "train.py").write_text(f"import linked\nfrom nets import inside\n{ONE_LINE}")
    result = convert_in(root, monkeypatch, "a")
    assert [rung.rung.letter for rung in result.rungs] == ["a"]
    assert set(result.sources) == {"train.py", "linked.py"}
    assert {path.read_text() for path in elsewhere.iterdir()} == {text}


@pytest.mark.slow
@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trainer_class", ".module"),
        ("unseeded", "if dist.get_rank() == 0:\n            with open_whole(str(self.path)"),
        ("logged", "batch {step}: {mean_over_processes(loss.item()):.4f}"),
        ("summed_loss", '"%d of %d samples, loss %.4f" % (sum_over_processes(step * len(x)), '),
    ],
)
def test_a_script_of_another_kind_climbs_the_whole_ladder(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parent / "scripts" / f"{name}.py", tmp_path / "train.py")
    result = convert_in(tmp_path, monkeypatch, RUNGS[-1].letter)
    assert result.stopped == ""
    assert not any(rung.not_judged for rung in result.rungs if rung.rung.letter == "e")
    assert expected in result.files["train.py"]
    assert name != "logged" or "print(mean_over_processes(result))" in result.files["train.py"]
    (resumed,) = (rung.proof.holds for rung in result.rungs if rung.rung.letter == "g")
    assert any(line.startswith("resume: started again") for line in resumed)
    (tmp_path / "train_ddp.py").write_text(result.files["train.py"])
    done = run("run", "--nproc", "2", "train_ddp.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_model_that_is_trained_by_its_parts_and_decides_by_an_attribute_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parent / "scripts" / "fits_itself.py", tmp_path / "train.py")
    result = convert_in(tmp_path, monkeypatch, "f")
    assert result.stopped == ""
    text = result.files["train.py"]
    for expected in (
        "        average_gradients(self)\n        optimizer =",
        "        batch_size = share_of_batch(batch_size)\n",
        "losses.append(total / (sum_over_processes(step + 1)))",
        "            meter.mean = mean_by_batches(meter.mean)\n            if meter.mean < best:",
        'os.makedirs("results", exist_ok=True)',
    ):
        assert expected in text
    (tmp_path / "train_ddp.py").write_text(text)
    lines = [
        run(*start, "train_ddp.py", cwd=tmp_path).stdout.replace("[rank 0] ", "").splitlines()
        for start in (("run", "--nproc", "1"), ("run", "--nproc", "2"))
    ]
    assert lines[0][-6:] == lines[1][-6:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected", "stopped"),
    [
        (
            "phases",
            (
                "share_samples_if(p in ['train'], share_batches_if(p in ['val'], DataLoader(",
                "    model = DistributedDataParallel(model)\n    if fold < 2:",
                "loss = weigh_share(criterion, outputs, labels)\n",
                'newline="") if dist.get_rank() == 0 else open(os.devnull, "w") as file:',
            ),
            "repeats the loop over epochs",
        ),
        pytest.param(
            "padded", ("ignore_index=0, shows_share=True)",), "", marks=pytest.mark.corpus
        ),
    ],
)
def test_shares_of_other_weights_and_loaders_of_two_phases_show_what_one_process_shows(
    name: str,
    expected: tuple[str, ...],
    stopped: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copy(Path(__file__).parent / "scripts" / f"{name}.py", tmp_path / "train.py")
    result = convert_in(tmp_path, monkeypatch, "g")
    assert stopped in result.stopped and "f, " not in result.stopped
    text = result.files["train.py"]
    for part in expected:
        assert part in text
    (tmp_path / "train_ddp.py").write_text(text)
    starts = (("1", "train.py"), ("2", "train_ddp.py"))
    shown = [
        re.findall(r"\d+\.\d+", run("run", "--nproc", *start, cwd=tmp_path).stdout)
        for start in starts
    ]
    assert shown[0] == shown[1] and shown[0]


@pytest.mark.slow
def test_batch_norm_sees_the_whole_batch_and_callers_have_the_model_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(BATCH_NORM)
    result = convert_in(tmp_path, monkeypatch, "c")
    assert result.stopped == ""
    text = result.files["train.py"]
    assert "    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)\n    net = Dist" in text
    assert "    print(len(net.module.layers))" in text
    assert text.rstrip().endswith(
        "print(inner_model(net).layers[0].weight.sum().item())\nleave_processes()"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports_stepladder", "asks"), [(False, "exit_if_asked()\n"), (True, "if stop_signals.agreed")]
)
def test_a_stopped_script_goes_on_with_other_processes(
    imports_stepladder: bool, asks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "train.py")
    (tmp_path / "train_snapshot.pt").write_text("of somebody else")
    monkeypatch.setattr(Converter, "try_edits", take_edits)  # its page proves each rung
    monkeypatch.setattr(Converter, "check_resume", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    request = ConversionRequest(Path("train.py"), imports_stepladder=imports_stepladder)
    text = convert(request).files["train.py"]
    assert ("stepladder" in text) == imports_stepladder
    assert text.count(asks) == 1
    (tmp_path / "whole.py").write_text(text.replace("train_snapshot2.pt", "whole.pt"))
    whole = run("whole.py", cwd=tmp_path, command=(sys.executable,))
    stopping = "epoch == 1 and os.kill(os.getpid(), 15)\n        "
    (tmp_path / "train_ddp.py").write_text(text.replace(asks, stopping + asks))
    stopped = run("run", "--nproc", "2", "train_ddp.py", cwd=tmp_path)
    assert stopped.returncode == 75, stopped.stderr
    resumed = run("train_ddp.py", cwd=tmp_path, command=(sys.executable,))
    assert resumed.returncode == 0, resumed.stderr
    assert "continues from train_snapshot2.pt; for a new training remove it" in resumed.stderr
    assert "continues from" not in whole.stderr
    assert resumed.stdout.splitlines() == whole.stdout.splitlines()[4:]
    assert (tmp_path / "train_snapshot.pt").read_text() == "of somebody else"


@pytest.mark.slow
@pytest.mark.corpus
def test_a_best_model_stays_the_best_over_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parent / "scripts" / "best_of_trainer.py", tmp_path / "train.py")
    result = convert_in(tmp_path, monkeypatch, "g")
    assert result.stopped == ""
    text = result.files["train.py"]
    assert '"self": Attributes(self)' in text
    assert 'log.warning("step %d loss %.5f", self.step, mean_over_processes(loss.item()))' in text
    for name, epochs in (("whole", 4), ("stopped", 2), ("stopped", 4)):
        (tmp_path / name).mkdir(exist_ok=True)
        script = text.replace("epochs=4", f"epochs={epochs}")
        (tmp_path / name / "train_ddp.py").write_text(script)
        done = run("run", "--nproc", "2", "train_ddp.py", cwd=tmp_path / name)
        assert done.returncode == 0, done.stderr
    best = [(tmp_path / name / "best.pt").read_bytes() for name in ("whole", "stopped")]
    assert best[0] == best[1]
    last = [torch.load(tmp_path / name / "train_snapshot.pt") for name in ("whole", "stopped")]
    assert last[0]["parts"]["self"] == last[1]["parts"]["self"]


@pytest.mark.slow
def test_a_notebook_whose_functions_change_globals_goes_on_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = convert_script("cells", tmp_path, monkeypatch, "g")
    assert "nn.DataParallel(model.cuda(), device_ids=[dist.get_node_local_rank(0)])" in text
    shown = {}
    for name, epochs in (("whole", "8"), ("stopped", "4"), ("stopped", "8")):
        (tmp_path / name).mkdir(exist_ok=True)
        shutil.copy(tmp_path / "train_ddp.py", tmp_path / name)
        command = ("run", "--nproc", "2", "train_ddp.py", "--epochs", epochs)
        done = run(*command, cwd=tmp_path / name)
        assert done.returncode == 0, done.stderr
        shown[name] = done.stdout
    assert shown["whole"] == shown["stopped"] != ""


def take_edits(
    self: Converter, conversion: Conversion, rung: Rung, steps: list[list[Edit]]
) -> tuple[dict[str, EditedText], RungProof]:
    return compose(conversion, steps), RungProof()


ASKS_FOR_ITS_RANK = f"import os\nnum_ranks = os.environ.get('WORLD_SIZE')\n{BY_HAND}"
REFUSED = {
    "raise ValueError('its own')": "train.py, on one process, fails at `raise ValueError('its own')`: ValueError: its own. HINT: ",
    "import torch": "train.py, on one process, makes no optimizer step. HINT: python train.py",
    "raise SystemExit(3)": "train.py, on one process, ends with exit code 3. HINT: ",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)": "ends with SIGKILL. HINT: ",
    ASKS_FOR_ITS_RANK: "asks for its rank by itself. HINT: stepladder check train.py",
    "import time\ntime.sleep(3600)": "--timeout allows. HINT: --timeout 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", REFUSED)
def test_a_script_that_shows_nothing_to_convert_is_bad_input(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text)
    limit = ("--timeout", "2") if "sleep" in text else ()
    done = run("convert", *limit, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert REFUSED[text] in done.stderr


def test_nothing_is_written_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    (tmp_path / "train_ddp.py").write_text("mine")
    done = run("convert", "--write", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "train_ddp.py exists" in done.stderr
    assert (tmp_path / "train_ddp.py").read_text() == "mine"
