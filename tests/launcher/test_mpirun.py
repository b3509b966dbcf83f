"""The command as ranks that Open MPI's mpirun started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from processes import COMMAND, JOBS, run

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        shutil.which("mpirun") is None, reason="no mpirun here: apt-get install openmpi-bin"
    ),
]
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n")
TROUBLE = JOBS / "trouble.py"
PRINTS_RANK = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
sum_of_ranks = torch.tensor(float(dist.get_rank()))
dist.all_reduce(sum_of_ranks)
line = f"{os.environ['LOCAL_RANK']} {dist.get_world_size()} {sum_of_ranks.item()}\\n"
os.write(1, line.encode())  # mpirun mixes the parts of a line of two ranks
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_train_under_mpirun_has_the_bits_of_nproc_2(tmp_path: Path) -> None:
    done = run("train", TROUBLE, "--json", cwd=tmp_path, command=(*MPIRUN, "2", *COMMAND))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "rank and world size from Open MPI" in done.stderr
    direct = run("train", TROUBLE, "--json", "--nproc", 2, "--run-dir", "direct", cwd=tmp_path)
    names = "world_size", "weights_sha256", "metrics", "steps"
    expected = json.loads(direct.stdout)
    assert [result[name] for name in names] == [expected[name] for name in names]


@pytest.mark.slow
def test_a_script_under_mpirun_gets_torchrun_s_variables(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRINTS_RANK)
    done = run("run", "script.py", cwd=tmp_path, command=(*MPIRUN, "2", *COMMAND))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 1.0", "1 2 1.0"]


@pytest.mark.slow
def test_one_rank_of_mpirun_starts_its_own_ranks(tmp_path: Path) -> None:
    done = run(
        "train", TROUBLE, "--json", "--nproc", 2, cwd=tmp_path, command=(*MPIRUN, "1", *COMMAND)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2
