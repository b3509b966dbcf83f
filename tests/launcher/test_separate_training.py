"""Ranks of one start that each train on their own are ended before anything is trained twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stepladder
from processes import run, started
from stepladder.core.address import find_free_port
from stepladder.core.errors import InputError

pytestmark = pytest.mark.ranks

TRAIN = """\
import os, sys, torch, torch.optim
{before}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        {after}
finally:
    torch.save(model.state_dict(), 'checkpoint-%s.pt' % os.environ['RANK'])
"""
FORM = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier()"


def start(tmp_path: Path, *flags: object, before: str = "", after: str = "pass") -> tuple[int, str]:
    (tmp_path / "train.py").write_text(TRAIN.format(before=before, after=after))
    done = run("run", "--nproc", 2, *flags, "train.py", cwd=tmp_path)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ((), "", ""),
        pytest.param((), "", "sys.exit(0)", marks=pytest.mark.slow),
        pytest.param(("--start-method", "spawn"), "", "", marks=pytest.mark.slow),
        ((), "if len(sys.argv) > 1: " + FORM, ""),
        ((), FORM.replace("'gloo'", "'gloo', store=dist.HashStore(), rank=0, world_size=1"), ""),
    ],
    ids=["a loop", "one step", "a new interpreter", "a group that is not formed", "groups of one"],
)
def test_separate_ranks_end_before_they_save(
    tmp_path: Path, flags: tuple[object, ...], before: str, after: str
) -> None:
    code, errors = start(tmp_path, *flags, before=before, after=after or "pass")
    assert code == 2, errors
    [line] = errors.splitlines()
    assert "2 times the same" in line
    assert "train.py:8. HINT: stepladder convert" in line
    assert "run --independent" in line
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        (("--independent",), "", ""),
        pytest.param((), FORM, "", marks=pytest.mark.slow),
        ((), "", f"if step == 0: {FORM}"),
        pytest.param((), "sys.modules['mpi4py.MPI'] = sys", "", marks=pytest.mark.slow),
        pytest.param(
            (),
            "class Own:\n    def step(self): pass\ntorch.optim.SGD = lambda *_: Own()",
            "",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["meant so", "a group", "a group after one step", "MPI", "an optimizer of no torch"],
)
def test_what_is_meant_so_and_what_is_out_of_reach_trains(
    tmp_path: Path, flags: tuple[object, ...], before: str, after: str
) -> None:
    code, errors = start(tmp_path, *flags, before=before, after=after or "pass")
    assert code == 0, errors
    assert len(list(tmp_path.glob("*.pt"))) == 2


@pytest.mark.slow
def test_the_hook_is_gone_after_the_first_step_also_beside_another_one(tmp_path: Path) -> None:
    hooks = "sys.modules['torch.optim.optimizer']._global_optimizer_pre_hooks"
    other = "from torch.optim.optimizer import register_optimizer_step_pre_hook as r"
    after = f"step and sys.exit(len({hooks}) - 1)"
    code, errors = start(
        tmp_path, before=f"{FORM}\n{other}\nother = r(lambda *_: None)", after=after
    )
    assert code == 1, errors  # ours is not the last one
    code, errors = start(tmp_path, before=FORM, after=f"step and sys.exit(len({hooks}))")
    assert code == 0, errors


@pytest.mark.slow
def test_two_nodes_end_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(before="", after="pass"))
    flags = "--nodes", 2, "--local-addr", "127.0.0.1"
    flags = *flags, "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}"
    with started("run", *flags, "train.py", cwd=tmp_path) as other:
        done = run("run", *flags, "train.py", cwd=tmp_path)
        codes = {done.returncode, other.end()}
    assert codes == {2}, done.stderr + other.err.read_text()
    assert "2 times the same" in done.stderr + other.err.read_text()
    assert not list(tmp_path.glob("*.pt"))


def train_alone() -> str:
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 1)).backward()
    optimizer.step()
    return os.environ["RANK"]


@pytest.mark.slow
def test_a_function_says_that_it_is_meant_so() -> None:
    with pytest.raises(InputError, match="2 times the same") as error:
        stepladder.launch(train_alone, nproc=2)
    assert "independent=True" in error.value.hint
    assert stepladder.launch(train_alone, nproc=2, independent=True) == ["0", "1"]
    assert stepladder.launch(train_alone, nproc=1) == ["0"]


def test_accelerate_trains_with_all_ranks_on_cpus(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = "from accelerate import Accelerator\nprint(Accelerator().num_processes)\n"
    (tmp_path / "train.py").write_text(script)
    done = run("run", "--nproc", 2, "train.py", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 2", "[rank 1] 2"], done.stderr
