"""Gradients of any number of ranks are those of one process on the whole batch, whatever each rank
had to do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ranks import run_ranks
from stepladder.core.world import World
from stepladder.train.comm import Comm
from stepladder.train.sync import ddp as sync_module
from stepladder.train.sync import make_sync
from stepladder.train.sync.ddp import BucketedSync, make_fixed_buckets

STEPS = 3
SAMPLES = 8
SAMPLE_NUMBERS = torch.arange(SAMPLES)
Grads = dict[str, torch.Tensor | None]
ALONE = Comm(World(), torch.device("cpu"))

# Per rank, the sizes of its microbatches. A rank may have several, fewer than others, or none.
CUTS: dict[int, list[list[list[int]]]] = {
    2: [[[4], [4]], [[5], [3]], [[3, 3], [2]], [[2, 2, 4], []], [[], [8]]],
    3: [[[3], [3], [2]], [[2, 2], [1, 1], [2]], [[4, 4], [], []], [[1], [], [7]]],
}


class Branching(nn.Module):
    """Parameters of all kinds: used always, by one sample only, never, frozen, tied, of another
    dtype, layout.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.never = nn.Parameter(torch.ones(2))
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(12, 4).requires_grad_(False)
        self.trunk = nn.Linear(12, 4)
        self.tied = self.trunk.weight
        self.by_first = nn.Parameter(torch.randn(4))
        self.by_last = nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        h = self.conv(x).flatten(1)
        out = self.trunk(h) + self.frozen(h).tanh() + h @ self.tied.T
        if (numbers == 0).any():
            out = out + (numbers == 0)[:, None] * self.by_first
        if (numbers == SAMPLES - 1).any():
            out = out + (numbers == SAMPLES - 1)[:, None] * self.by_last
        return out * self.scale.float()


class Step(NamedTuple):
    """What a rank has after one step."""

    grads: Grads
    total_count: float
    votes: list[bool]
    extra: list[float] | None


def data_of(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 2, 3, 3, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A sum and its count, which is not the number of samples."""
    return model(x, numbers).square().sum(), float((1 + numbers % 3).sum())


def descend(model: nn.Module) -> Grads:
    """The gradients, after a step of plain descent along them; the next step begins without."""
    grads = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.05 * param.grad
            param.grad = None
    return grads


def single_process() -> list[Grads]:
    """The definition: one process, one pass over the whole batch, without any of our code."""
    model = Branching()
    result = []
    for step in range(STEPS):
        total, count = loss_of(model, data_of(step), SAMPLE_NUMBERS)
        (total / count).backward()
        result.append(descend(model))
    return result


def take_steps(comm: Comm, mode: str, cut: list[list[int]]) -> list[Step]:
    """The same steps on the ranks of `comm`, cut into microbatches as `cut` says."""
    model = Branching()
    rank = comm.world.rank
    order = [size for sizes in cut for size in sizes]
    first = sum(len(sizes) for sizes in cut[:rank])
    sync = make_sync(mode, model, comm, extra_size=2)
    result = []
    for step in range(STEPS):
        x = data_of(step)
        count = 0.0
        sync.begin(first, len(cut[rank]), len(order))
        for number in range(first, first + len(cut[rank])):
            where = slice(sum(order[:number]), sum(order[: number + 1]))
            total, counted = loss_of(model, x[where], SAMPLE_NUMBERS[where])
            sync.backward(total, counted, torch.tensor([float(order[number]), 1.0]))
            count += counted
        agreed = sync.finish(count, [rank == 0, rank == comm.world.world_size - 1, False])
        extra = None if agreed.extra is None else agreed.extra.tolist()
        result.append(Step(descend(model), agreed.total_count, agreed.votes, extra))
    sync.close()
    return result


def take_steps_of_all_cuts(comm: Comm, mode: str) -> list[list[Step]]:
    return [take_steps(comm, mode, cut) for cut in CUTS[comm.world.world_size]]


def assert_same(results: Grads, expected: Grads, where: str) -> None:
    for name, grad in expected.items():
        own_part = results[name]
        if grad is None or own_part is None:
            assert own_part is grad, f"{where}: {name} has grad {own_part}, expected {grad}"
        else:
            torch.testing.assert_close(
                own_part,
                grad,
                rtol=1e-5,
                atol=1e-6,
                msg=lambda text, name=name: f"{where}, {name}: {text}",
            )


@pytest.fixture(
    scope="module", params=[("manual", 2), ("manual", 3), ("ddp", 2), ("ddp", 3)], ids=str
)
def by_rank(request: pytest.FixtureRequest) -> list[list[list[Step]]]:
    """Per rank and cut the steps that it took."""
    mode, world_size = request.param
    return run_ranks(take_steps_of_all_cuts, world_size, mode)


def cuts_of(by_rank: list[Any]) -> list[list[list[int]]]:
    return CUTS[len(by_rank)]


@pytest.mark.ranks
def test_each_steps_gradients_are_those_of_one_process_on_the_whole_batch(
    by_rank: list[list[list[Step]]],
) -> None:
    expected = single_process()
    for rank, cuts in enumerate(by_rank):
        for cut, steps in zip(cuts_of(by_rank), cuts, strict=True):
            for number, step in enumerate(steps):
                assert_same(step.grads, expected[number], f"rank {rank}, cut {cut}, step {number}")


@pytest.mark.ranks
def test_all_ranks_have_the_same_bits(by_rank: list[list[list[Step]]]) -> None:
    for rank, cuts in enumerate(by_rank[1:], 1):
        for cut, steps, of_first in zip(cuts_of(by_rank), cuts, by_rank[0], strict=True):
            for step, first in zip(steps, of_first, strict=True):
                differ = [
                    n
                    for n, g in step.grads.items()
                    if g is not None and not torch.equal(g, first.grads[n])
                ]
                assert differ == [], f"rank {rank}, cut {cut}"


@pytest.mark.ranks
def test_a_parameter_used_by_one_rank_has_a_gradient_on_all_and_one_used_by_none_has_none(
    by_rank: list[list[list[Step]]],
) -> None:
    for rank, cuts in enumerate(by_rank):
        for steps in cuts:
            without = [name for name, grad in steps[0].grads.items() if grad is None]
            assert without == ["never", "frozen.weight", "frozen.bias"], f"rank {rank}"


@pytest.mark.ranks
def test_counts_and_extra_values_are_added_over_all_ranks(by_rank: list[list[list[Step]]]) -> None:
    for cuts in by_rank:
        for cut, steps in zip(cuts_of(by_rank), cuts, strict=True):
            microbatches = sum(map(len, cut))
            assert {(step.total_count, *(step.extra or ())) for step in steps} == {
                (15.0, 8.0, float(microbatches))
            }


@pytest.mark.ranks
def test_what_one_rank_votes_for_all_ranks_hear(by_rank: list[list[list[Step]]]) -> None:
    for cuts in by_rank:
        assert [step.votes for steps in cuts for step in steps] == [
            [True, True, False]
        ] * STEPS * len(cuts)


# -- buckets ---------------------------------------------------------------------------------------


def take_steps_in_small_buckets(comm: Comm, cut: list[list[int]]) -> tuple[int, list[Step]]:
    sync_module.BUCKET_BYTES = 150
    sync_module.FIRST_BUCKET_BYTES = 20
    return len(
        make_fixed_buckets([p for p in Branching().parameters() if p.requires_grad])
    ), take_steps(comm, "ddp", cut)


@pytest.mark.ranks
@pytest.mark.parametrize("cut", [[[2, 2], [3], [1]], [[3], [], [5]]], ids=str)
def test_many_buckets_give_what_one_gives(cut: list[list[int]]) -> None:
    """Where a rank's last microbatch does not use all parameters, its buckets fill in another
    order.
    """
    expected = single_process()
    for num_buckets, steps in run_ranks(take_steps_in_small_buckets, 3, cut):
        assert num_buckets >= 4
        for number, step in enumerate(steps):
            assert_same(step.grads, expected[number], f"step {number}")


def test_buckets_hold_each_parameter_once_backwards_and_one_dtype() -> None:
    params = [
        nn.Parameter(torch.zeros(n, dtype=d))
        for n, d in ((4, torch.float32), (2, torch.float64), (3, torch.float32))
    ]
    buckets = make_fixed_buckets(params)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[3], [2], [4]]


def test_the_first_bucket_is_small_so_that_it_starts_early_and_a_large_parameter_is_alone() -> None:
    quarter = sync_module.FIRST_BUCKET_BYTES // 16
    params = [nn.Parameter(torch.empty(quarter * n, device="meta")) for n in (1, 1, 400, 1, 2, 2)]
    assert [[p.numel() // quarter for p in bucket] for bucket in make_fixed_buckets(params)] == [
        [2, 2],
        [1],
        [400],
        [1, 1],
    ]


def leave_hooks(comm: Comm) -> list[torch.Tensor]:
    """Gradients of a plain backward after the sync was closed."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    sync = BucketedSync(model, comm)
    sync.begin(comm.world.rank, 1, 2)
    sync.close()
    model(torch.ones(1, 2) * (1 + comm.world.rank)).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.ranks
def test_a_closed_sync_leaves_the_model_as_it_was() -> None:
    for rank, (grad,) in enumerate(run_ranks(leave_hooks, 2)):
        assert grad.tolist() == [[1.0 + rank] * 2]


def is_given_to_gloo(_comm: Comm) -> bool:
    """Whether a collective that begins within backward would hold a Python object for gloo's
    threads to drop.
    """
    calls = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: calls.append(torch._C._is_key_in_tls("context")))
    x.sum().backward()
    return calls[0]


@pytest.mark.ranks
def test_gloo_s_threads_get_no_python_object_which_the_group_s_end_would_wait_for() -> None:
    """They need the GIL to drop it, and the group that waits for its threads may have it."""
    assert run_ranks(is_given_to_gloo, 2) == [False, False]


def count_nothing(comm: Comm, mode: str) -> list[torch.Tensor]:
    model = nn.Linear(2, 1)
    sync = make_sync(mode, model, comm)
    sync.begin(comm.world.rank, 1, 2)
    sync.backward(model(torch.ones(1, 2)).sum() * 0, 0.0)
    assert sync.finish(0.0, []).total_count == 0
    return [p.grad for p in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["manual", "ddp"])
def test_a_batch_that_counts_nothing_gives_zeros_not_nan(mode: str) -> None:
    for grads in run_ranks(count_nothing, 2, mode):
        assert [grad.abs().sum().item() for grad in grads] == [0.0, 0.0]


def exchange_within_halves(comm: Comm) -> tuple[int, float, list[float]]:
    rank = comm.world.rank
    half = comm.make_subgroup([rank < 2 for rank in range(comm.world.world_size)])
    total = torch.tensor([float(rank)])
    half.all_reduce(total).wait()
    gathered = torch.empty(half.world.world_size)
    half.all_gather(gathered, torch.tensor([float(rank)])).wait()
    return half.world.rank, total.item(), gathered.tolist()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_subgroup_adds_and_gathers_among_its_ranks() -> None:
    assert run_ranks(exchange_within_halves, 4) == [
        (0, 1.0, [0.0, 1.0]),
        (1, 1.0, [0.0, 1.0]),
        (0, 5.0, [2.0, 3.0]),
        (1, 5.0, [2.0, 3.0]),
    ]


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["manual", "ddp"])
@pytest.mark.parametrize("cut", [[8], [4, 4], [1, 5, 2]], ids=str)
def test_one_process_gives_the_same_in_one_pass_and_by_microbatch(
    mode: str, cut: list[int]
) -> None:
    expected = single_process()
    for number, step in enumerate(take_steps(ALONE, mode, [cut])):
        assert_same(step.grads, expected[number], f"step {number}")
        assert (step.total_count, step.extra, step.votes) == (
            15.0,
            [8.0, float(len(cut))],
            [True, True, False],
        )
