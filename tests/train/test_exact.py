"""Exact mode: the same bits on any number of processes, through a resume at another size."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ranks import run_ranks
from stepladder import InputError, Job, Settings, Trainer, World
from stepladder.core.plan import split_evenly
from stepladder.storage.audit import audit
from stepladder.train.comm import Comm
from stepladder.train.pending import Pending
from stepladder.train.sync.binary_tree import Block, Tree, split_into_blocks
from stepladder.train.sync.exact import ExactSync, TreeBucket

# 8 microbatches, and 7 in the short last batch
SAMPLES = 46
GLOBAL_BATCH = 16
MICROBATCH = 2


def recursive(values: list[torch.Tensor]) -> torch.Tensor:
    """The definition: split at the largest power of two below the count."""
    if len(values) == 1:
        return values[0].clone()
    middle = 2 ** (math.ceil(math.log2(len(values))) - 1)
    return recursive(values[:middle]) + recursive(values[middle:])


def values_of(count: int) -> list[torch.Tensor]:
    """Values whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(count)
    return list(torch.randn(count, 7, generator=generator))


@given(st.integers(1, 200))
def test_the_tree_adds_as_its_definition_says(count: int) -> None:
    values = values_of(count)
    tree = Tree()
    held_count = 0
    freed = []
    for number, value in enumerate(values):
        freed += tree.push(Block(number, 1, value.clone()))
        held_count = max(held_count, len(tree.blocks))
    assert len(freed) + len(tree.blocks) == count, "each tensor is either held or free again"
    assert torch.equal(tree.root(), recursive(values))
    assert held_count <= math.log2(count) + 1


@given(st.integers(1, 100), st.lists(st.integers(0, 100), max_size=8))
def test_shares_of_any_size_finish_the_same_tree(count: int, cuts: list[int]) -> None:
    values = values_of(count)
    complete = Tree()
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    for lo, hi in pairwise(edges):
        own_part = Tree()
        for number in range(lo, hi):
            own_part.push(Block(number, 1, values[number].clone()))
        assert [(block.lo, block.size) for block in own_part.blocks] == blocks_of(lo, hi)
        assert [block.size for block in own_part.blocks] == split_into_blocks(lo, hi)
        for block in own_part.blocks:
            complete.push(block)
    assert torch.equal(complete.root(), recursive(values))


def blocks_of(lo: int, hi: int) -> list[tuple[int, int]]:
    """The definition: the largest subtrees [a, a + 2**k), a a multiple of 2**k, that fit one after
    the other.
    """
    if lo == hi:
        return []
    size = max(2**k for k in range(hi.bit_length()) if lo % 2**k == 0 and lo + 2**k <= hi)
    return [(lo, size), *blocks_of(lo + size, hi)]


def test_a_share_of_nothing_has_no_blocks() -> None:
    assert split_into_blocks(5, 5) == []


# -- one step, below the trainer -------------------------------------------------------------------

TOTALS = (1, 2, 3, 5, 8, 7, 1)  # microbatches of each step; with fewer than ranks, some have none
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "scale"]  # the last in a bucket of its own


def gradients(comm: Comm, totals: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Per step the bits of all gradients, of the extra vector, and the step's counts and votes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
    sync = ExactSync(model, comm, 3)
    rank = comm.world.rank
    results = []
    for step, total in enumerate(totals):
        first, end = split_evenly(total, rank, comm.world.world_size)
        sync.begin(first, end - first, total)
        for number in range(first, end):
            generator = torch.Generator().manual_seed(100 * step + number)
            out = model[0](torch.randn(number + 1, 5, generator=generator))
            if number == total - 1:  # the second layer has a gradient in one microbatch alone
                out = model[2](model[1](out))
            sync.backward(
                (out * model.scale).square().sum(), number + 1, torch.randn(3, generator=generator)
            )
        result = sync.finish(
            sum(range(first + 1, end + 1)), [step == 1 and rank == comm.world.world_size - 1]
        )
        assert result.extra is not None
        grads = {
            name: p.grad.numpy().tobytes()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        results.append((result.total_count, result.votes, result.extra.numpy().tobytes(), grads))
        model.zero_grad()
    held_count = max(len(bucket.views_by_leaf) for bucket in sync.buckets)
    sync.close()
    model[0](
        torch.ones(1, 5)
    ).sum().backward()  # with the hooks gone, nobody waits for this gradient
    return [*results, held_count]


@pytest.mark.ranks
def test_a_steps_gradient_has_the_bits_of_one_process_on_any_number() -> None:
    *expected, held_count = gradients(alone(), TOTALS)
    assert [set(grads) for *_, grads in expected] == [set(NAMES)] * len(TOTALS)
    assert [(counted, votes) for counted, votes, *_ in expected] == [
        (sum(range(total + 1)), [step == 1]) for step, total in enumerate(TOTALS)
    ]
    assert held_count <= math.log2(max(TOTALS)) + 2, "a leaf besides the tree's blocks"
    for ranks in (2, 3):
        for rank, (*results, held_count) in enumerate(run_ranks(gradients, ranks, TOTALS)):
            assert results == expected, f"rank {rank} of {ranks}"
            assert held_count <= 4, f"rank {rank} of {ranks} keeps leaves that it does not need"


@pytest.mark.parametrize(
    ("size", "ranks", "padded"), [(0, 3, 0), (5, 1, 5), (5, 3, 6), (6, 3, 6), (7, 3, 9)]
)
def test_a_bucket_is_padded_to_the_next_multiple_of_the_ranks(
    size: int, ranks: int, padded: int
) -> None:
    comm = Comm(World(world_size=ranks), torch.device("cpu"))
    assert len(TreeBucket(comm, [], torch.zeros(0), size).out) == padded


def test_each_rank_is_sent_its_slice_of_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def record(comm: Comm, *args: Any) -> Pending:
        sent.extend(args)
        return Pending(None)

    monkeypatch.setattr(Comm, "all_to_all", record)
    bucket = TreeBucket(Comm(World(1, 2), torch.device("cpu")), [], torch.zeros(0), 4)
    for microbatch in (3, 4, 5):  # the blocks [3, 4) and [4, 6) of the second rank
        bucket.open_leaf()
        bucket.leaf_extra.copy_(torch.arange(4.0) + 10 * microbatch)
        bucket.push(microbatch)
    bucket.start_exchange(6)
    _, send_buffer, received_sizes, sent_sizes = sent
    assert send_buffer.tolist() == [30, 31, 90, 92, 32, 33, 94, 96]
    assert (received_sizes, sent_sizes) == ([4, 4], [4, 4])


def test_a_steps_gradient_is_that_of_the_mean_over_all_its_microbatches() -> None:
    model = nn.Linear(4, 2)
    total = 5
    sync = ExactSync(model, alone(), 1)
    batches = [torch.randn(n + 1, 4) for n in range(total)]
    sync.begin(0, total, total)
    for batch in batches:
        sync.backward(model(batch).square().sum(), len(batch), torch.ones(1))
    result = sync.finish(sum(map(len, batches)), [])
    assert (result.total_count, result.extra) == (15, torch.tensor([5.0]))
    results = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    sync.close()
    model.zero_grad()
    (model(torch.cat(batches)).square().sum() / sum(map(len, batches))).backward()
    torch.testing.assert_close(results, [param.grad for param in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_a_model_of_one_type_that_is_not_float32_has_a_bucket_of_the_loss_alone(
    dtype: torch.dtype,
) -> None:
    model = nn.Linear(4, 2).to(dtype)
    sync = ExactSync(model, alone(), 1)
    sync.begin(0, 2, 2)
    for _ in range(2):
        sync.backward(model(torch.ones(3, 4, dtype=dtype)).abs().sum(), 3, torch.ones(1))
    result = sync.finish(6, [])
    assert result.extra == torch.tensor([2.0])
    assert {param.grad.dtype for param in model.parameters()} == {dtype}
    sync.close()


# -- whole runs ------------------------------------------------------------------------------------


def noisy_loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Draws its own random numbers, as negative sampling does, and counts other things than
    samples.
    """
    x, y = batch
    logits = model(x + 0.1 * torch.randn_like(x))
    weight = 1 + y % 3
    return (F.cross_entropy(logits, y, reduction="none") * weight).sum(), int(weight.sum())


def metrics(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    return {
        "test_loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))
    }


def make_job(optimizer: str = "adam", unused: bool = False) -> Job:
    """Dropout, batch norm, clipping, a schedule, weight decay and momentum in one small job."""
    generator = torch.Generator().manual_seed(3)
    x, y = (
        torch.randn(SAMPLES, 12, generator=generator),
        torch.randint(0, 5, (SAMPLES,), generator=generator),
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 31), nn.BatchNorm1d(31), nn.ReLU(), nn.Dropout(0.3), nn.Linear(31, 5)
    )
    if unused:
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    kinds = {
        "adam": lambda: torch.optim.AdamW(model.parameters(), lr=0.01),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    }
    chosen = kinds[optimizer]()
    schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 0.9**step)
    return Job(
        model=model,
        optimizer=chosen,
        loss=noisy_loss,
        train_data=(x, y),
        eval_data=(x[:11], y[:11]),
        metrics=metrics,
        schedule=schedule,
        clip_norm=0.5,
        eval_batch=3,
    )


def train(comm: Comm, run_dir: Path, job: dict[str, Any], **settings: Any) -> dict[str, Any]:
    base = {
        "epochs": 2,
        "global_batch": GLOBAL_BATCH,
        "microbatch": MICROBATCH,
        "sync": "exact",
        "progress": False,
    }
    return (
        Trainer(make_job(**job), Settings(run_dir=run_dir, **{**base, **settings}), comm=comm)
        .fit()
        .as_json()
    )


def alone() -> Comm:
    return Comm(World(), torch.device("cpu"))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("job", "settings"),
    [
        ({}, {}),
        pytest.param(
            {"optimizer": "sgd", "unused": True}, {"precision": "bf16"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"optimizer": "sgd"}, {"precision": "fp16", "warmup_steps": 3}, marks=pytest.mark.slow
        ),
    ],
    ids=["adam-fp32", "sgd-bf16-unused-parameter", "sgd-fp16-scaler-warmup"],
)
def test_any_number_of_processes_gives_the_same_bits(
    tmp_path: Path, job: dict, settings: dict
) -> None:
    """Weights, and the bytes of metrics.jsonl. On 8 ranks the short last batch leaves one without
    samples.
    """
    single = train(alone(), tmp_path / "1", job, **settings)
    log = (tmp_path / "1" / "metrics.jsonl").read_bytes()
    for ranks in (2, 3, 5, 8):
        results = run_ranks(train_exact_job, ranks, tmp_path / str(ranks), job, settings)
        assert {r["weights_sha256"] for r in results} == {single["weights_sha256"]}, (
            f"{ranks} ranks"
        )
        assert (tmp_path / str(ranks) / "metrics.jsonl").read_bytes() == log, f"{ranks} ranks"


def train_exact_job(comm: Comm, run_dir: Path, job: dict, settings: dict) -> dict[str, Any]:
    return train(comm, run_dir, job, **settings)


def leaves_after(comm: Comm, steps: int) -> int:
    """How many leaves rank 0 holds after so many steps of one microbatch, which is never its own."""
    model = nn.Linear(3, 1)
    sync = ExactSync(model, comm, 1)
    for _ in range(steps):
        first, count = split_evenly(1, comm.world.rank, comm.world.world_size)
        sync.begin(first, count - first, 1)
        if count > first:
            sync.backward(model(torch.ones(2, 3)).sum(), 2, torch.zeros(1))
        sync.finish(2 * (count - first), [])
    return len(sync.buckets[0].views_by_leaf)


@pytest.mark.ranks
def test_steps_without_a_share_take_no_memory() -> None:
    assert run_ranks(leaves_after, 2, 5) == [0, 1]


@pytest.mark.ranks
def test_a_run_that_changes_size_at_every_stop_gives_the_bits_of_the_unbroken_one(
    tmp_path: Path,
) -> None:
    complete = train(alone(), tmp_path / "whole", {})
    for steps, ranks in [(1, 2), (2, 4), (4, 3), (5, 8)]:
        run_ranks(train_exact_job, ranks, tmp_path / "parts", {}, {"steps": steps})
    last = train(alone(), tmp_path / "parts", {})
    assert last["weights_sha256"] == complete["weights_sha256"]
    assert last["train_loss"] == complete["train_loss"]
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "metrics.jsonl"
    ).read_bytes()
    results = audit(tmp_path / "parts")
    assert results.ok and results.attempts == 5, results.problems


class Counting(nn.Linear):
    """Changes its buffer `seen` from the microbatch `first` on, as `how` says."""

    seen: torch.Tensor

    def __init__(self, first: int, how: str) -> None:
        super().__init__(12, 5)
        self.first = first
        self.how = how
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls >= self.first:
            if self.how == "in place":
                self.seen += len(x)
            elif self.how == "another tensor":
                self.seen = self.seen + len(x)
            elif self.how == "data":
                self.seen.data.add_(len(x))
            else:
                self.seen.copy_(self.seen.clone())  # written, with the value that it has
        self.calls += 1
        return super().forward(x)


class CountingEntry(nn.Linear):
    """Has what changes in its state_dict alone."""

    seen = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(x)
        return super().forward(x)

    def get_extra_state(self) -> torch.Tensor:
        return self.seen

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state


def train_counting(run_dir: Path, model: nn.Module) -> dict[str, Any]:
    """Six steps of two microbatches of four."""
    job = Job(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=noisy_loss,
        train_data=(torch.randn(48, 12), torch.zeros(48, dtype=torch.long)),
    )
    settings = Settings(run_dir=run_dir, global_batch=8, microbatch=4, sync="exact", progress=False)
    return Trainer(job, settings, comm=alone()).fit().as_json()


@pytest.mark.parametrize("how", ["in place", "another tensor", "data"])
@pytest.mark.parametrize("first", [0, 7], ids=["from the start", "in a later step"])
def test_a_buffer_that_forward_changes_is_refused_by_name(
    tmp_path: Path, first: int, how: str
) -> None:
    with pytest.raises(InputError, match="forward changes the buffer seen"):
        train_counting(tmp_path / "run", Counting(first, how))
    assert not list((tmp_path / "run" / "snapshots").glob("step_*")), (
        "what it had changed was not saved"
    )


def test_an_entry_of_the_state_dict_that_forward_changes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="forward changes the buffer _extra_state"):
        train_counting(tmp_path, CountingEntry(12, 5))


def grow(model: nn.Module) -> None:
    model.share = torch.cat([model.share.reshape(-1), torch.ones(1)])


@pytest.mark.parametrize(
    ("persistent", "move", "refused"),
    [
        (True, lambda model: model.share.mul_(0.5), None),
        (False, lambda model: model.share.mul_(0.5), "a step changes the buffer share, which no"),
        (True, grow, "a step changes the shape of the buffer share, which no resume"),
    ],
    ids=["saved", "not saved", "grows"],
)
def test_a_hook_of_the_step_may_move_a_buffer_that_snapshots_have(
    tmp_path: Path, persistent: bool, move: Callable[[nn.Module], None], refused: str | None
) -> None:
    model = nn.Linear(12, 5)
    model.register_buffer("share", torch.ones(()), persistent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: move(model))
    data = (torch.randn(48, 12), torch.zeros(48, dtype=torch.long))
    settings = Settings(tmp_path, global_batch=8, microbatch=4, sync="exact", progress=False)
    trainer = Trainer(Job(model, optimizer, noisy_loss, data), settings, comm=alone())
    if refused is None:
        assert trainer.fit().as_json()["steps"] == 6
        assert model.share == 0.5**6
    else:
        with pytest.raises(InputError, match=refused):
            trainer.fit()


def test_a_buffer_may_be_written_with_the_value_that_it_has(tmp_path: Path) -> None:
    assert train_counting(tmp_path / "run", Counting(0, "same"))["steps"] == 6


def test_another_number_of_threads_on_resume_is_refused(tmp_path: Path) -> None:
    train(alone(), tmp_path / "run", {}, steps=1)
    with pytest.raises(InputError, match="threads=1, now it is 2"):
        train(alone(), tmp_path / "run", {}, threads=2)


def test_deterministic_mode_ends_with_the_run(tmp_path: Path) -> None:
    train(alone(), tmp_path / "run", {}, steps=1)
    assert not torch.are_deterministic_algorithms_enabled()
