"""What large jobs need: several optimizers, averaged weights, norms in the log, activations
computed again.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks
from stepladder import InputError, Job, Optimizers, Settings, Trainer, World
from stepladder.storage.snapshot import read_newest_snapshot
from stepladder.train.checkpoint_blocks import checkpoint_blocks, validate_checkpointable
from stepladder.train.comm import Comm
from stepladder.train.optimizers import load_state

DECAY = 0.7


class Net(nn.Module):
    """Blocks with dropout in a list; the first and last weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 64)
        self.head = nn.Linear(64, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    logits = model(x[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, x[:, 1:].flatten(), reduction="sum"), x[
        :, 1:
    ].numel()


def make_job(second: str = "Muon") -> Job:
    torch.manual_seed(0)
    model = Net()
    data = torch.randint(11, (46, 5), generator=torch.Generator().manual_seed(1))
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    vectors = [
        param for param in model.parameters() if all(param is not matrix for matrix in matrices)
    ]
    adamw = torch.optim.AdamW(vectors, lr=0.01)
    matrix_optimizer: Any = (
        torch.optim.Muon(matrices, lr=0.02)
        if second == "Muon"
        else torch.optim.SGD(matrices, 0.1, 0.9)
    )
    schedules = (
        torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.9**step),
        torch.optim.lr_scheduler.StepLR(matrix_optimizer, 2, 0.5),
    )
    return Job(
        model,
        Optimizers(adamw, matrix_optimizer),
        loss,
        data,
        eval_data=data[:25],
        metrics=lambda m, x: {"nats": loss(m, x)},
        schedule=schedules,
        clip_norm=0.5,
        ema_decay=DECAY,
    )


def fit(
    comm: Comm, run_dir: Path, settings: dict[str, Any], second: str = "Muon"
) -> dict[str, Any]:
    base = {
        "epochs": 2,
        "global_batch": 16,
        "microbatch": 2,
        "progress": False,
        "snapshot_every": 2,
    }
    return (
        Trainer(make_job(second), Settings(run_dir, **{**base, **settings}), comm=comm)
        .fit()
        .as_json()
    )


def alone() -> Comm:
    return Comm(World(), torch.device("cpu"))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [
        line
        for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if "lr" in line
    ]


def state_of(run_dir: Path) -> dict[str, Any]:
    return read_newest_snapshot(run_dir).state()


@pytest.mark.ranks
def test_exact_has_the_same_bits_with_shards_with_recomputation_and_through_a_stop(
    tmp_path: Path,
) -> None:
    unsharded = fit(alone(), tmp_path / "whole", {"sync": "exact"})
    parts = tmp_path / "parts"
    options = {"sync": "exact"}
    run_ranks(
        fit, 3, parts, options | {"steps": 3, "shard": "optimizer", "checkpoint_blocks": True}
    )
    last = run_ranks(fit, 2, parts, options)[0]
    assert (
        last["weights_sha256"] == unsharded["weights_sha256"]
        and last["metrics"] == unsharded["metrics"]
    )
    assert lines(parts) == lines(tmp_path / "whole")
    averages = state_of(parts)["average"]
    expected_averages = state_of(tmp_path / "whole")["average"]
    assert averages.keys() == expected_averages.keys() and all(
        torch.equal(averages[name], expected_averages[name]) for name in averages
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_full_has_the_curve_norms_and_average_of_one_process(tmp_path: Path) -> None:
    unsharded = fit(alone(), tmp_path / "whole", {}, "SGD")
    parts = tmp_path / "parts"
    run_ranks(fit, 2, parts, {"steps": 3, "shard": "full", "checkpoint_blocks": True}, "SGD")
    run_ranks(fit, 3, parts, {"steps": 5, "shard": "full"}, "SGD")
    last = fit(alone(), parts, {}, "SGD")
    for name in ("loss", "grad_norm", "lr"):
        expected = [line[name] for line in lines(tmp_path / "whole")]
        assert [line[name] for line in lines(parts)] == pytest.approx(expected, rel=1e-4)
    assert last["metrics"]["nats"] == pytest.approx(unsharded["metrics"]["nats"], rel=1e-4)
    averages = state_of(parts)["average"]
    expected_averages = state_of(tmp_path / "whole")["average"]
    for name in expected_averages:
        torch.testing.assert_close(averages[name], expected_averages[name], rtol=1e-3, atol=1e-5)


def test_an_average_is_what_its_formula_says_and_is_evaluated(tmp_path: Path) -> None:
    fit(alone(), tmp_path, {"snapshot_every": 1, "keep": 9, "epochs": 1})
    snapshots = [read_newest_snapshot(path) for path in sorted((tmp_path / "snapshots").iterdir())]
    job = make_job()
    expected = {name: param.detach().clone() for name, param in job.model.named_parameters()}
    for snapshot in snapshots:
        for name, value in snapshot.tensors().items():
            expected[name] = expected[name] * DECAY + value * (1 - DECAY)
    average = snapshots[-1].state()["average"]
    assert average.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(average[name], value)
    job.model.load_state_dict({**average, "head.weight": average["tokens.weight"]})
    job.model.eval()
    with torch.no_grad():
        total, count = loss(job.model, job.eval_data)
    last_line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last_line["nats"] == pytest.approx(float(total) / count, rel=1e-5)


def test_each_optimizer_steps_its_own_as_it_does_alone() -> None:
    def stepped(together: bool) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        parts: list[Any] = [
            torch.optim.Adam(net[0].parameters()),
            torch.optim.SGD(net[1].parameters(), 0.1, 0.9),
        ]
        for number in range(4):
            if number == 2 and together:
                parts = [Optimizers(*parts)]
                parts[0].load_state_dict(parts[0].state_dict())
            net(torch.ones(2, 6)).sum().backward()
            for optimizer in parts:
                optimizer.step()
                optimizer.zero_grad()
        return list(net.parameters()), parts

    apart, _ = stepped(False)
    joined, (both,) = stepped(True)
    assert all(map(torch.equal, apart, joined))
    assert both.state.keys() == set(joined) and len(both.param_groups) == 2
    with pytest.raises(ValueError, match="different number of parameter groups"):
        both.load_state_dict(torch.optim.SGD(joined, 0.1).state_dict())
    with pytest.raises(ValueError, match="more than one parameter group"):
        Optimizers(torch.optim.SGD(joined, 0.1), torch.optim.Adam(joined))


def test_a_norm_is_logged_where_nothing_is_clipped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "epochs": 1,
        "global_batch": 46,
        "microbatch": 46,
        "progress": False,
    }
    norms = {}
    for name, max_norm in (("clipped", 0.01), ("measured", math.inf)):
        job = replace(make_job("SGD"), clip_norm=max_norm)
        Trainer(job, Settings(tmp_path / name, **settings), comm=alone()).fit()
        (norms[name],) = [line["grad_norm"] for line in lines(tmp_path / name)]
    assert norms["clipped"] == norms["measured"] > 0.01, "it is the norm before it is clipped"


def test_recomputed_blocks_keep_less_and_change_nothing() -> None:
    saved: list[int] = []
    grads = []
    for recomputes in (False, True):
        job = make_job()
        num_saved = 0
        if recomputes:
            checkpoint_blocks(job)
            checkpoint_blocks(job)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_saved
            num_saved += tensor.numel()
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            total, _ = loss(job.model, job.train_data)
            saved.append(num_saved)
        total.backward()
        grads.append([param.grad for param in job.model.parameters()])
    assert saved[1] < saved[0]
    assert all(map(torch.equal, *grads))


def test_what_cannot_be_computed_again_is_refused(tmp_path: Path) -> None:
    job = make_job()
    validate_checkpointable(job)
    with pytest.raises(InputError, match="the model has no modules that repeat in a list"):
        validate_checkpointable(replace(job, model=nn.Linear(2, 2)))
    norms = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    with pytest.raises(
        InputError, match=r"0\.1 is a BatchNorm1d, which would count each batch twice"
    ):
        validate_checkpointable(replace(job, model=norms))
    with pytest.raises(InputError, match="--compile with --checkpoint-blocks"):
        Settings(tmp_path, compile=True, checkpoint_blocks=True)


def test_state_is_loaded_with_the_types_that_it_was_stored_with() -> None:
    """torch would give it the type of its weight."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    kept = {
        "master": torch.tensor([1.001, 2.0, 3.0]),
        "mask": torch.tensor([True, False, True]),
        "nested": {"moments": [torch.tensor(0.1, dtype=torch.float64)]},
        "step": torch.tensor(7.0),
    }
    optimizers = [torch.optim.SGD([weight], lr=0.1) for _ in range(2)]
    optimizers[0].state[weight] = kept
    load_state(optimizers[1], optimizers[0].state_dict())
    loaded = optimizers[1].state[weight]
    assert torch.equal(loaded["master"], kept["master"])
    assert torch.equal(loaded["mask"], kept["mask"])
    assert loaded["nested"]["moments"][0].dtype == torch.float64
    assert loaded["master"] is not kept["master"]
