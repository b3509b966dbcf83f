"""Scripts for Hydra, `accelerate launch` and `fabric run`: each runs as its users start it, and under
`check`, which is not told how.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRAINS = """
def train(model, optimizer, loader, backward):
    for epoch in range(2):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()


def numbers():
    x = torch.randn(160, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
"""
WITH_ACCELERATE = f"""
import torch
from accelerate import Accelerator
{TRAINS}

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(numbers(), 32 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
train(model, optimizer, loader, accelerator.backward)
print(accelerator.num_processes, "processes")
accelerator.end_training()
"""
WITH_FABRIC = f"""
import torch
from lightning_fabric import Fabric
{TRAINS}

fabric = Fabric()
fabric.seed_everything(0, verbose=False)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = torch.utils.data.DataLoader(numbers(), 32 // fabric.world_size, shuffle=True)
train(model, optimizer, fabric.setup_dataloaders(loader), fabric.backward)
print(fabric.world_size, "processes")
"""
WITH_HYDRA = f"""
import os
import hydra
import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler
{TRAINS}

with open(".env") as file:
    os.environ.update(line.strip().split("=") for line in file)


@hydra.main(version_base=None, config_path=None)
def main(config):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ["LEARNING_RATE"]))
    data = numbers()
    batch_size = config.batch // dist.get_world_size()
    loader = torch.utils.data.DataLoader(data, batch_size, sampler=DistributedSampler(data))
    train(model, optimizer, loader, torch.Tensor.backward)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "weights.pt")
    dist.destroy_process_group()


main()
"""


def skip_without(module: str, package: str) -> None:
    """Skip a test where a package is not installed, without an import: some change variables."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {package}: pip install {package}")


def run(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=os.environ | {"PATH": folders},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def check(folder: Path, *arguments: str, notes: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the report of a check that finds at most these notes, and leaves no file."""
    before = sorted(folder.rglob("*"))
    done = run(folder, sys.executable, "-m", "stepladder", "check", "--json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(folder.rglob("*")) == before
    report: dict[str, Any] = json.loads(done.stdout)
    findings = {(finding["rule"], finding["severity"]) for finding in report["findings"]}
    assert findings <= {(rule, "note") for rule in notes}, report["findings"]
    return report


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_for_accelerate_launch(tmp_path: Path) -> None:
    skip_without("accelerate", "accelerate")
    (tmp_path / "train.py").write_text(WITH_ACCELERATE)
    done = run(tmp_path, "accelerate", "launch", "--cpu", "train.py")
    assert "1 processes" in done.stdout, done.stderr
    assert check(tmp_path, "train.py")["ran"].startswith("2 ranks, 2 epochs, 10 steps")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_for_fabric_run(tmp_path: Path) -> None:
    skip_without("lightning_fabric", "lightning-fabric")
    (tmp_path / "train.py").write_text(WITH_FABRIC)
    flags = "--accelerator=cpu", "--devices=2", "--strategy=ddp"
    done = run(tmp_path, "fabric", "run", *flags, "train.py")
    # Two processes print at the same time, so their lines may be mixed.
    assert done.returncode == 0 and done.stdout.count("2") == 2, done.stdout + done.stderr
    report = check(tmp_path, "train.py")
    assert report["ran"].startswith("2 ranks, 2 epochs, 10 steps")
    assert "started as fabric run does it" in report["notes"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("changes_folder", [True, False])
def test_a_script_for_hydra_reads_its_variables_and_makes_its_run_folder_in_the_copy(
    changes_folder: bool, tmp_path: Path
) -> None:
    skip_without("hydra", "hydra-core")
    (tmp_path / "train.py").write_text(WITH_HYDRA)
    (tmp_path / ".env").write_text("LEARNING_RATE=0.05\n")
    arguments = "train.py", "+batch=32", f"hydra.job.chdir={changes_folder}"
    # Hydra names its folder by the second: ranks that start in one write the same config.yaml.
    report = check(tmp_path, *arguments, notes=frozenset({"many-writers"}))
    assert report["ran"].startswith("2 ranks, 2 epochs, 10 steps")
