"""stepladder doctor as a user runs it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from machines import CPU, GPUS
from pages import documented_keys
from processes import refused, run
from stepladder.tools.doctor.link import Link, Speed, bus_bandwidth


def test_this_machine_is_looked_at_kept_and_judged_again(tmp_path: Path) -> None:
    done = run("doctor", "--save", "bundle.json", "--json", cwd=tmp_path)
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == int(not report["ok"]), done.stderr
    assert report.keys() == documented_keys("doctor")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle.json"]
    second = run("doctor", "--load", "bundle.json", "--json", cwd=tmp_path)
    assert json.loads(second.stdout) == report


def test_a_bundle_from_elsewhere_is_judged_here(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text(
        json.dumps(asdict(replace(GPUS, torch=CPU, host="node7")))
    )
    done = run("doctor", "--load", "bundle.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "node7: Python 3.11.7, torch 2.13.0+cpu" in done.stdout
    assert (
        "error torch-cpu-only: torch 2.13.0+cpu is a CPU build, on a machine with 2 NVIDIA GPUs\n    why: "
        in done.stdout
    )
    assert "fix: pip uninstall -y torch" in done.stdout


def test_it_runs_without_torch(tmp_path: Path) -> None:
    """A folder with an empty `torch` that cannot be imported comes first."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    path = f"{tmp_path}:{':'.join(p for p in sys.path if p)}"
    done = run("doctor", cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 1
    assert "error torch-missing: torch is not installed" in done.stdout
    assert "Traceback" not in done.stderr
    refused(run("doctor", "--comm", cwd=tmp_path, env={"PYTHONPATH": path}), "--comm needs torch")


@pytest.mark.slow
def test_what_a_script_imports_is_timed_and_it_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import slow\nopen('run', 'w')\n")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.3)\n")
    done = run("doctor", "train.py", cwd=tmp_path)
    match = re.search(
        r"^train.py imports for \d+\.\d s; slowest: slow (\d+\.\d) s", done.stdout, re.MULTILINE
    )
    assert match is not None and float(match[1]) >= 0.3, done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.ranks
def test_the_way_between_ranks_is_measured(tmp_path: Path) -> None:
    done = run("doctor", "--comm", "--nproc", 2, "--json", cwd=tmp_path)
    link = json.loads(done.stdout.splitlines()[-1])["comm"]
    assert (link["ranks"], link["nodes"], link["limit"], link["backend"]) == (
        2,
        1,
        None,
        "shared memory",
    ), link
    assert [speed["bytes"] for speed in link["speeds"]] == [4 * 4**k for k in range(13)]
    for speed in link["speeds"]:
        expected = bus_bandwidth(2, speed["bytes"], speed["microseconds"] / 1e6)
        assert (
            speed["bus"] == pytest.approx(expected, rel=0.01, abs=1e-4)
            and speed["microseconds"] > 0
        )


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_of_torchrun_are_measured_too(tmp_path: Path) -> None:
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    done = run("-m", "stepladder", "doctor", "--comm", cwd=tmp_path, command=torchrun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all_reduce on one node, 2 ranks, gloo") == 1


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_bandwidth(2, 10**9, 1.0) == 1.0
    assert bus_bandwidth(8, 10**9, 0.5) == 3.5


def test_a_slow_link_and_clocks_apart_are_findings() -> None:
    fast = Link(4, 2, "gloo", (Speed(4, 50.0, 0.0), Speed(2**26, 1e5, 0.8)), 1.25, 0.01)
    assert list(fast.findings()) == []
    slow = replace(fast, speeds=(Speed(2**26, 1e6, 0.1),), skew=2.5)
    assert [f.rule for f in slow.findings()] == ["link-speed", "clocks-of-ranks"]
    assert "0.100 GB/s, of 1.25" in next(slow.findings()).evidence


def test_a_link_that_is_slower_than_it_says_is_told_from_an_all_reduce_that_is() -> None:
    link = Link(2, 2, "gloo", (Speed(2**26, 1e6, 0.09),), 1.25, 0.0, stream=0.1)
    assert [f.rule for f in link.findings()] == ["link-slow"], (
        "all_reduce carries what that link does"
    )
    assert "one plain TCP connection carries 0.100 GB/s, of 1.25" in next(link.findings()).evidence
    assert [f.rule for f in replace(link, stream=1.2).findings()] == ["link-speed"]
    assert [f.rule for f in replace(link, limit=None, stream=1.2).findings()] == ["link-speed"]
    assert list(replace(link, nodes=1, limit=None, stream=1.2).findings()) == [], (
        "memory is no link"
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--load", "missing.json"), "--load missing.json: No such file"),
        (
            ("--save", "no/folder/bundle.json"),
            "bundle.json cannot be written: there is no such folder",
        ),
        (("--save", "."), "--save . cannot be written: it is a folder"),
        (("--load", "a", "--comm"), "--load inspects a saved file"),
        (("missing.py",), "missing.py cannot be read: No such file"),
        (("--port", "70000"), "--port"),
        (("--comm", "--nproc", "1"), "--comm measures between processes"),
        (("--comm", "--nproc", "1000000"), "--nproc 1000000 on a machine"),
        (("--nproc", "x"), "--nproc 'x' is not a number"),
    ],
)
def test_bad_input_is_refused(flags: tuple[str, ...], says: str, tmp_path: Path) -> None:
    refused(run("doctor", *flags, cwd=tmp_path), says)
    assert list(tmp_path.iterdir()) == []
