"""--shard full: each process holds its rows of weights, gradients and state, with the curve of one
process.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from processes import JOBS, run
from ranks import run_ranks
from stepladder import InputError, Job, Settings, Trainer, World
from stepladder.core.plan import IdleSpan, Plan, add_idle_spans
from stepladder.storage.snapshot import read_newest_snapshot, read_snapshot
from stepladder.storage.snapshot_slices import (
    DamagedSnapshot,
    SliceReader,
    TensorSlice,
    merge_parts,
    verify_slices,
    write_part,
)
from stepladder.train.comm import Comm
from stepladder.train.job_file import load_job_file
from stepladder.train.layout.fsdp import FullyShardedLayout
from stepladder.train.layout.zero1 import Zero1
from stepladder.train.model_blocks import find_blocks, validate_fully_shardable


class Net(nn.Module):
    """Blocks in a list, tied weights, a buffer, fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)
        )
        self.narrow = nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = self.tokens(x)
        for block in self.blocks:
            results = results + block(results)
        return self.head(results * self.scale + self.narrow(results))


def make_job() -> Job:
    torch.manual_seed(0)
    model = Net()
    data = torch.randint(11, (46, 5), generator=torch.Generator().manual_seed(1))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == d], "weight_decay": 0.1 * d}
        for d in (1, 2)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)

    def summed(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = model(x[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, x[:, 1:].flatten(), reduction="sum"), x[
            :, 1:
        ].numel()

    return Job(
        model=model,
        optimizer=optimizer,
        loss=summed,
        train_data=data,
        eval_data=data[:25],
        eval_batch=5,
        metrics=lambda model, x: {"nats": summed(model, x)},
        clip_norm=0.5,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    )


def fit(comm: Comm, run_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    base = {
        "epochs": 2,
        "global_batch": 16,
        "microbatch": 2,
        "progress": False,
        "snapshot_every": 2,
    }
    return (
        Trainer(make_job(), Settings(run_dir=run_dir, **{**base, **settings}), comm=comm)
        .fit()
        .as_json()
    )


def alone() -> Comm:
    return Comm(World(), torch.device("cpu"))


def curve(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ddp", "exact"])
def test_killed_on_four_with_full_then_three_with_slices_then_one_ends_with_the_curve_of_the_unbroken_run(
    tmp_path: Path, sync: str
) -> None:
    args = (
        "train",
        "digits",
        "--sync",
        sync,
        "--microbatch",
        8,
        "--epochs",
        1,
        "--snapshot-every",
        3,
        "--json",
    )
    assert run(*args, "--run-dir", "whole", cwd=tmp_path).returncode == 0
    parts = *args, "--run-dir", "parts"
    full = "--nproc", 4, "--shard", "full", "--fail-at", "2:8", "--max-restarts", 0
    killed = run(*parts, *full, cwd=tmp_path)
    assert killed.returncode not in (0, 2, 75), killed.stderr
    assert read_newest_snapshot(tmp_path / "parts").manifest["slices"], (
        "it was saved in rows before it was killed"
    )
    stopped = run(*parts, "--nproc", 3, "--shard", "optimizer", "--steps", 15, cwd=tmp_path)
    # That of step 6 had begun, so that of step 3 was whole.
    assert json.loads(stopped.stdout.splitlines()[-1])["resumed_from_step"] in (3, 6)
    assert read_newest_snapshot(tmp_path / "parts").manifest["slices"], (
        "no process had the optimizer's whole state"
    )
    assert run(*parts, cwd=tmp_path).returncode == 0
    assert curve(tmp_path / "parts") == pytest.approx(curve(tmp_path / "whole"), rel=1e-4)
    results = [
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("parts", "whole")
    ]
    assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], abs=0.01)
    assert sync == "ddp" or results[0]["weights_sha256"] == results[1]["weights_sha256"]


@pytest.mark.ranks
@pytest.mark.slow
def test_full_on_two_sizes_saves_the_same(tmp_path: Path) -> None:
    """A snapshot of slices can be read whole, and says which part is damaged."""
    nets = []
    for ranks in (2, 3):
        results = run_ranks(fit, ranks, tmp_path / str(ranks), {"steps": 2, "shard": "full"})
        snapshot = read_newest_snapshot(tmp_path / str(ranks))
        net = Net()
        snapshot.restore_model(net)
        assert (
            net.head.weight is net.tokens.weight
            and len({item["weights_sha256"] for item in results}) == 1
        )
        nets.append(net.state_dict())
        assert snapshot.tensors().keys() == net.state_dict().keys() - {"head.weight"}
        assert len(snapshot.state()["optimizer"]["state"]) == len(list(net.parameters()))
        for taken in (
            FullyShardedLayout.slice_prefix,
            Zero1.slice_prefix,
        ):  # in rows: it is not read whole before
            remaining = snapshot.state(taken)["optimizer"]["state"].values()
            assert {value.numel() for values in remaining for value in values.values()} == {1}
    for name, value in nets[0].items():
        torch.testing.assert_close(nets[1][name], value, rtol=1e-5, atol=1e-7)
    folder = tmp_path / "3" / "snapshots" / "step_00000002"
    part = folder / "part-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(DamagedSnapshot, match=r"part-00001.safetensors: SHA-256 differs"):
        read_snapshot(folder)
    part.unlink()
    with pytest.raises(DamagedSnapshot, match=r"part-00001.safetensors: No such file"):
        read_snapshot(folder)


@pytest.mark.parametrize("flat", [False, True])
def test_rows_are_found_in_whichever_part_they_lie(tmp_path: Path, flat: bool) -> None:
    complete = torch.arange(21.0).view(7, 3)
    cuts = [(4, 18), (0, 4), (18, 21), (21, 21)] if flat else [(0, 3), (3, 6), (6, 7), (7, 7)]
    held_count = complete.flatten() if flat else complete
    parts = [
        write_part(tmp_path, n, {"model/w": TensorSlice(held_count[lo:hi], lo, [7, 3], flat)})
        for n, (lo, hi) in enumerate(cuts)
    ]
    files, slices = merge_parts(parts)
    verify_slices({"files": files, "slices": slices})
    reader = SliceReader(tmp_path, slices)
    for lo in range(8):
        for hi in range(lo, 8):
            assert torch.equal(reader.read_rows("model/w", lo, hi), complete[lo:hi]), (lo, hi)
    for lo in range(22):
        for hi in range(lo, 22):
            assert torch.equal(
                reader.read_elements("model/w", lo, hi), complete.flatten()[lo:hi]
            ), (lo, hi)
    assert torch.equal(reader.read_tensor("model/w"), complete)


@pytest.mark.parametrize(
    "pieces",
    [
        [["part-0", 0, 4]],
        [["part-0", 0, 4], ["part-1", 5, 7]],
        [["part-0", 0, 4], ["part-1", 3, 7]],
        [["../../part-0", 0, 7]],
        [["state.pt", 0, 7]],
        [["part-0", -1, 7]],
        [["part-0", 0]],
        [None],
        7,
        [],
    ],
)
def test_slices_that_do_not_go_together_are_refused(pieces: Any) -> None:
    files = {"part-0": {}, "part-1": {}, "state.pt": {}}
    good = {"model/w": {"shape": [7, 3], "pieces": [["part-1", 4, 7], ["part-0", 0, 4]]}}
    verify_slices({"files": files, "slices": good})
    with pytest.raises(DamagedSnapshot, match="its slices do not go together"):
        verify_slices({"files": files, "slices": {"model/w": {"shape": [7, 3], "pieces": pieces}}})
    with pytest.raises(DamagedSnapshot, match="its slices do not go together"):
        verify_slices({"files": files, "slices": {"state/../w": good["model/w"]}})


def test_blocks_are_those_that_repeat_or_those_that_the_job_names() -> None:
    job = make_job()
    assert find_blocks(job) == list(job.model.blocks)  # type: ignore[arg-type, call-overload]
    named = Job(job.model, job.optimizer, job.loss, job.train_data, blocks=(nn.Embedding,))
    assert find_blocks(named) == [job.model.tokens]


def test_a_recurrent_cell_is_no_block_unless_the_job_names_it() -> None:
    """Forward calls it for each step of a sequence: with its weights gathered each time, a step
    took five times as long."""
    model = nn.ModuleDict(
        {"cells": nn.ModuleList(nn.LSTMCell(4, 4) for _ in range(2)), "head": nn.Linear(4, 4)}
    )
    job = replace(make_job(), model=model)
    assert find_blocks(job) == []
    assert find_blocks(replace(job, blocks=(nn.LSTMCell,))) == list(model["cells"])  # type: ignore[arg-type, call-overload]


def test_all_ranks_make_as_many_passes() -> None:
    plan = Plan(20, 20, 4)
    shares = [plan.share(0, rank, 4) for rank in range(4)]
    passes = [add_idle_spans(share, shares) for share in shares]
    assert {len(spans) for spans in passes} == {max(map(len, shares))}
    assert sum(len(span) for spans in passes for span in spans) == 20
    idle = next(span for spans in passes for span in spans if isinstance(span, IdleSpan))
    assert len(plan.indices(0, idle)) == 4, "it reads what the first pass has"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"precision": "fp16"}, "--shard full with --precision fp16"),
        ({"guard_every": 3}, "--guard-every with --shard full"),
    ],
)
def test_what_full_does_not_do_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Settings(tmp_path, shard="full", **settings)


def test_what_cannot_be_cut_into_rows_is_refused() -> None:
    job = make_job()
    validate_fully_shardable(job)
    with pytest.raises(InputError, match="a step of Muon on slices"):
        FullyShardedLayout.validate(
            replace(job, optimizer=torch.optim.Muon([nn.Linear(2, 2).weight], lr=0.1))
        )
    # type: ignore[index]
    first = job.model.blocks[0]
    second = job.model.blocks[1]
    second[0].weight = first[0].weight
    with pytest.raises(InputError, match=r"the weight blocks.0.0.weight is used in two blocks"):
        validate_fully_shardable(job)
    lying_otherwise = replace(job, model=nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    with pytest.raises(
        InputError, match=r"the weight weight does not lie in memory row by row .*channels_last"
    ):
        validate_fully_shardable(lying_otherwise)
    validate_fully_shardable(
        replace(job, model=nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last))
    )  # type: ignore[call-overload]
    job.model.register_parameter("factor", nn.Parameter(torch.ones(())))
    with pytest.raises(InputError, match="the weight factor is a single number"):
        validate_fully_shardable(job)


def fit_dropping(comm: Comm, run_dir: Path, by_rank: bool) -> str:
    """Train. Returns what is refused."""
    os.environ["BY_RANK"] = str(comm.world.rank if by_rank else 0)
    torch.manual_seed(0)
    drops = load_job_file(JOBS / "drops.py")
    job = drops.build(drops.Config())
    settings = Settings(run_dir=run_dir, epochs=2, global_batch=8, shard="full", progress=False)
    try:
        Trainer(job, settings, comm=comm).fit()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("by_rank", [True, False])
def test_ranks_that_call_other_blocks_are_refused_before_a_weight_moves(
    tmp_path: Path, by_rank: bool
) -> None:
    """Rows of both blocks would be gathered as the weights of one. By gloo no collective notices
    that.
    """
    first, second = run_ranks(fit_dropping, 2, tmp_path, by_rank, by_gloo=True)
    assert first == second
    if by_rank:
        assert "rank 1 calls blocks." in first and " where rank 0 calls blocks." in first
        assert newest_step(tmp_path) == 0
    else:
        assert first == ""


def newest_step(run_dir: Path) -> int:
    return sum(1 for line in curve(run_dir) if line) if (run_dir / "metrics.jsonl").exists() else 0


@pytest.mark.ranks
def test_a_block_that_only_one_rank_calls_is_named_and_nothing_is_restarted(tmp_path: Path) -> None:
    done = run("train", JOBS / "drops.py", "--nproc", 2, "--shard", "full", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    named = r"rank 1 .* calls all_gather of blocks\.\d .* where rank 0 .* calls all_gather of"
    assert re.search(named, done.stderr), done.stderr
    assert "(forward(), drops.py:" in done.stderr
    assert "Usual cause: a block of --shard full that not all ranks call" in done.stderr
    assert "not restarted: the code is wrong" in done.stderr
    assert "restarting" not in done.stderr
