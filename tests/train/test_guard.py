"""The guard names the first tensor that ranks do not share, who is odd, and why; equal replicas
pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from processes import JOBS, refused, run
from ranks import run_ranks
from stepladder import Comm, InputError, Job, Plan, Settings, Trainer
from stepladder.core.world import World
from stepladder.train.fingerprints import find_minority, fingerprint, fingerprint_order
from stepladder.train.process_group import process_group
from stepladder.train.replica_check import ReplicaCheck, ReplicasDiffer, validate_finite_weights

PLANTS = {
    "nothing": None,
    "weight": ("parameter", "2.weight", "parameter 2.weight", "updated outside the optimizer"),
    "start": ("parameter", "0.bias", "parameter 0.bias", "initialised by rank"),
    "buffer": ("buffer", "1.running_mean", "buffer 1.running_mean", "forward changes"),
    "optimizer": ("optimizer", "exp_avg_sq of 2.bias", "optimizer exp_avg_sq of 2.bias", "optimizer state"),
    "rate": (
        "learning rate", "learning rate of group 0", "learning rate of group 0", "learning rate set by rank",
    ),
    "weight and rate": ("parameter", "0.weight", "parameter 0.weight", "learning rate set by rank"),
    "order": ("data order", "data order of the epoch", "data order of the epoch", "rank-seeded shuffle"),
    "frozen": ("set of tensors", "set of tensors", "set of tensors", "built by rank"),
}  # what is planted: the kind, the tensor's name, how the message calls it, part of the cause  # fmt: skip


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """After one step of Adam, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def plant(fault: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        if fault == "weight":
            model[2].weight[1, 3] += 1e-6
            model[2].bias[0] = 7
        elif fault == "start":
            model[0].bias.zero_()
        elif fault == "buffer":
            model[1].running_mean[0] = -0.5
        elif fault == "optimizer":
            optimizer.state[model[2].bias]["exp_avg_sq"][1] *= 2
        elif fault == "rate":
            optimizer.param_groups[0]["lr"] = 0.2
        elif fault == "weight and rate":
            model[0].weight[0, 0] = 0
            optimizer.param_groups[0]["lr"] = 0.2
        elif fault == "frozen":
            del optimizer.state[model[0].weight]


def checked(comm: Comm, fault: str, odd: int, first: bool) -> tuple[Any, ...] | None:
    """What the guard raises where `what` is planted on rank `odd`."""
    model, optimizer = trained()
    guard = ReplicaCheck(model, optimizer, comm)
    seed = 1 if fault == "order" and comm.world.rank == odd else 0
    if not first:
        guard.check(3, b"12345678")
    if comm.world.rank == odd:
        plant(fault, model, optimizer)
    try:
        guard.check(4, fingerprint_order(Plan(10, 4, 2, seed), 0))
    except ReplicasDiffer as error:
        return error.at, error.kind, error.tensor, error.ranks, error.cause, str(error)
    return None


def all_checked(comm: Comm, odd: int) -> dict[str, Any]:
    return {fault: checked(comm, fault, odd, fault == "start") for fault in PLANTS}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world_size, odd", [(2, 1), (3, 0), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_the_first_differing_tensor_is_named_with_its_rank_and_cause(
    world_size: int, odd: int
) -> None:
    for rank, outcome in enumerate(run_ranks(all_checked, world_size, odd)):
        assert outcome.pop("nothing") is None
        for fault, (step, kind, tensor, ranks, cause, text) in outcome.items():
            expected = PLANTS[fault]
            assert expected is not None
            assert (step, kind, tensor, ranks) == (4, *expected[:2], [odd]), (
                f"{fault} seen by rank {rank}"
            )
            assert expected[3] in cause
            expected_text = f"after step 4, {expected[2]} of rank {odd} differs from the others'. Likely cause: "
            assert text == expected_text + cause


def test_alone_there_is_nothing_to_compare() -> None:
    with process_group(World(), torch.device("cpu")) as comm:
        assert checked(comm, "weight", 0, True) is None


def test_every_bit_and_the_shape_of_a_tensor_count() -> None:
    values = [
        torch.zeros(4), -torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(0), torch.tensor(0.0), torch.tensor(True), 0.0, 0, "0.0", None,
    ]  # fmt: skip
    assert len({fingerprint(value) for value in values}) == len(values)
    grid = torch.arange(24.0).view(1, 2, 3, 4)
    assert fingerprint(grid) == fingerprint(grid.contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    "values, odd",
    [("aaa", []), ("aba", [1]), ("baa", [0]), ("ab", [1]), ("abc", [1, 2]), ("abb", [0])],
)
def test_the_most_common_value_is_right_and_rank_0s_where_there_is_none(
    values: str, odd: list[int]
) -> None:
    assert find_minority([value.encode() for value in values]) == odd


# -- in training -----------------------------------------------------------------------------------


def trained_by(comm: Comm, run_dir: Path, fault: str, **settings: Any) -> dict[str, Any] | str:
    """The result of 5 steps, or the guard's word. `what` happens on rank 1 while it trains, in step
    3.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    rate = 0.1 * (1 + comm.world.rank) if fault == "rate" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    passes = []

    def loss(model: Any, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        passes.append(1)
        if len(passes) == 3 and comm.world.rank == 1 and fault == "weight":
            with torch.no_grad():
                model[0].weight[0, 0] += 1
        x, y = batch
        return F.mse_loss(model(x), y, reduction="sum"), len(x)

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    job = Job(model, optimizer, loss, (x, x.sum(1, keepdim=True)))
    seed = comm.world.rank if fault == "order" else 0
    run_settings = Settings(run_dir, global_batch=8, seed=seed, progress=False, **settings)
    try:
        return Trainer(job, run_settings, comm=comm).fit().as_json()
    except (ReplicasDiffer, InputError) as error:
        return str(error)


def all_trained(comm: Comm, folder: Path) -> dict[str, Any]:
    runs = {
        "one pass": {"guard_every": 1}, "microbatches": {"guard_every": 2, "microbatch": 2},
        "exact": {"guard_every": 1, "sync": "exact"},
    }  # fmt: skip
    outcome = {
        name: trained_by(comm, folder / name, "nothing", **run_settings)
        for name, run_settings in runs.items()
    }
    for fault in ("rate", "weight", "order"):
        outcome[fault] = trained_by(comm, folder / fault, fault, guard_every=2, snapshot_every=1)
    outcome["unguarded"] = trained_by(comm, folder / "unguarded", "weight")
    return outcome


@pytest.mark.ranks
def test_training_stops_where_replicas_differ_and_not_before(tmp_path: Path) -> None:
    for outcome in run_ranks(all_trained, 2, tmp_path):
        assert [
            outcome[name]["steps"] for name in ("one pass", "microbatches", "exact", "unguarded")
        ] == [5] * 4
        assert outcome["rate"].startswith(
            "after step 0, learning rate of group 0 of rank 1 differs"
        )
        assert outcome["weight"].startswith("after step 4, parameter 0.weight of rank 1 differs")
        assert outcome["order"].startswith("seed is 0 on rank 0, and 1 on rank 1")
    assert not (tmp_path / "weight" / "snapshots" / "step_00000004").exists(), "kept what differs"


def test_the_guard_costs_a_settings_line_and_no_resume(tmp_path: Path) -> None:
    with process_group(World(), torch.device("cpu")) as comm:
        trained_by(comm, tmp_path / "run", "nothing", steps=2)
        result = trained_by(comm, tmp_path / "run", "nothing", guard_every=1)
    assert isinstance(result, dict) and result["resumed_from_step"] == 2
    with pytest.raises(InputError, match="--guard-every 0"):
        Settings(tmp_path, guard_every=0)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("uneven", "outcome"), [("more", "41 samples against 40"), ("other", "other values")]
)
def test_ranks_that_see_different_data_are_refused_before_anything_is_written(
    uneven: str, outcome: str, tmp_path: Path
) -> None:
    done = run("train", JOBS / "uneven.py", "--nproc", 2, cwd=tmp_path, env={"UNEVEN": uneven})
    refused(done, f"rank 1 sees other training data than rank 0: {outcome}", "stepladder data info")
    assert not (tmp_path / "runs").exists()


def test_weights_of_one_byte_are_finite_or_not() -> None:
    model = nn.ParameterList(
        nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)
        for dtype in (torch.int8, torch.float8_e5m2)
    )
    validate_finite_weights(model, 1)
    model[1].data = torch.tensor([1.0, float("inf")]).to(torch.float8_e5m2)
    with pytest.raises(InputError, match="the weights of 1 are not finite"):
        validate_finite_weights(model, 1)
