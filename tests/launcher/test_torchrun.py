"""The command as ranks that torchrun started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from processes import JOBS, audited, run, started, train

pytestmark = pytest.mark.ranks

TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "stepladder",
)
TROUBLE = JOBS / "trouble.py"


def test_it_is_one_of_torchruns_ranks_and_rank_0_alone_speaks(tmp_path: Path) -> None:
    done = run("train", TROUBLE, "--json", cwd=tmp_path, command=TORCHRUN)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    direct = run("train", TROUBLE, "--json", "--nproc", 2, "--run-dir", "direct", cwd=tmp_path)
    same = ("world_size", "weights_sha256", "metrics", "steps")
    direct_result = json.loads(direct.stdout)
    assert [result[name] for name in same] == [direct_result[name] for name in same]
    whose = "rank and world size from RANK, WORLD_SIZE, LOCAL_RANK"
    assert whose in done.stderr and "rank and " not in direct.stderr  # ours need not be told


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("nowhere.py",), ("mlp", "--no-such-flag")])
def test_bad_input_is_one_line_of_all_ranks(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run("train", *arguments, cwd=tmp_path, command=TORCHRUN)
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("error: ") == 1 and ". HINT: " in done.stderr, done.stderr


@pytest.mark.slow
def test_kill_9_of_torchrun_leaves_no_rank_alive_and_the_run_resumes(tmp_path: Path) -> None:
    """torchrun starts ranks in sessions of their own, where no signal to its group reaches them."""
    marker = tmp_path / "marker"
    env = {"TROUBLE": f"hold 1 7 {marker}"}
    with started(
        "train", TROUBLE, "--snapshot-every", 2, cwd=tmp_path, env=env, command=TORCHRUN
    ) as running:
        running.wait_for(marker)
        assert len(running.family) >= 3
        running.process.kill()
        running.end()
    assert train(TROUBLE, cwd=tmp_path)["resumed_from_step"] in (4, 6)
    assert audited(tmp_path / "runs/trouble")["ok"]
