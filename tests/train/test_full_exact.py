"""--sync exact --shard full: each process has rows of everything, and the bits of one that has the
whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks
from stepladder import InputError, Job, Settings, Trainer, World
from stepladder.storage.audit import audit
from stepladder.storage.snapshot import read_newest_snapshot
from stepladder.train.comm import Comm

KINDS: dict[str, Any] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
}


class Net(nn.Module):
    """Blocks with dropout, one of them used twice, tied weights, batch norm, a frozen weight; rows
    of odd lengths.

    unused: leaves a block out.
    """

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.unused = unused
        self.tokens = nn.Embedding(211, 37)
        self.head = nn.Linear(37, 211, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(37, 37), nn.Dropout(0.1), nn.Tanh()) for _ in range(2)
        )
        self.blocks[1][0].bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(37)
        self.narrow = nn.Linear(37, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = self.tokens(x)
        for block in [*self.blocks[self.unused :], self.blocks[1]]:
            results = results + block(results)
        return self.head(self.norm(results.flatten(0, 1)) + self.narrow(results).flatten(0, 1))


def make_job(kind: str, unused: bool = False) -> Job:
    torch.manual_seed(0)
    model = Net(unused)
    data = torch.randint(211, (46, 5), generator=torch.Generator().manual_seed(1))
    if kind == "SGD":  # without batch norm, whose statistics go the loss's way
        model.norm = nn.LayerNorm(37)  # type: ignore[assignment]
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim == d], "weight_decay": 0.1 * d} for d in (1, 2)
    ]
    optimizer = KINDS[kind](groups)

    def summed(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = model(x[:, :-1])
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
        ema_decay=0.9,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    )


def fit(
    comm: Comm, run_dir: Path, kind: str, settings: dict[str, Any], unused: bool = False
) -> dict[str, Any]:
    base = {
        "epochs": 2,
        "global_batch": 16,
        "microbatch": 2,
        "progress": False,
        "snapshot_every": 2,
    }
    chosen: Any = {**base, "sync": "exact", **settings}
    return (
        Trainer(make_job(kind, unused), Settings(run_dir=run_dir, **chosen), comm=comm)
        .fit()
        .as_json()
    )


def alone() -> Comm:
    return Comm(World(), torch.device("cpu"))


def assert_same_run(results: Path, expected: Path) -> None:
    """To the byte what was recorded, to the bit what was saved; and no sample lost."""
    assert (results / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    item = read_newest_snapshot(results)
    peer = read_newest_snapshot(expected)
    states = item.state()
    complete = peer.state()
    for number, values in complete["optimizer"]["state"].items():
        for name, value in values.items():
            assert torch.equal(states["optimizer"]["state"][number][name], value), (number, name)
    for name, value in complete["average"].items():
        assert torch.equal(states["average"][name], value), name
    assert audit(results).ok


@pytest.mark.ranks
def test_two_processes_end_with_the_bits_of_one(tmp_path: Path) -> None:
    complete = fit(alone(), tmp_path / "whole", "SGD", {})
    spread = run_ranks(fit, 2, tmp_path / "spread", "SGD", {"shard": "full"})
    hashes = {item["weights_sha256"] for item in [complete, *spread]}
    assert len(hashes) == 1
    assert len(list((tmp_path / "spread" / "snapshots" / "step_00000006").glob("part-*"))) == 2
    assert_same_run(tmp_path / "spread", tmp_path / "whole")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_any_shard_on_any_number_of_processes_goes_on_with_the_same_bits(
    tmp_path: Path, kind: str
) -> None:
    complete = fit(alone(), tmp_path / "whole", kind, {})
    parts = tmp_path / "parts"
    rerun = {"checkpoint_blocks": True}
    run_ranks(fit, 4, parts, kind, {"steps": 1, "shard": "full", **rerun})
    run_ranks(fit, 2, parts, kind, {"steps": 2, "shard": "optimizer"})
    run_ranks(fit, 3, parts, kind, {"steps": 3, "shard": "full"})
    fit(alone(), parts, kind, {"steps": 4})
    last = run_ranks(fit, 3, parts, kind, {"shard": "full"})[0]
    assert (
        last["weights_sha256"] == complete["weights_sha256"]
        and last["metrics"] == complete["metrics"]
    )
    assert_same_run(parts, tmp_path / "whole")


@pytest.mark.ranks
def test_a_block_without_a_gradient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError,
        match=r"--sync exact --shard full: blocks\.0 has no gradient after a microbatch",
    ):
        run_ranks(fit, 2, tmp_path, "SGD", {"shard": "full"}, True)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sync": "manual"}, "--shard full with --sync manual"),
        ({"sync": "exact", "replay_every": 2}, "--replay-every with --shard full"),
    ],
)
def test_what_it_does_not_do_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Settings(tmp_path, shard="full", **settings)
