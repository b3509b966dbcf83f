"""`--replay-every`: planted faults are found, and the rank that has them is named; what is sound is
left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from processes import JOBS, refused, run, train
from ranks import run_ranks
from stepladder import (
    Comm,
    InputError,
    Job,
    PeerLost,
    Recipe,
    Settings,
    Shards,
    World,
    write_shards,
)
from stepladder.core.errors import RanksDiffer
from stepladder.rank.preemption import StopSignals
from stepladder.storage.snapshot import hash_weights
from stepladder.train.determinism import deterministic
from stepladder.train.job_file import load_job_file
from stepladder.train.opening import open_session
from stepladder.train.process_group import process_group
from stepladder.train.recompute_check import RecomputeCheck
from stepladder.train.recompute_verdict import find_wrong_ranks
from stepladder.train.run_spec import RunSpec
from stepladder.train.trainer import TrainingLoop
from tasks import RANKS, said_by, tasks

KINDS = "product", "backward", "weight", "batch", "gradient"
MODES = "once", "sometimes", "always"
PLANTS = [(kind, mode) for kind in KINDS for mode in MODES]
SOME = [("product", "once"), ("product", "always"), ("weight", "once"), ("gradient", "once")]
FLAGS = "--sync", "exact", "--microbatch", 2, "--steps", 20, "--replay-every", 1
MLP = "mlp", "--sync", "exact", "--microbatch", 16, "--steps", 40
A = b"a"
B = b"b"
C = b"c"


@pytest.mark.parametrize(
    ("first", "rerun", "ranks", "right"),
    [
        ([(1, B), (2, A)], [A, A, A], [1], A),  # a fault that has passed, of the one that trained
        ([(1, A), (2, B)], [A, A, A], [2], A),  # of the one that replayed
        ([(1, B), (2, A)], [A, B, A], [1], A),  # one that lasts
        ([(1, B), (2, A)], [A, C, A, C, A], [1, 3], A),
        ([(0, A), (1, B)], [A, B, C], [0, 1], b""),
        ([(1, A), (2, B)], [A, A, B, B], [1, 2], b""),
        ([(0, A), (1, B)], [A, A], [1], A),
        ([(0, A), (1, B)], [B, B], [0], B),
        ([(0, A), (1, B)], [A, C], [1], A),
        ([(0, A), (1, B)], [C, B], [0], B),
        ([(0, A), (1, B)], [A, B], [0, 1], b""),  # two ranks that both repeat what they said
        ([(0, A), (1, B)], [B, C], [0, 1], b""),  # neither does
        ([(0, A), (0, B)], [A], [0], A),
        ([(0, A), (0, B)], [C], [0], b""),
    ],
)
def test_the_majority_is_right(
    first: Any, rerun: list[bytes], ranks: list[int], right: bytes
) -> None:
    assert find_wrong_ranks(first, rerun) == (ranks, right)


def test_it_takes_the_mode_in_which_bits_are_equal(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"--replay-every 10 with --sync ddp: .* HINT: --sync exact, or leave"
    ):
        Settings(tmp_path, replay_every=10)
    with pytest.raises(InputError, match="--replay-every 0 is too small"):
        Settings(tmp_path, replay_every=0, sync="exact")


# -- planted faults --------------------------------------------------------------------------------


@contextmanager
def loop_of(comm: Comm, job: Job, folder: Path, **options: Any) -> Iterator[TrainingLoop]:
    """A run's loop whose rank may fail, and leave the group as it is."""
    settings = Settings(
        folder / "run",
        sync="exact",
        threads=1,
        progress=False,
        lock_wait=0,
        **{"global_batch": 24, "microbatch": 2} | options,
    )
    with ExitStack() as stack:
        session = stack.enter_context(
            open_session(RunSpec.make(job, settings, Recipe(), comm), comm)
        )
        stack.enter_context(deterministic(True, comm.device))
        yield stack.enter_context(TrainingLoop(session, StopSignals()))


def struck(comm: Comm, folder: Path, plant: tuple[str, str, int]) -> tuple[str, str, int, str]:
    """How this rank ends: the error's type and text, after how many steps, with which weights."""
    job_file: Any = load_job_file(JOBS / "corrupts.py")
    job_file.KIND, job_file.MODE, odd = plant
    job_file.STEP, job_file.FAULT, job_file.PLANTED = 3, job_file.Fault(), folder / "planted"
    job = job_file.build(job_file.Config())
    try:
        with pytest.MonkeyPatch.context() as patch:
            if comm.world.rank == odd:
                patch.setattr(TrainingLoop, "_run_pass", job_file.faulty_pass)
                patch.setattr("stepladder.train.sync.exact.TreeBucket.push", job_file.faulty_push)
            with loop_of(comm, job, folder, steps=12, epochs=3, replay_every=1) as loop:
                while not loop.session.is_over:
                    loop.step()
    except (RanksDiffer, PeerLost) as error:
        return type(error).__name__, str(error), error.step, hash_weights(job.model)
    return "", "", loop.state.step, hash_weights(job.model)


def all_struck(
    comm: Comm, folder: Path, odd: int, plants: list[tuple[str, str]]
) -> dict[tuple[str, str], tuple[str, str, int, str]]:
    results = {}
    for kind, mode in [("none", "never"), *plants]:
        if comm.world.is_first:
            (folder / f"{kind}-{mode}").mkdir()
        comm.gather_bytes(b".")
        results[kind, mode] = struck(comm, folder / f"{kind}-{mode}", (kind, mode, odd))
    return results


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "odd", "plants"),
    [
        (3, 1, SOME),
        *(
            pytest.param(*case, PLANTS, marks=pytest.mark.slow)
            for case in ((2, 0), (2, 1), (3, 0), (3, 2), (4, 3))
        ),
    ],
)
def test_whatever_is_planted_is_found_and_named(
    world_size: int, odd: int, plants: list[tuple[str, str]], tmp_path: Path
) -> None:
    results = run_ranks(all_struck, world_size, tmp_path, odd, plants)
    before = results[0].pop(("none", "never"))
    assert before[:3] == ("", "", 12)
    for plant in results[0]:
        ends = [item[plant] for item in results]
        kinds = [end[0] for end in ends]
        texts = [end[1] for end in ends]
        assert "" not in kinds and len({end[2] for end in ends}) == 1, f"{plant}: {ends}"
        if "Corrupt" in kinds:
            assert [rank for rank, kind in enumerate(kinds) if kind == "Corrupt"] == [odd], (
                f"{plant}: {ends}"
            )
            assert (
                f"rank {odd} on " in texts[odd]
                and ". HINT: " in texts[odd]
                and "\n" not in texts[odd]
            )
        else:
            assert world_size == 2 and kinds == ["RanksDiffer", "PeerLost"], f"{plant}: {ends}"
            assert "cannot tell which is wrong" in texts[0] or "no majority" in texts[0]
    text = {plant: "".join(item[plant][1] for item in results) for plant in SOME}
    assert "first.weight differs too" in text["weight", "once"]
    assert "the gradient of last.bias" in text["gradient", "once"]
    assert "is right: a transient fault" in text["product", "once"]
    if world_size > 2:
        assert "wrong again: a permanent fault" in text["product", "always"]


def until_found(comm: Comm, folder: Path) -> list[tuple[str, int, str]]:
    """Weights where a fault is found, and after as many steps without it."""
    (folder / f"{comm.world.rank}").mkdir()
    _, _, step, weights = struck(comm, folder, ("gradient", "once", 1))
    job_file: Any = load_job_file(JOBS / "corrupts.py")
    job_file.KIND = "none"
    job = job_file.build(job_file.Config())
    with loop_of(comm, job, folder / f"{comm.world.rank}", steps=12, epochs=3) as loop:
        while loop.state.step < step - 1:
            loop.step()
    return [("found", step, weights), ("clean", step, hash_weights(job.model))]


@pytest.mark.ranks
def test_a_wrong_gradient_moves_no_weight_on_any_rank(tmp_path: Path) -> None:
    for (_, step, weights), (_, _, clean) in run_ranks(until_found, 2, tmp_path):
        assert step == 3 and weights == clean


def test_one_process_finds_what_passes_in_its_own_work(tmp_path: Path) -> None:
    with process_group(World(), torch.device("cpu")) as comm:
        for mode, kind in (("once", "Corrupt"), ("always", "")):
            (tmp_path / mode).mkdir()
            assert struck(comm, tmp_path / mode, ("product", mode, 0))[0] == kind


# -- sound jobs ------------------------------------------------------------------------------------


class Drawn(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Augmented by torch's generator; NumPy's is drawn from by the loss, which is seeded with the
    last sample.
    """

    def __len__(self) -> int:
        return 46

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(0, 1, 6) * index + torch.rand(6)
        return x, x.sum().sin().reshape(1)


def drawing_loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum") * (1 + np.random.rand()), len(x)


class Odd(nn.Module):
    """A layer without a gradient, one whose weight is used twice, one in channels_last, and batch
    norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.twice = nn.Linear(6, 6)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(x)).reshape(-1, 3, 1, 2).expand(-1, -1, 2, -1)
        return self.last(self.drop(self.norm(self.conv(x))).flatten(1))


def sound_jobs(shards: Path) -> dict[str, Job]:
    torch.manual_seed(0)
    plain, worked, read = (
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(3)
    )
    odd = Odd()
    x = torch.randn(46, 6, generator=torch.Generator().manual_seed(1))
    tensors = x, x.sum(1, keepdim=True)

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    return {
        "drawn": Job(plain, adam(plain), drawing_loss, Drawn()),
        "odd layers": Job(odd, adam(odd), load_loss(), tensors, clip_norm=1.0),
        "workers": Job(worked, adam(worked), load_loss(), Drawn(), num_workers=2),
        "shards": Job(read, adam(read), load_loss(), Shards(shards, columns=("x", "y"))),
    }


def load_loss() -> Any:
    job_file: Any = load_job_file(JOBS / "corrupts.py")
    return job_file.loss


def weights_of_sound_jobs(
    comm: Comm, folder: Path, shards: Path, names: list[str], every: int | None
) -> dict[str, str]:
    """46 samples in batches of 16 and microbatches of 2: the last step has 7, fewer than some
    ranks' shares. Random numbers left after the last pass are nobody's: each pass has a seed.
    """
    np.random.seed(comm.world.rank)  # else each process may draw a seed of its own from the system
    results = {}
    for name, job in sound_jobs(shards).items():
        if name not in names:
            continue
        options: Any = {"global_batch": 16, "epochs": 3, "replay_every": every}
        with loop_of(comm, job, folder / name, **options) as loop:
            while not loop.session.is_over:
                loop.step()
        results[name] = hash_weights(job.model)
    return results


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, ["odd layers"]),
        pytest.param(3, ["drawn", "odd layers", "shards"], marks=pytest.mark.slow),
        pytest.param(2, ["workers"], marks=pytest.mark.slow),
    ],
)
def test_a_sound_job_ends_with_the_same_weights(
    world_size: int, names: list[str], tmp_path: Path
) -> None:
    x = np.random.default_rng(0).normal(size=(46, 6)).astype(np.float32)
    shards = write_shards(
        ({"x": row, "y": row[:1]} for row in x), tmp_path / "s", chunk_rows=4
    ).parent
    plain, *replayed = (
        run_ranks(weights_of_sound_jobs, world_size, tmp_path / f"{every}", shards, names, every)
        for every in (None, 1)
    )
    assert replayed == [plain]


def test_each_microbatch_has_its_turn(tmp_path: Path) -> None:
    job_file: Any = load_job_file(JOBS / "corrupts.py")
    job = job_file.build(job_file.Config())
    with ExitStack() as at_end:
        comm = at_end.enter_context(process_group(World(), torch.device("cpu")))
        loop = at_end.enter_context(loop_of(comm, job, tmp_path, epochs=100, replay_every=3))
        check, *_ = loop.listeners
        assert isinstance(check, RecomputeCheck)
        due = [step for step in range(300) if check.is_due(step)]
        chosen = [check._choose_microbatch(step, 0) for step in due]
    assert due[:2] == [2, 5]
    assert {span.number for span in chosen if span} == set(range(12))


# -- as processes ----------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_the_bits_of_a_run_do_not_depend_on_it(nproc: int, tmp_path: Path) -> None:
    without = train(*MLP, "--run-dir", "without", cwd=tmp_path)
    replayed = train(*MLP, "--replay-every", 1, "--nproc", nproc, "--run-dir", "with", cwd=tmp_path)
    assert replayed["weights_sha256"] == without["weights_sha256"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "nproc", "flags", "message"),
    [
        ("product once 1 6", 3, (), "stepladder: in-place recovery: continuing with 2 processes"),
        ("weight once 1 6", 2, (), "restarting all ranks from the last snapshot"),  # unknown who
        (
            "weight once 1 6",
            3,
            ("--on-loss", "restart"),
            "restarting all ranks from the last snapshot",
        ),
    ],
)
def test_a_run_whose_wrong_rank_has_left_ends_with_the_right_weights(
    plant: str, nproc: int, flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    args = "train", JOBS / "corrupts.py", *FLAGS
    right = train(*args[1:], "--run-dir", "right", cwd=tmp_path)["weights_sha256"]
    done = run(
        *args,
        *flags,
        "--nproc",
        nproc,
        "--run-dir",
        "run",
        "--json",
        cwd=tmp_path,
        env={"PLANT": plant},
    )
    assert done.returncode == 0 and message in done.stderr, done.stderr
    assert right in done.stdout and "Traceback" not in done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_a_defect_that_lasts_ends_the_run(tmp_path: Path) -> None:
    env = {"PLANT": "product always 1 6"}
    done = run(
        "train",
        JOBS / "corrupts.py",
        *FLAGS,
        "--nproc",
        3,
        "--on-loss",
        "restart",
        cwd=tmp_path,
        env=env,
    )
    assert done.returncode == 1
    results = [
        line
        for line in done.stderr.splitlines()
        if "rank 1 on " in line and "a permanent fault" in line
    ]
    assert len(results) == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.endswith("stepladder: not restarted: the same step failed twice\n")


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_of_another_launcher_say_it_in_one_line(tmp_path: Path) -> None:
    args = "train", JOBS / "corrupts.py", *FLAGS
    with tasks(tmp_path, *args, PLANT="product once 0 6") as ranks:
        assert [rank.end() for rank in ranks] == [1] * RANKS, said_by(ranks)
    assert said_by(ranks).count("rank 0 on ") == 1
    done = run(*args, cwd=tmp_path, env={"PLANT": "product once 0 6", "PLANTED": "alone"})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: rank 0 on ")
    assert (
        "--replay-every on 1 process: it repeats its own work, which detects transient faults,"
        " not a permanent defect" in done.stderr
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_the_flag_without_exact_mode_is_refused(tmp_path: Path) -> None:
    refused(
        run("train", "mlp", "--replay-every", 10, cwd=tmp_path), "--replay-every 10 with --sync ddp"
    )
    assert not list(tmp_path.iterdir())
