"""On a GPU: the same run as on a CPU up to rounding, exact mode to the bit, several ranks on one
card.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
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
from stepladder.data.sources import StreamSource, open_source
from stepladder.storage.staging import HostBuffers
from stepladder.train.comm import Comm
from stepladder.train.determinism import deterministic
from stepladder.train.group_setup import pick_device
from stepladder.train.process_group import process_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

if (
    torch.cuda.is_available()
):  # exact mode sets it, for cuBLAS, which reads it once: no test may find it changed
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

one_card = pytest.mark.skipif(
    torch.cuda.device_count() > 1, reason="NCCL takes over where each rank has a card"
)
two_cards = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL wants a card for each rank; one here"
)


def build() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5)
    )
    x, y = torch.randn(100, 12), torch.randint(0, 5, (100,))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    return Job(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=loss,
        train_data=(x, y),
        eval_data=(x, y),
        metrics=lambda model, batch: {"test_loss": loss(model, batch)},
    )


def train(run_dir: Path, **settings: Any) -> dict[str, Any]:
    return fit(build(), run_dir, **settings)


def fit(job: Job, run_dir: Path, **settings: Any) -> dict[str, Any]:
    base = {"epochs": 3, "global_batch": 16, "microbatch": 2, "device": "cuda", "progress": False}
    return Trainer(job, Settings(run_dir=run_dir, **{**base, **settings})).fit().as_json()


def rank_on_the_card(comm: Comm, run_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The ranks of the test harness, with the one GPU as their device."""
    base = {"epochs": 3, "global_batch": 16, "microbatch": 2, "progress": False}
    on_card = Comm(comm.world, torch.device("cuda", 0))
    return (
        Trainer(build(), Settings(run_dir=run_dir, **{**base, **settings}), comm=on_card)
        .fit()
        .as_json()
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_on_the_gpu_learns_and_resumes_to_the_same_result(
    tmp_path: Path, precision: Any
) -> None:
    whole = train(tmp_path / "whole", precision=precision)
    train(tmp_path / "parts", precision=precision, steps=8)
    parts = train(tmp_path / "parts", precision=precision)
    assert parts["metrics"]["test_loss"] == pytest.approx(whole["metrics"]["test_loss"], rel=1e-3)


def test_exact_mode_gives_the_same_bits_twice_and_after_a_resume(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", sync="exact")
    train(tmp_path / "parts", sync="exact", steps=8)
    assert train(tmp_path / "parts", sync="exact")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "every"), [(2, None), (3, None), (2, 1)])
def test_exact_mode_gives_the_same_bits_on_several_ranks_of_one_card(
    tmp_path: Path, ranks: int, every: int | None
) -> None:
    single = train(tmp_path / "1", sync="exact")
    results = run_ranks(
        rank_on_the_card, ranks, tmp_path / str(ranks), {"sync": "exact", "replay_every": every}
    )
    assert {r["weights_sha256"] for r in results} == {single["weights_sha256"]}


@pytest.mark.ranks
@pytest.mark.parametrize("sync", ["manual", "ddp"])
def test_two_ranks_of_one_card_train_as_one_does_up_to_rounding(tmp_path: Path, sync: str) -> None:
    """gloo between them; by microbatch, so that dropout and batch norm are the same."""
    single = train(tmp_path / "1", sync=sync)
    for result in run_ranks(rank_on_the_card, 2, tmp_path / "2", {"sync": sync}):
        assert result["train_loss"] == pytest.approx(single["train_loss"], rel=1e-3)
        assert result["metrics"]["test_loss"] == pytest.approx(
            single["metrics"]["test_loss"], rel=1e-3
        )


def weights_of_mlp(folder: Path, nproc: int) -> str:
    """By the command line, from a launcher that never saw the card."""
    exact = ("mlp", "--device", "cuda", "--sync", "exact", "--microbatch", 16, "--steps", 20)
    return processes.train(*exact, "--nproc", nproc, "--run-dir", nproc, cwd=folder)[
        "weights_sha256"
    ]


@pytest.mark.ranks
@one_card
def test_the_command_line_shares_one_card_among_ranks(tmp_path: Path) -> None:
    assert len({weights_of_mlp(tmp_path, nproc) for nproc in (1, 2, 4)}) == 1


@pytest.mark.ranks
@two_cards
def test_nccl_on_two_cards_gives_the_bits_of_one(tmp_path: Path) -> None:
    assert len({weights_of_mlp(tmp_path, nproc) for nproc in (1, 2)}) == 1


def survived(folder: Path, nproc: int, kills: str) -> str:
    """The weights after a rank was killed and the others went on, with nothing lost, repeated or
    rolled back.
    """
    exact = (
        "--sync",
        "exact",
        "--microbatch",
        4,
        "--global-batch",
        32,
        "--steps",
        20,
        "--epochs",
        3,
    )
    asked = (
        "train",
        processes.JOBS / "killed.py",
        "--device",
        "cuda",
        *exact,
        "--nproc",
        nproc,
        "--json",
    )
    done = processes.run(
        *asked, "--run-dir", nproc, cwd=folder, env={"KILL": kills, "KILLED": str(folder)}
    )
    assert done.returncode == 0, done.stderr
    assert ("in-place recovery" in done.stderr) == bool(
        kills
    ) and "restarting" not in done.stderr, done.stderr
    found = processes.audited(folder / str(nproc))
    assert (found["ok"], found["attempts"], found["superseded"]) == (True, 1, 0)
    weights: str = json.loads(done.stdout.splitlines()[-1])["weights_sha256"]
    return weights


@pytest.mark.ranks
@one_card
@pytest.mark.parametrize("kills", ["1:backward:7", "0:in-exchange-1:7", "2:optimizer:7"])
def test_ranks_of_one_card_go_on_in_place(tmp_path: Path, kills: str) -> None:
    assert survived(tmp_path, 3, kills) == survived(tmp_path, 1, "")


@pytest.mark.ranks
@two_cards
@pytest.mark.parametrize("kills", ["1:backward:7", "0:in-exchange-1:7", "1:optimizer:7"])
def test_nccl_lets_go_of_a_lost_rank_and_the_other_goes_on_in_place(
    tmp_path: Path, kills: str
) -> None:
    assert survived(tmp_path, 2, kills) == survived(tmp_path, 1, "")


# -- what is random --------------------------------------------------------------------------------


def test_dropout_is_keyed_and_not_drawn_from_where_the_card_s_generator_stands(
    tmp_path: Path,
) -> None:
    weights = set()
    for number in range(2):
        torch.cuda.manual_seed(number)
        weights.add(train(tmp_path / str(number), sync="exact")["weights_sha256"])
    assert len(weights) == 1
    assert train(tmp_path / "other", sync="exact", seed=1)["weights_sha256"] not in weights


def test_exact_mode_computes_in_full_fp32_and_leaves_the_switches_as_they_were() -> None:
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = cudnn.benchmark = True
    try:
        with deterministic(True, torch.device("cuda")):
            assert not (matmul.allow_tf32 or cudnn.allow_tf32 or cudnn.benchmark)
            a = torch.full((64, 64), 1 + 2**-20, device="cuda")
            assert torch.equal(a @ torch.eye(64, device="cuda"), a), "TF32 keeps 10 bits of it"
        assert matmul.allow_tf32 and cudnn.allow_tf32 and cudnn.benchmark
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_forward_pass_computes_in_the_precision_asked_for(
    tmp_path: Path, precision: Any, expected: torch.dtype
) -> None:
    job = build()
    seen = set()

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        logits = model(batch[0])
        seen.add(logits.dtype)
        return F.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])

    fit(replace(job, loss=loss), tmp_path, steps=2, precision=precision)
    assert seen == {expected}
    assert {parameter.dtype for parameter in job.model.parameters()} == {torch.float32}


def with_steep_loss() -> Job:
    """Its first gradients are infinite under the scaler's first scale, 65536."""

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        return 100 * F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    return replace(build(), loss=loss)


def parameters_of(job: Job) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in job.model.parameters()]


def test_fp16_skips_steps_until_its_scale_fits_and_a_resumed_run_knows_the_scale(
    tmp_path: Path,
) -> None:
    skipping = with_steep_loss()
    learning = with_steep_loss()
    before = parameters_of(skipping)
    fit(skipping, tmp_path / "skipping", steps=1, precision="fp16", sync="exact")
    assert parameters_of(skipping) == before
    whole = fit(learning, tmp_path / "whole", precision="fp16", sync="exact")
    assert parameters_of(learning) != before
    fit(with_steep_loss(), tmp_path / "parts", steps=3, precision="fp16", sync="exact")
    parts = fit(with_steep_loss(), tmp_path / "parts", precision="fp16", sync="exact")
    assert parts["weights_sha256"] == whole["weights_sha256"]


# -- what lies where -------------------------------------------------------------------------------


def test_the_snapshot_s_copy_is_pinned_once_and_no_view_of_the_card(tmp_path: Path) -> None:
    copies = HostBuffers()
    weight = torch.arange(6.0, device="cuda").view(2, 3)
    tree = {"model": {"weight": weight, "same on the host": torch.ones(2)}, "step": 3}
    first = copies.copy(tree)["model"]["weight"]
    assert first.device.type == "cpu" and first.is_pinned()
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]], "complete when it returns"
    place = first.data_ptr()
    weight.add_(1)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    second = copies.copy(tree)["model"]["weight"]
    assert second.data_ptr() == place and second.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_dataset_s_items_come_to_the_card() -> None:
    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 10

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"x": torch.full((3,), float(i)), "pair": (torch.tensor(i), torch.tensor(-i))}

    source = open_source(Rows(), torch.device("cuda"), 0, 0, None)
    indices = np.array([7, 2, 5])
    ((read, batch),) = source.batches(iter([(0, indices)]))
    assert read.tolist() == indices.tolist()
    assert batch["x"].is_cuda and batch["x"][:, 0].tolist() == indices.tolist()
    assert all(part.is_cuda for part in batch["pair"])


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
    for indices, batch in StreamSource(Shards(tmp_path / "s"), torch.device("cuda")).batches(
        iter(requests)
    ):
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
    assert not any(one["name"].startswith("aten::") for one in found["operators"]), (
        "kernels, not operators"
    )


# -- passes recorded as graphs ---------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_passes_have_the_bits_of_those_that_are_not_and_resume(
    tmp_path: Path, precision: Any
) -> None:
    """Dropout draws the same numbers, and recording leaves batch norm's statistics alone."""
    settings: dict[str, Any] = {"sync": "exact", "precision": precision}
    plain = train(tmp_path / "plain", **settings)
    whole = train(tmp_path / "whole", capture=True, **settings)
    train(tmp_path / "parts", capture=True, steps=8, **settings)
    parts = train(tmp_path / "parts", capture=True, **settings)
    assert whole["weights_sha256"] == parts["weights_sha256"] == plain["weights_sha256"]


@pytest.mark.parametrize("microbatch", [2, None])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_recorded_passes_train_as_others_do(
    tmp_path: Path, microbatch: int | None, precision: Any
) -> None:
    plain, found = (
        train(
            tmp_path / name, microbatch=microbatch, precision=precision, capture=name == "captured"
        )
        for name in ("plain", "captured")
    )
    assert found["metrics"]["test_loss"] == pytest.approx(plain["metrics"]["test_loss"], rel=1e-3)
    assert found["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-3)


@pytest.mark.ranks
@one_card
def test_recorded_passes_have_the_same_bits_on_ranks_of_one_card(tmp_path: Path) -> None:
    settings = {"sync": "exact", "capture": True}
    single = train(tmp_path / "1", **settings)
    results = run_ranks(rank_on_the_card, 2, tmp_path / "2", settings)
    assert {r["weights_sha256"] for r in results} == {single["weights_sha256"]}


@pytest.mark.slow
def test_what_is_compiled_can_be_recorded(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", sync="exact")
    found = train(tmp_path / "both", sync="exact", compile=True, capture=True)
    assert found["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-3)


def test_a_loss_that_reads_a_number_cannot_be_recorded(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        total = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return total, int((batch[1] >= 0).sum())

    with pytest.raises(InputError, match="--capture: the loss cannot be recorded"):
        fit(replace(build(), loss=loss), tmp_path, capture=True)
