"""--shard optimizer: each process steps its slices, with the bits of one process that steps
everything.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jobs.faults import FAULT, install
from ranks import run_ranks
from stepladder import InputError, Job, Settings, Trainer, World
from stepladder.core.errors import StateLost, StorageFault
from stepladder.storage.snapshot import read_newest_snapshot
from stepladder.storage.snapshot_slices import SliceReader, merge_parts, write_part
from stepladder.storage.snapshot_store import Snapshots
from stepladder.train.comm import Comm
from stepladder.train.layout import find_layout
from stepladder.train.layout.pieces import slices_of_rank
from stepladder.train.layout.replicated import Replicated
from stepladder.train.layout.zero1 import OptimizerSlices, Zero1
from stepladder.train.optimizers import ELEMENTWISE_OPTIMIZERS, PARAMETERWISE_OPTIMIZERS
from stepladder.train.snapshot_saver import SnapshotSaver
from stepladder.train.state import TrainState

STEPS = 3
RANKS = (2, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


class Net(nn.Module):
    """Parameters of many shapes and two types: one is never used, one does not lie in its own
    order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 37)
        self.second = nn.Linear(37, 5, bias=False)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.last = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = torch.outer(x.flatten()[:3], torch.ones(25)).view(1, 3, 5, 5)
        return (self.second(self.first(x).tanh()) * self.scale).square().sum() + self.last(
            images
        ).sum()


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The net, and an optimizer with two groups."""
    torch.manual_seed(0)
    net = Net()
    if kind == "Muon":
        matrices = [net.first.weight, net.second.weight]
        return net, torch.optim.Muon([{"params": [p]} for p in matrices], lr=0.01)
    plain = [p for p in net.parameters() if p.ndim < 2]
    groups = [
        {"params": [p for p in net.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": plain},
    ]
    return net, getattr(torch.optim, kind)(groups, lr=0.01, **OPTIONS.get(kind, {}))


def job_of(net: nn.Module | None, optimizer: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(model=net, optimizer=optimizer)


def stepped(kind: str, comm: Comm, state: dict[str, Any] | None = None) -> tuple[list[bytes], Any]:
    """All weights after some steps, and who has the optimizer's state. state: to begin with."""
    net, optimizer = made(kind)
    shards = None if comm.alone else Zero1(job_of(net, optimizer), comm)
    if state is not None:
        optimizer.load_state_dict(deepcopy(state))  # it steps what it is given
        if shards:
            shards.adopt_state()
    for step in range(STEPS):
        net.zero_grad()
        net(torch.randn(4, 13, generator=torch.Generator().manual_seed(step))).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if shards is None:
            optimizer.step()
        else:
            with shards.stepping():
                optimizer.step()
            shards.gather()
    return [bits(p.detach()) for p in net.parameters()], shards or optimizer


def bits(value: Any) -> Any:
    return (
        value.contiguous().reshape(-1).numpy().tobytes()
        if isinstance(value, torch.Tensor)
        else value
    )


def on_ranks(comm: Comm, expected: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Of each kind the weights and the state, from the start and from a whole state; and who reads
    it has it.
    """
    torch.set_num_threads(1)
    results = {}
    for kind, state in expected.items():
        weights, shards = stepped(kind, comm)
        rerun, _ = stepped(kind, comm, state)
        path = folder / kind
        path.mkdir(exist_ok=True)
        message = json.dumps(write_part(path, comm.world.rank, shards.slices())).encode()
        size = range(comm.world.world_size)
        parts = [comm.broadcast_bytes(message if n == comm.world.rank else None, n) for n in size]
        reader = SliceReader(path, merge_parts(map(json.loads, parts))[1])
        complete = shards.state_dict()
        reader.fill_state({"optimizer": complete})
        _, optimizer = made(kind)
        reading = Zero1(job_of(None, optimizer), comm)
        optimizer.load_state_dict(
            {**complete, "state": {n: steps(item) for n, item in complete["state"].items()}}
        )
        reading.adopt_state()
        reading.load_slices(reader)
        for name, rows in reading.slices().items():
            assert torch.equal(rows.values, shards.slices()[name].values), (kind, name)
        for piece in reading.optimizer_slices.pieces:
            for value in reading.optimizer_slices.state[piece.values].values():
                assert (
                    value.shape != piece.values.shape or value.stride() == piece.values.stride()
                ), kind
        own_part = sum(p.values.numel() for p in reading.optimizer_slices.pieces)
        results[kind] = weights, plain(complete), rerun, own_part
    return results


def steps(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not value.ndim}


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {
        number: {
            name: (getattr(value, "shape", None), bits(value)) for name, value in values.items()
        }
        for number, values in state["state"].items()
    }


def alone() -> Comm:
    return Comm(World(), torch.device("cpu"))


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_each_optimizer_has_the_bits_and_the_state_of_one_process(
    tmp_path: Path, ranks: int
) -> None:
    kinds = [*ELEMENTWISE_OPTIMIZERS, *PARAMETERWISE_OPTIMIZERS]
    once = {
        kind: (weights, item.state_dict())
        for kind in kinds
        for weights, item in [stepped(kind, alone())]
    }
    twice = {kind: stepped(kind, alone(), once[kind][1])[0] for kind in kinds}
    results = run_ranks(
        on_ranks, ranks, {kind: state for kind, (_, state) in once.items()}, tmp_path
    )
    for kind, (weights, state) in once.items():
        for rank, result in enumerate(results):
            assert result[kind][0] == weights, f"{kind}, rank {rank} of {ranks}"
            assert result[kind][2] == twice[kind], (
                f"{kind} from a whole state, rank {rank} of {ranks}"
            )
            assert result[kind][1] == plain(state), kind
        sizes = [result[kind][3] for result in results]
        assert sum(sizes) == sum(
            p.numel() for g in made(kind)[1].param_groups for p in g["params"] if p.requires_grad
        )


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.LBFGS(p), lambda p: type("Own", (torch.optim.SGD,), {})(p, lr=0.1)],
    ids=["LBFGS", "Own"],
)
def test_an_optimizer_that_nobody_can_cut_is_refused_by_name(
    request: pytest.FixtureRequest, optimizer: Callable[..., Any]
) -> None:
    with pytest.raises(InputError, match=f"a step of {request.node.callspec.id} on slices"):
        Zero1.validate(job_of(None, optimizer(nn.Linear(2, 2).parameters())))


# -- two copies of each slice ----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(1, 9))
def test_each_slice_is_held_by_two_neighbours(ranks: int) -> None:
    held_count = [slices_of_rank(rank, ranks, 2) for rank in range(ranks)]
    assert [slices_of_rank(rank, ranks, 1) for rank in range(ranks)] == [
        [rank] for rank in range(ranks)
    ]
    for item in range(ranks):
        holders = {rank for rank in range(ranks) if item in held_count[rank]}
        assert holders == {item, (item + 1) % ranks}


def copies_of(optimizer: Any, comm: Comm, rank: int, ranks: int) -> Replicated:
    """What a rank of an earlier, larger group has, in a group that follows it."""
    earlier: Any = SimpleNamespace(world=World(rank, ranks, rank, ranks), group_number=0)
    copies = Replicated(job_of(None, optimizer), earlier)
    copies.comm = copies.optimizer_slices.comm = comm
    comm.group_number = 1
    return copies


def held_state(shards: OptimizerSlices) -> list[dict[str, Any]]:
    states = [shards.state.get(piece.values, {}) for piece in shards.pieces]
    return [{name: bits(value) for name, value in sorted(state.items())} for state in states]


def go_on(comm: Comm, remaining: list[int], ranks: int, once: dict[str, Any]) -> dict[str, Any]:
    """Ranks held a stepped net in slices, and those in `left` are there: its weights and state,
    dealt anew.
    """
    torch.set_num_threads(1)
    results = {}
    for kind, (weights, state) in once.items():
        net, optimizer = made(kind)
        optimizer.load_state_dict(deepcopy(state))
        copies = copies_of(optimizer, comm, remaining[comm.world.rank], ranks)
        stale = [param.detach().clone() for param in net.parameters()]
        for param, raw in zip(net.parameters(), weights, strict=True):
            param.data.copy_(torch.frombuffer(bytearray(raw), dtype=param.dtype).view(param.shape))
        old = copies.slices_by_group[0]
        saved = [piece.values.clone() for piece in old.pieces]
        for param, before in zip(net.parameters(), stale, strict=True):
            param.data.copy_(before)  # what other ranks have stepped was not gathered
        for piece, values in zip(old.pieces, saved, strict=True):
            piece.values.copy_(values)
        copies.redistribute(copies.find_holders())
        assert copies.finish_recovery() is False and list(copies.slices_by_group) == [1]
        expected = made(kind)[1]
        expected.load_state_dict(deepcopy(state))
        states = [
            held_state(item)
            for item in (copies.optimizer_slices, OptimizerSlices(expected, comm, copies=2))
        ]
        results[kind] = [bits(param.detach()) for param in net.parameters()], states[0] == states[1]
    return results


@pytest.mark.ranks
@pytest.mark.parametrize(("remaining", "ranks"), [([0, 2], 4), ([1, 2, 3], 4)])
def test_slices_are_dealt_anew_from_whoever_has_them(remaining: list[int], ranks: int) -> None:
    kinds = [*ELEMENTWISE_OPTIMIZERS, *PARAMETERWISE_OPTIMIZERS]
    once = {
        kind: (weights, item.state_dict())
        for kind in kinds
        for weights, item in [stepped(kind, alone())]
    }
    for rank, results in enumerate(run_ranks(go_on, len(remaining), remaining, ranks, once)):
        for kind, (weights, _) in once.items():
            assert results[kind] == (weights, True), f"{kind}, rank {rank}"


@pytest.mark.parametrize(
    ("rank", "ranks", "has_all"), [(0, 2, True), (1, 2, True), (0, 3, False), (2, 4, False)]
)
def test_what_one_rank_has_alone(rank: int, ranks: int, has_all: bool) -> None:
    copies = copies_of(made("AdamW")[1], alone(), rank, ranks)
    if has_all:
        assert copies.find_holders() == (0, [0] * ranks)
    else:
        with pytest.raises(StateLost):
            copies.find_holders()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_copies": 3, "shard": "optimizer"}, "--shard-copies 3 is too large"),
        ({"shard_copies": 0}, "--shard-copies 0 is too small"),
        ({"shard_copies": 2}, "--shard-copies 2 with --shard none"),
        ({"shard_copies": 2, "shard": "full"}, "--shard-copies 2 with --shard full"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Settings(run_dir=tmp_path, **options)


def test_more_copies_than_processes_are_refused(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path, shard="optimizer", shard_copies=2)
    settings.validate_shard_copies(2)
    with pytest.raises(InputError, match="--shard-copies 2 on 1 process"):
        settings.validate_shard_copies(1)


# -- whole runs ------------------------------------------------------------------------------------


def make_job() -> Job:
    """Groups, clipping, a schedule, dropout."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(46, 13, generator=generator), torch.randn(46, 5, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 37), nn.Dropout(0.2), nn.Tanh(), nn.Linear(37, 5))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == d], "weight_decay": 0.1 * d}
        for d in (1, 2)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return Job(
        model=model,
        optimizer=optimizer,
        train_data=(x, y),
        clip_norm=0.1,
        loss=lambda model, batch: ((model(batch[0]) - batch[1]).square().sum(), len(batch[0])),
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    )


def fit(comm: Comm, run_dir: Path, **settings: Any) -> dict[str, Any]:
    base = {"epochs": 2, "global_batch": 16, "microbatch": 2, "sync": "exact", "progress": False}
    return (
        Trainer(make_job(), Settings(run_dir=run_dir, **{**base, **settings}), comm=comm)
        .fit()
        .as_json()
    )


def fit_on_ranks(comm: Comm, run_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    return fit(comm, run_dir, **settings)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings", [{"precision": "fp16", "warmup_steps": 2}, {"sync": "ddp"}], ids=["fp16", "ddp"]
)
def test_a_run_that_changes_size_and_shards_at_each_stop_has_the_bits_of_the_unbroken_one(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    sizes = [(1, 2), (2, 3), (4, 4)] if "sync" not in settings else [(2, 2)]
    unbroken = tmp_path / "whole"
    complete = (
        fit(alone(), unbroken, **settings)
        if len(sizes) > 1
        else run_ranks(fit_on_ranks, 2, unbroken, settings)[0]
    )
    for steps, ranks in sizes:
        options = {"steps": steps, "shard": "optimizer", "shard_copies": 2 if ranks == 3 else 1}
        run_ranks(fit_on_ranks, ranks, tmp_path / "parts", {**settings, **options})
    if len(sizes) > 1:
        last = fit(alone(), tmp_path / "parts", **settings)
    else:
        last = run_ranks(fit_on_ranks, 2, tmp_path / "parts", settings)[0]
    assert last["weights_sha256"] == complete["weights_sha256"]
    states = [
        read_newest_snapshot(path).state()["optimizer"] for path in (unbroken, tmp_path / "parts")
    ]
    assert (
        plain(states[0]) == plain(states[1])
        and states[0]["param_groups"] == states[1]["param_groups"]
    )


def save_where_one_cannot(comm: Comm, folder: Path, number: int) -> str:
    """What each rank says of a snapshot whose part the second one could not write."""
    job = make_job()
    state = TrainState(job, find_layout(Settings(folder, shard="optimizer"))(job, comm))
    saving = SnapshotSaver(state, comm)
    if comm.world.is_first:
        saving.open(Snapshots(folder))
    saving.save({})
    saving.part_writer.wait_for_errno()
    if not comm.world.is_first:
        install()
        FAULT.plant("part-00001", number)
        saving.part_writer.save(folder, 1, state.slices())
    try:
        saving.wait()
    except (InputError, StorageFault) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        saving.close()
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "error"), [(errno.EIO, "InputError"), (errno.ESTALE, "StorageFault")]
)
def test_all_ranks_end_where_one_cannot_write_its_part(
    number: int, error: str, tmp_path: Path
) -> None:
    message = f"{error}: rank 1 could not write its part of a snapshot: {os.strerror(number)}"
    for answer in run_ranks(save_where_one_cannot, 2, tmp_path, number):
        assert answer.startswith(message)
