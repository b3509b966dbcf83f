"""On a GPU: the same run as on a CPU up to rounding, exact mode to the bit, several ranks on one card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import processes
from ranks import run_ranks
from stepladder import InputError, Job, Settings, Shards, Trainer, World, write_shards
from stepladder.data.shards.stream import StreamSource
from stepladder.train.comm import Comm, pick_device, process_group
from stepladder.train.determinism import deterministic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def build() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
    x, y = torch.randn(100, 12), torch.randint(0, 5, (100,))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    return Job(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), loss=loss, train_data=(x, y),
        eval_data=(x, y), metrics=lambda model, batch: {"test_loss": loss(model, batch)},
    )  # fmt: skip


def train(run_dir: Path, **settings: Any) -> dict[str, Any]:
    base = {"epochs": 3, "global_batch": 16, "microbatch": 2, "device": "cuda", "progress": False}
    return Trainer(build(), Settings(run_dir=run_dir, **{**base, **settings})).fit().as_json()


def rank_on_the_card(comm: Comm, run_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The ranks of the test harness, with the one GPU as their device."""
    base = {"epochs": 3, "global_batch": 16, "microbatch": 2, "progress": False}
    on_card = Comm(comm.world, torch.device("cuda", 0))
    return Trainer(build(), Settings(run_dir=run_dir, **{**base, **settings}), comm=on_card).fit().as_json()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_on_the_gpu_learns_and_resumes_to_the_same_result(tmp_path: Path, precision: Any) -> None:
    whole = train(tmp_path / "whole", precision=precision)
    train(tmp_path / "parts", precision=precision, steps=8)
    parts = train(tmp_path / "parts", precision=precision)
    assert parts["metrics"]["test_loss"] == pytest.approx(whole["metrics"]["test_loss"], rel=1e-3)


def test_exact_mode_gives_the_same_bits_twice_and_after_a_resume(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", sync="exact")
    train(tmp_path / "parts", sync="exact", steps=8)
    assert train(tmp_path / "parts", sync="exact")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_exact_mode_gives_the_same_bits_on_several_ranks_of_one_card(tmp_path: Path, ranks: int) -> None:
    single = train(tmp_path / "1", sync="exact")
    results = run_ranks(rank_on_the_card, ranks, tmp_path / str(ranks), {"sync": "exact"})
    assert {r["weights_sha256"] for r in results} == {single["weights_sha256"]}


def test_an_operation_without_a_deterministic_version_is_named() -> None:
    source = torch.ones(1, 1, 8, device="cuda", requires_grad=True)
    places = torch.arange(8, device="cuda").view(1, 1, 8)
    refused = pytest.raises(InputError, match="does not have a deterministic implementation")
    with refused, deterministic(True, torch.device("cuda")):
        F.max_unpool1d(source, places, 2).sum().backward()


def test_auto_picks_the_gpu_and_a_single_process_needs_no_group() -> None:
    world = World()
    assert pick_device("auto", world).type == "cuda"
    with process_group(world, pick_device("cuda", world)) as comm:
        assert comm.alone


def test_shards_are_read_onto_the_gpu(tmp_path: Path) -> None:
    rows = ({"x": np.full(5, i, np.float32), "tags": [i] * (i % 3)} for i in range(50))
    write_shards(rows, tmp_path / "s", chunk_rows=8)
    requests = [(0, np.random.default_rng(i).permutation(50)[:20]) for i in range(10)]
    for indices, batch in StreamSource(Shards(tmp_path / "s"), torch.device("cuda")).batches(iter(requests)):
        assert batch["x"].is_cuda and batch["tags"].values.is_cuda
        assert batch["x"][:, 2].tolist() == indices.tolist()
        assert batch["tags"].offsets.diff().tolist() == (indices % 3).tolist()


def test_a_profile_counts_what_the_gpu_computes(tmp_path: Path) -> None:
    done = processes.run("profile", "mlp", "--device", "cuda", "--out", "p", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (rank,) = found["ranks"]
    assert rank["peak_gpu_bytes"] > 0
    assert rank["forward"] > 0 and rank["backward"] > 0 and rank["optimizer"] > 0
    assert not any(one["name"].startswith("aten::") for one in found["operators"]), "kernels, not operators"
