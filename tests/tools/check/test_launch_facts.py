"""What a script's processes do decides how it is started, and no word in its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepladder.tools.check.check import Report, Request, check
from stepladder.tools.check.events import LibraryRankRead, RankOption, RankRead
from stepladder.tools.check.probe_settings import PROBE_SETTINGS, ProbeSettings
from stepladder.tools.check.recording import read_recording
from stepladder.tools.check.script_runs import KNOWS_NO_RANKS, MAKES_ITS_RANKS
from stepladder.tools.probe.attach import prepend_startup_folder
from stepladder.tools.probe.events import ProbeEvent

RANK_VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int, default=-1)
print(parser.parse_args().local_rank)
"""
PARSES_RANK = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, default=-1)
parser.add_argument("--world-size", type=int)
print(parser.parse_args().rank)
"""


def run_probed(folder: Path, script: str, *args: str) -> tuple[list[ProbeEvent], str]:
    """Run a script without torch as a rank, and return what was recorded and what it printed."""
    (folder / "recordings").mkdir()
    (folder / "train.py").write_text(script)
    settings = ProbeSettings(str(folder / "recordings"), (str(folder),), str(folder), str(folder))
    ran = subprocess.run(
        [sys.executable, "train.py", *args],
        cwd=folder,
        env={
            **os.environ,
            **RANK_VARIABLES,
            "PYTHONPATH": prepend_startup_folder(""),
            PROBE_SETTINGS: settings.to_json(),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (log,) = read_recording(folder / "recordings").ranks
    return log.events, ran.stdout.strip()


def names_read(events: list[ProbeEvent], kind: type[RankRead]) -> list[str]:
    return [event.name for event in events if type(event) is kind]


@pytest.mark.parametrize(
    "script, names",
    [
        ("import os\nos.environ['RANK']\nos.environ.get('RANK')", ["RANK"]),
        ("import os\nos.getenv('LOCAL_RANK', '0')", ["LOCAL_RANK"]),
        ("import os\nprint('SLURM_PROCID' in os.environ)", ["SLURM_PROCID"]),
        ("import os\ndict(os.environ), os.environ.copy(), {**os.environ}", []),
        ("import os\n{name: value for name, value in os.environ.items()}", []),
        ("# RANK, torch.distributed, lightning fast\n'init_process_group'\nRANK = 0", []),
    ],
)
def test_a_read_of_a_rank_is_recorded_and_a_word_is_not(
    script: str, names: list[str], tmp_path: Path
) -> None:
    events, _ = run_probed(tmp_path, script)
    assert names_read(events, RankRead) == names
    assert names_read(events, LibraryRankRead) == []


def test_a_library_asks_by_its_calls_and_not_by_its_import(tmp_path: Path) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "helper.py").write_text(
        "import os\nrank = os.environ['RANK']\ndef ask():\n    return os.environ['WORLD_SIZE']\n"
    )
    script = f"import sys\nsys.path.append({str(library)!r})\nimport helper\n"
    events, _ = run_probed(tmp_path, f"{script}helper.ask()\n")
    assert names_read(events, LibraryRankRead) == ["WORLD_SIZE"]
    assert names_read(events, RankRead) == []


@pytest.mark.parametrize(
    "script, args, printed, is_passed",
    [
        (PARSES, (), "1", True),
        (PARSES, ("--local-rank", "0"), "0", False),
        (
            PARSES.replace("import argparse", "import argparse, os\nos.environ['LOCAL_RANK']"),
            (),
            "-1",
            False,
        ),
        (PARSES.replace("local", "other"), (), "-1", False),
        (PARSES_RANK, ("--rank", "0", "--world-size", "2"), "1", True),
        (PARSES_RANK, ("--rank", "8"), "8", False),  # of matrices, perhaps
        (PARSES_RANK, (), "-1", False),
        (
            PARSES_RANK.replace("import argparse", "import argparse, os\nos.environ['RANK']"),
            ("--rank", "0", "--world-size", "2"),
            "0",
            False,
        ),
    ],
)
def test_an_option_for_a_rank_is_passed_where_its_variable_is_not_read(
    script: str, args: tuple[str, ...], printed: str, is_passed: bool, tmp_path: Path
) -> None:
    events, shown = run_probed(tmp_path, script, *args)
    assert shown == printed
    assert any(isinstance(event, RankOption) for event in events) == is_passed


TRAINS_APART = """
import torch
from package.talk import end, number, start

def main():
    start()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(number())
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    end()
"""
TALK = """
import torch.distributed as dist
number = dist.get_rank
end = dist.destroy_process_group
def start():
    dist.init_process_group("gloo")
"""
MISLEADING = """
# RANK, WORLD_SIZE, torch.distributed, init_process_group, the input pipeline, lightning fast
import torch
pipeline = "destroy_process_group mp.spawn( accelerate LOCAL_RANK"
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
STARTS_TORCHRUN = """
import subprocess
import sys
import torch
import torch.distributed as dist
command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, "rank"]
if sys.argv[1:] != ["rank"]:
    raise SystemExit(subprocess.run([sys.executable, *command]).returncode)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
OVER_ONE_RANK = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
fully_shard(model, mesh=mesh["shards"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def checked(folder: Path) -> Report:
    return check(Request(folder / "train.py", root=folder, shows_notes=True))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.ranks
def test_a_package_that_is_imported_by_its_full_name_is_started_as_ranks(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "trainer.py").write_text(TRAINS_APART)
    (folder / "package" / "talk.py").write_text(TALK)
    (folder / "train.py").write_text("from package.trainer import main\nmain()\n")
    report = checked(folder)
    assert [finding.rule for finding in report.findings] == ["not-wrapped"]
    assert report.run_summary.startswith("2 ranks")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_that_only_speaks_of_ranks_is_run_as_one_process(folder: Path) -> None:
    (folder / "train.py").write_text(MISLEADING)
    report = checked(folder)
    assert report.findings == []
    assert report.notes == [KNOWS_NO_RANKS]
    assert report.run_summary.startswith("1 rank, 4 steps")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_that_starts_torchrun_itself_is_run_alone(folder: Path) -> None:
    (folder / "train.py").write_text(STARTS_TORCHRUN)
    report = checked(folder)
    assert (report.findings, report.not_checked) == ([], None)
    assert report.notes == [MAKES_ITS_RANKS]
    assert report.run_summary.startswith("2 ranks, 4 steps")


@pytest.mark.slow
@pytest.mark.ranks
def test_shards_over_one_rank_average_nothing(folder: Path) -> None:
    (folder / "train.py").write_text(OVER_ONE_RANK)
    (finding,) = checked(folder).findings
    assert finding.rule == "not-wrapped"
