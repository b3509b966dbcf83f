"""--compile: passes of full length through torch.compile; with exact the same bits on any number of
processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from processes import refused, run, train
from ranks import run_ranks
from stepladder import InputError, Job, Settings, Trainer
from stepladder.core.plan import Plan
from stepladder.train.comm import Comm
from stepladder.train.compile_loss import compile_loss
from stepladder.train.cuda_graphs import make_loss_programs

# 46 samples: 2 steps of 8 microbatches of 2, and one of 7
SETTINGS: dict[str, Any] = {
    "global_batch": 16,
    "microbatch": 2,
    "epochs": 2,
    "threads": 1,
    "progress": False,
}


def make_job(calls: list[int]) -> Job:
    """With dropout, batch norm and noise. seen: lengths of the passes whose loss runs as it is
    written.
    """
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(46, 6, generator=generator), torch.randn(46, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Tanh(), nn.Linear(24, 1)
    )

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        if not torch.compiler.is_compiling():
            calls.append(len(batch[0]))
        noise = 0.01 * torch.randn(len(batch[0]), 1)
        return (model(batch[0]) + noise - batch[1]).square().sum(), len(batch[0])

    return Job(model, torch.optim.Adam(model.parameters(), lr=0.01), loss, (x, y))


def fit(comm: Comm, run_dir: Path, settings: dict[str, Any]) -> tuple[str, float, set[int]]:
    calls: list[int] = []
    result = Trainer(make_job(calls), Settings(run_dir, **SETTINGS | settings), comm=comm).fit()
    return result.weights_sha256, result.train_loss or 0.0, set(calls)


@pytest.mark.slow
@pytest.mark.ranks
def test_it_has_the_bits_of_one_process_on_many_and_through_a_resume(tmp_path: Path) -> None:
    settings = {"sync": "exact", "compile": True}
    complete = run_ranks(fit, 1, tmp_path / "whole", settings)[0]
    assert not complete[2], "the rest of an epoch's last batch has the length of a microbatch"
    for ranks, steps in (2, 2), (3, 6):
        last = run_ranks(fit, ranks, tmp_path / "parts", settings | {"steps": steps})
    assert last[0][0] == complete[0]
    plain = run_ranks(fit, 1, tmp_path / "plain", {"sync": "exact"})[0]
    assert plain[1] == pytest.approx(complete[1], rel=1e-5) and plain[2] == {2}, (
        "random numbers are drawn as without it"
    )
    definition = json.loads((tmp_path / "whole" / "config.json").read_text())["definition"]
    assert definition["compile"] is True and "compiled by" in definition["machine"]


def call_with_two_shapes(_comm: Comm) -> str:
    import torch._dynamo.config as limits

    limits.recompile_limit = 1
    loss = compile_loss(lambda model, batch: model(batch).sum(), exact=True)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        loss(model, torch.ones(2, 3))
        with pytest.raises(InputError) as refused:
            loss(model, torch.ones(4, 3))
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.ranks
def test_shapes_without_end_are_refused_in_exact() -> None:
    assert "batches have more than 1 shapes" in run_ranks(call_with_two_shapes, 1)[0]


@pytest.mark.slow
def test_passes_of_another_length_are_not_compiled() -> None:
    plan = Plan(num_samples=46, global_batch=16, microbatch=4)

    def loss(_model: nn.Module, _batch: Any) -> torch.Tensor:
        return torch.ones(())

    results = make_loss_programs(loss, Settings(Path("run"), compile=True), plan.microbatches(0))
    assert list(results) == [4] and results[4] is not loss
    assert make_loss_programs(loss, Settings(Path("run")), plan.microbatches(0)) == {}
    assert make_loss_programs(loss, Settings(Path("run"), compile=True), []) == {}, (
        "a rank without work"
    )


def test_a_run_without_it_is_defined_as_before_it_could_be_asked_for(tmp_path: Path) -> None:
    results = train("mlp", "--steps", 1, cwd=tmp_path)
    assert (
        "compile"
        not in json.loads((tmp_path / results["run_dir"] / "config.json").read_text())["definition"]
    )


@pytest.mark.slow
def test_without_a_compiler_it_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    cold = {
        "PYTHONHASHSEED": "0",
        "CXX": "no-such-compiler",
    }  # a new interpreter: torch reads it once
    done = run("train", "mlp", "--compile", cwd=tmp_path, env=cold)
    refused(
        done, "--compile: torch needs a C++ compiler, and finds none. HINT: apt-get install g++"
    )
    assert not list(tmp_path.iterdir())
