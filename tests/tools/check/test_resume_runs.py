"""check --resume on real scripts: however they save, and whatever they do not restore."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from processes import run

pytestmark = pytest.mark.ranks

SCRIPT = """
import io, os, threading
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(128, 10, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :3].sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DistributedDataParallel(nn.Linear(10, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=16)
state = {"epoch": 0, "updates": 0}


def parts():
    return {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
    }


def save(path="s.pt"):
    content = {**parts(), "state": dict(state)}
    SAVE


if os.path.exists("s.pt"):
    LOAD
for epoch in range(state["epoch"], 4):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        state["updates"] += 1
        IN_STEP
    state["epoch"] = epoch + 1
    SAVING
    dist.barrier()
dist.destroy_process_group()
"""
TO_FILE = """torch.save(content, path + ".tmp")
    os.replace(path + ".tmp", path)"""
SAVERS = {
    "by torch.save": TO_FILE,
    "in a thread": """def write():
        torch.save(content, path + ".tmp")
        os.replace(path + ".tmp", path)
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()""",
    "by way of memory": """buffer = io.BytesIO()
    torch.save(content, buffer)
    with open(path + ".tmp", "wb") as file:
        file.write(buffer.getvalue())
    os.replace(path + ".tmp", path)""",
    "by torch.distributed.checkpoint": """dcp.save(content, checkpoint_id=path)""",
}
FROM_FILE = """content = torch.load("s.pt")"""
FROM_FOLDER = """content = {**parts(), "state": dict(state)}
    dcp.load(content, checkpoint_id="s.pt")"""
RESTORE = """
    model.module.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    schedule.load_state_dict(content["schedule"])
    state = content["state"]
"""
BY_FIRST = """if dist.get_rank() == 0:
        save()"""


def check(
    folder: Path,
    saver: str = "by torch.save",
    mistake: str = "",
    saving: str = "",
    in_step: str = "pass",
) -> tuple[int, list[str], str]:
    """The exit code, each finding as `rule: evidence`, and why it was not checked."""
    load = FROM_FOLDER if "distributed" in saver else FROM_FILE
    saving = saving or ("save()" if "distributed" in saver else BY_FIRST)
    text = SCRIPT.replace("SAVE\n", SAVERS[saver] + "\n").replace("SAVING", saving)
    text = text.replace("IN_STEP", in_step)
    text = text.replace("    LOAD\n", f"    {load}{RESTORE}    {mistake}\n")
    (folder / "train.py").write_text(text)
    done = run("check", "--resume", "--json", "train.py", cwd=folder)
    report = json.loads(done.stdout)
    not_checked = report["not_checked"] or {"line": ""}
    findings = [f"{each['rule']}: {each['evidence']}" for each in report["findings"]]
    return done.returncode, findings, not_checked["line"]


@pytest.mark.slow
def test_a_script_that_goes_on_as_the_unbroken_run_has_no_finding(tmp_path: Path) -> None:
    assert check(tmp_path) == (0, [], "")


@pytest.mark.slow
def test_a_large_picture_is_no_snapshot_of_a_script_that_saves_by_torch(tmp_path: Path) -> None:
    picture = "open(f'picture{dist.get_rank()}.png', 'wb').write(bytes(1 << 17))"
    assert check(tmp_path, in_step=picture) == (0, [], "")


# What is wrong after a load, and the finding.
MISTAKES = {
    "an epoch": ("state['epoch'] -= 1", "resume-epoch: .* epoch 0 is trained again"),
    "a schedule": ("schedule.step()", "resume-lr: .* the schedule is 1 steps ahead"),
    "a counter": ("state['updates'] = 0", "resume-differs: state.updates in s.pt after step"),
    "weights": ("model.module.bias.data.zero_()", "resume-differs: before step 5 already"),
    # A public complaint: the first resume is right, and the second one begins anew.
    "the second time": (
        "state['epoch'] = 1",
        "resume-epoch: .* epoch 1 is trained again, at resume 2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_what_is_not_restored_is_named(mistake: str, expected: str, tmp_path: Path) -> None:
    code, findings, _ = check(tmp_path, mistake=mistake)
    assert code == 1
    assert [finding for finding in findings if re.match(expected, finding)], findings


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.parametrize("saver", list(SAVERS)[1:])
def test_a_mistake_is_named_however_the_script_saves(saver: str, tmp_path: Path) -> None:
    code, findings, _ = check(tmp_path, saver, "state['epoch'] -= 1")
    assert (code, [finding.partition(":")[0] for finding in findings]) == (1, ["resume-epoch"])


@pytest.mark.slow
def test_a_script_that_saves_nothing_is_not_checked(tmp_path: Path) -> None:
    code, findings, line = check(tmp_path, saving="pass")
    assert (code, findings) == (3, [])
    assert "written no file that holds its weights" in line
