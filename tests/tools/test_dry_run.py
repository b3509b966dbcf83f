"""`train --dry-run` prints a run's definition and its memory; it trains and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import stepladder.cli
from pages import documented_keys
from processes import JOBS
from ranks import run_ranks
from stepladder import Job, Settings, World
from stepladder.rank.preemption import StopSignals
from stepladder.tools.dry_run import Estimate, advise
from stepladder.train.comm import Comm
from stepladder.train.determinism import deterministic
from stepladder.train.fake_tensors import FakeModelBuilder
from stepladder.train.job import Recipe
from stepladder.train.memory_estimate import FakeComm, FakeSession, MemoryEstimate, estimate_memory
from stepladder.train.run_spec import RunSpec
from stepladder.train.trainer import TrainingLoop

WIDTH = 256
ROWS = 64


def build() -> Job:
    """Return a job with tied and copied weights, batch norm and an embedding."""
    torch.manual_seed(0)
    last = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(
        nn.Embedding(500, WIDTH),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.1),
        last,
        deepcopy(last),
    )
    model[7].weight = model[5].weight

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), int((y >= 0).sum())

    data = torch.randint(500, (ROWS, 4)), torch.randint(WIDTH, (ROWS,))
    return Job(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, data, clip_norm=1.0)


def build_blocks() -> Job:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(x).square().sum(), len(x)

    return Job(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, torch.ones(ROWS, WIDTH))


def settings_of(sync: Literal["ddp", "exact"], folder: Path) -> Settings:
    microbatch = 8 if sync == "exact" else None
    return Settings(folder / "run", sync=sync, microbatch=microbatch, global_batch=32, threads=1)


def estimated(
    settings: Settings, size: int = 1, build: Callable[[], Job] = build
) -> MemoryEstimate:
    fake_builder = FakeModelBuilder()
    comm = FakeComm(World(size - 1, size, size - 1, size), shares_memory=True)
    return estimate_memory(
        fake_builder, RunSpec.make(fake_builder.build(build), settings, Recipe(), comm), comm
    )


def measured(comm: Comm, settings: Settings, build: Callable[[], Job]) -> int:
    """The most bytes that torch's allocator had given out in two steps, without the job's data."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        spec = RunSpec.make(build(), settings, Recipe(), comm)
        session: Any = FakeSession(spec, comm)
        with (
            deterministic(settings.sync == "exact", comm.device),
            TrainingLoop(session, StopSignals()) as loop,
        ):
            for _ in range(2):
                loop.step()
    current = 0
    peak = 0
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize("sync", ["ddp", "exact"])
def test_computed_is_near_what_is_measured(sync: Literal["ddp", "exact"], tmp_path: Path) -> None:
    settings = settings_of(sync, tmp_path)
    computed = estimated(settings)
    assert computed.peak == pytest.approx(
        measured(Comm(World(), torch.device("cpu")), settings, build), rel=0.1
    )
    assert not list(tmp_path.iterdir())


def test_a_subgroup_needs_no_other_process() -> None:
    comm = FakeComm(World(3, 4, 3, 4), shares_memory=True)
    half = comm.make_subgroup([rank < 2 for rank in range(4)])
    assert (half.world.rank, half.world.world_size) == (1, 2)
    half.all_gather(torch.empty(2), torch.ones(1)).wait()


@pytest.mark.slow
def test_parts_are_those_of_the_model(tmp_path: Path) -> None:
    settings = settings_of("ddp", tmp_path)
    unsharded = estimated(settings, 2)
    sharded = estimated(replace(settings, shard="optimizer"), 2)
    job = build()
    parameters = sum(p.nbytes for p in job.model.parameters())
    assert unsharded.weights == parameters + sum(b.nbytes for b in job.model.buffers())
    assert unsharded.data == sum(t.nbytes for t in job.train_data)
    assert (
        2 * parameters < unsharded.optimizer < 2.001 * parameters
    )  # with a count of steps for each
    assert sharded.optimizer == pytest.approx(unsharded.optimizer / 2, rel=0.01)
    with_copies = estimated(replace(settings, shard="optimizer", shard_copies=2), 4)
    assert with_copies.optimizer == pytest.approx(unsharded.optimizer / 2, rel=0.01)


PAST_FORWARD = """
from dataclasses import dataclass
import torch
from stepladder import Job

@dataclass
class Config:
    global_batch: int = 16

def build(config):
    model = torch.nn.Module()
    model.table = torch.nn.Embedding(64, 8)
    optimizer = torch.optim.Adam(model.parameters())
    def loss(model, rows):
        return model.table(rows).square().mean()
    return Job(model, optimizer, loss, torch.arange(64))
"""


@pytest.mark.slow
def test_a_loss_that_reads_weights_past_forward_has_figures_without_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(PAST_FORWARD)
    with pytest.raises(SystemExit, match=r"^0$"):
        stepladder.cli.main(["train", "job.py", "--dry-run", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {estimate["shard"] for estimate in result["memory"]} == {"none", "optimizer"}, result[
        "advice"
    ]
    with pytest.raises(SystemExit, match=r"^2$"):
        stepladder.cli.main(["train", "job.py", "--dry-run", "--nproc", "2", "--shard", "full"])
    assert "the loss uses weights where they are not gathered" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("sync", [pytest.param("ddp", marks=pytest.mark.slow), "exact"])
def test_full_is_computed_by_rows_and_leaves_no_group(
    sync: Literal["ddp", "exact"], tmp_path: Path
) -> None:
    settings = settings_of(sync, tmp_path)
    unsharded, rows = (estimated(replace(settings, shard=shard), 2) for shard in ("none", "full"))
    assert rows.weights == pytest.approx(unsharded.weights / 2, rel=0.02)
    assert rows.optimizer == pytest.approx(unsharded.optimizer / 2, rel=0.02)
    assert rows.peak < unsharded.peak and not torch.distributed.is_initialized()


@pytest.mark.slow
def test_full_is_computed_again_where_groups_have_other_names(tmp_path: Path) -> None:
    settings = replace(settings_of("exact", tmp_path), shard="full")
    first = estimated(settings, 2)
    # torch names groups by this count, which earlier groups have raised.
    torch.distributed.distributed_c10d._world.group_count += 3
    assert estimated(settings, 2) == first


@pytest.mark.ranks
def test_full_holds_its_share_of_everything_and_two_blocks(tmp_path: Path) -> None:
    settings = replace(settings_of("ddp", tmp_path), shard="full")
    ranks = 3
    peaks = run_ranks(measured, ranks, settings, build_blocks)
    weights = [param.numel() for param in build_blocks().model.parameters()]
    two_blocks = 8 * (sum(weights[:2]) + sum(weights[2:4]))  # their weights and gradients
    assert max(peaks) < 1.1 * (16 * sum(weights) / ranks + two_blocks)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("sync", [pytest.param("ddp", marks=pytest.mark.slow), "exact"])
def test_full_is_computed_near_what_is_measured(
    sync: Literal["ddp", "exact"], tmp_path: Path
) -> None:
    settings = replace(settings_of(sync, tmp_path), shard="full")
    ranks = 3  # the last has fewer rows
    peak = max(run_ranks(measured, ranks, settings, build_blocks))
    assert estimated(settings, ranks, build_blocks).peak == pytest.approx(peak, rel=0.05)


def test_weights_take_no_memory() -> None:
    def large() -> Job:
        layers_of_a_gb = (nn.Linear(2**14, 2**14, bias=False) for _ in range(512))
        model = nn.Sequential(*layers_of_a_gb)
        return Job(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda *_: torch.ones(()),
            torch.ones(8, 4),
        )

    job = FakeModelBuilder().build(large)
    assert job.optimizer.param_groups[0]["params"] == list(job.model.parameters())
    assert sum(p.nbytes for p in job.model.parameters()) == 512 * 2**30


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def typed(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            stepladder.cli.main(["train", str(JOBS / "plain.py"), *args])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    code, out, _ = typed(
        "--dry-run", "--json", "--nproc", "2", "--hidden", "300", "--device-memory", "20KB"
    )
    result = json.loads(out.splitlines()[-1])
    assert code == 0 and result["definition"]["hidden"] == 300 and result["steps"] == 1
    assert {(estimate["nproc"], estimate["shard"]) for estimate in result["memory"]} >= {
        (1, "none"),
        (2, "none"),
        (2, "optimizer"),
    }
    assert set(result) | set(result["memory"][0]) == documented_keys("A dry run")
    code, out, _ = typed("--dry-run", "--device-memory", "1GB")
    assert code == 0 and "learning rate 0.1" in out and "fits in 1 GB on 1 process\n" in out
    assert typed("--device-memory", "1GB")[2].startswith(
        "error: --device-memory without --dry-run. HINT: "
    )
    assert "'lots' is not an amount of memory" in typed("--dry-run", "--device-memory", "lots")[2]
    assert not list(tmp_path.iterdir())


@pytest.fixture
def each_warning() -> Iterator[None]:
    """Let torch repeat the warnings that it gives only once in a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.slow
@pytest.mark.usefixtures("each_warning")
@pytest.mark.filterwarnings("error:Accessing the data pointer")  # it would be noise on stderr
def test_the_command_has_figures_of_exact_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text((JOBS / "plain.py").read_text().replace("optim.SGD", "optim.AdamW"))
    flags = [
        "--hidden",
        "300",
        "--dry-run",
        "--json",
        "--nproc",
        "2",
        "--sync",
        "exact",
        "--shard",
        "full",
    ]
    with pytest.raises(SystemExit) as ended:
        stepladder.cli.main(["train", "job.py", *flags])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    state = {
        estimate["shard"]: estimate["optimizer"]
        for estimate in result["memory"]
        if estimate["nproc"] == 2
    }
    assert ended.value.code == 0 and set(state) == {"none", "optimizer", "full"}, result["advice"]
    assert 0 < state["full"] < state["none"]


@pytest.mark.parametrize(
    "fits, requested_size, shard, expected",
    [
        ({(1, "none"): 5, (2, "none"): 5}, 2, "none", "fits in 5e-09 GB on 2 processes"),
        (
            {
                (1, "none"): 9,
                (2, "none"): 9,
                (2, "optimizer"): 6,
                (4, "optimizer"): 5,
                (8, "optimizer"): 4,
            },
            1,
            "none",
            "does not fit in 5e-09 GB on 1 process: needs --shard optimizer on 4 or more processes",
        ),
        (
            {(1, "none"): 5, (2, "none"): 6},
            2,
            "none",
            "does not fit in 5e-09 GB on 2 processes: needs --shard none on 1 process",
        ),
        (
            {(1, "none"): 9, (2, "none"): 6},
            2,
            "none",
            "does not fit in 5e-09 GB, on up to 2 processes and with any --shard. HINT: ",
        ),
    ],
)
def test_what_to_type(
    fits: dict[tuple[int, str], int], requested_size: int, shard: str, expected: str
) -> None:
    estimates = [
        Estimate(nproc, name, MemoryEstimate(0, 0, 0, peak)) for (nproc, name), peak in fits.items()
    ]
    assert advise(estimates, requested_size, shard, 5).startswith(expected)
