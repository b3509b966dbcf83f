"""How a script is started: its folder, its module, and the variables and options of launchers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepladder.core.errors import InputError
from stepladder.tools.check.failure import NotChecked
from stepladder.tools.check.isolation.sandbox import MECHANISM_VARIABLE
from stepladder.tools.check.launch_style import LaunchStyle, find_styles, finds_what_is_missing

TRAINS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def write_files(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def checked(folder: Path, *args: str, mechanism: str | None = None) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "stepladder", "check", "--json", *args]
    ran = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **({MECHANISM_VARIABLE: mechanism} if mechanism else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def failure(output: str) -> NotChecked:
    return NotChecked("script", "the script failed by itself, as above", output)


def test_a_script_beside_the_working_folder_needs_one_way(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    assert find_styles(script, tmp_path, None) == [LaunchStyle(script, tmp_path, tmp_path)]
    other = tmp_path / "elsewhere"
    assert find_styles(script, other, None) == [LaunchStyle(script, tmp_path, tmp_path)]


def test_a_script_of_a_package_can_be_a_module(tmp_path: Path) -> None:
    write_files(tmp_path, pkg____init__="", pkg__train="from .net import f\n")
    script = tmp_path / "pkg" / "train.py"
    styles = find_styles(script, tmp_path, None)
    assert [style.python_args for style in styles] == [("pkg/train.py",), ("-m", "pkg.train")]
    missing = failure("ImportError: attempted relative import with no known parent package")
    assert [finds_what_is_missing(style, missing) for style in styles] == [False, True]


def test_a_repository_is_copied_for_what_lies_beside_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    write_files(tmp_path, trainer__train="import net\n", model__net="", trainer__own="")
    (tmp_path / "numbers.csv").touch()
    folder = tmp_path / "trainer"
    first, second = find_styles(folder / "train.py", folder, None)
    assert (first.root, second.root, second.folder) == (folder, tmp_path, folder)
    assert (second.python_args, second.subfolder) == (("train.py",), "trainer")
    for output, helps in {
        "ModuleNotFoundError: No module named 'net'": True,
        "ModuleNotFoundError: No module named 'model.net'": True,
        "ModuleNotFoundError: No module named 'elsewhere'": False,
        "FileNotFoundError: [Errno 2] No such file or directory: '../numbers.csv'": True,
        "FileNotFoundError: [Errno 2] No such file or directory: '../other.csv'": False,
        "ValueError: no module": False,
    }.items():
        assert finds_what_is_missing(second, failure(output)) == helps, output
    assert not finds_what_is_missing(second, None)
    (folder / ".git").mkdir()
    assert len(find_styles(folder / "train.py", folder, None)) == 1


def test_a_root_that_does_not_hold_the_script_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "a" / "train.py"
    assert find_styles(script, script.parent, tmp_path)[0].subfolder == "a"
    with pytest.raises(InputError) as error:
        find_styles(script, script.parent, tmp_path / "b")
    assert error.value.hint == f"--root {tmp_path / 'a'}"


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [None, "audit"])
def test_a_module_beside_the_working_folder_is_found(mechanism: str | None, tmp_path: Path) -> None:
    """At the script's own path, or where that cannot be laid, in a copy of the repository."""
    (tmp_path / ".git").mkdir()
    write_files(
        tmp_path,
        model__net="value = 1\n",
        trainer__train="import sys\nsys.path.append('../model')\nimport net\n"
        + TRAINS.replace("    optimizer.zero_grad()\n", ""),
    )
    code, report = checked(tmp_path / "trainer", "train.py", mechanism=mechanism)
    (finding,) = report["findings"]
    assert (code, finding["rule"], finding["file"]) == (1, "missing-zero-grad", "train.py")
    copied = [note for note in report["notes"] if note.startswith("started as")]
    if report["isolation"]["mechanism"] == "namespace":
        assert not copied
    else:
        (note,) = copied
        assert f"a copy of {tmp_path}, because a module or a file was not found" in note


@pytest.mark.slow
def test_a_script_with_relative_imports_is_started_as_a_module(tmp_path: Path) -> None:
    write_files(tmp_path, pkg____init__="", pkg__net="", pkg__train="from . import net\n" + TRAINS)
    code, report = checked(tmp_path, "pkg/train.py")
    assert (code, report["findings"], report["not_checked"]) == (0, [], None)
    assert any("started as python -m pkg.train" in note for note in report["notes"])


BY_OPTION = """
import argparse
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
if args.local_rank >= 0:
    dist.init_process_group("gloo")
    print("rank", dist.get_rank())
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_that_wants_its_local_rank_as_an_option_gets_it(tmp_path: Path) -> None:
    write_files(tmp_path, train=BY_OPTION + TRAINS)
    _, report = checked(tmp_path, "train.py")
    assert "started with its own --local_rank on each rank" in report["notes"]
    assert report["ran"].startswith("2 ranks")
    assert (
        "not-wrapped" in {finding["rule"] for finding in report["findings"]} or report["findings"]
    )


BY_SPAWN = """
import socket
import torch
import torch.distributed as dist

def work(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), 2)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_that_makes_its_ranks_is_started_alone_and_told_so(tmp_path: Path) -> None:
    write_files(tmp_path, train=BY_SPAWN)
    code, report = checked(tmp_path, "train.py")
    assert (code, report["findings"]) == (0, [])
    assert report["notes"] == ["the script makes its ranks itself: it was started as one process"]
    assert report["ran"].startswith("2 ranks")


RESUMES_BY_OPTION = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
path = parser.parse_args().resume
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if path:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
x = torch.randn(8, 8, 4)
for step in range(first, 8):
    optimizer.zero_grad()
    model(x[step]).square().mean().backward()
    optimizer.step()
    if step == 3:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(parts | {"step": LAST}, "s.pt")
"""


@pytest.mark.slow
def test_a_resume_gets_arguments_of_its_own(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        right=RESUMES_BY_OPTION.replace("LAST", "step + 1"),
        wrong=RESUMES_BY_OPTION.replace("LAST", "step"),
    )
    code, report = checked(tmp_path, "--resume-args", "--resume s.pt", "right.py")
    assert (code, report["findings"], report["notes"][1:]) == (0, [], [])
    code, report = checked(tmp_path, "--resume-args", "--resume s.pt", "wrong.py")
    assert (code, [finding["rule"] for finding in report["findings"]]) == (1, ["resume-samples"])
    assert "1 of the batches are trained again" in report["findings"][0]["evidence"]
