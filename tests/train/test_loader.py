"""`stepladder.Loader`: each sample once, a state of a few bytes, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from processes import run
from ranks import run_ranks
from stepladder import InputError, Loader, Plan, World
from stepladder.storage.audit import audit
from stepladder.train.comm import Comm

NUMBERS = torch.arange(22)
SIZE = 8  # of a global batch: 8, 8, 6
WORLDS = {size: [World(rank, size, rank, size) for rank in range(size)] for size in (1, 2, 3)}


def batches(loader: Loader, epochs: int = 1) -> list[list[int]]:
    return [batch.tolist() for _ in range(epochs) for batch in loader]


def join(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def planned(step: int, seed: int = 0) -> list[int]:
    plan = Plan(len(NUMBERS), SIZE, 1, seed)
    return [int(index) for span in plan.microbatches(step) for index in plan.indices(step, span)]


@pytest.mark.parametrize("size", WORLDS)
def test_ranks_share_each_step_of_the_plan(size: int) -> None:
    loaders = [Loader(NUMBERS, SIZE, world=world) for world in WORLDS[size]]
    shares = [batches(loader, epochs=2) for loader in loaders]
    together = [join(parts) for parts in zip(*shares, strict=True)]
    assert together == [planned(step) for step in range(6)]
    assert all(
        sorted(join(together[first:last])) == NUMBERS.tolist() for first, last in ((0, 3), (3, 6))
    )
    assert together[:3] != together[3:]
    assert {max(map(len, parts)) - min(map(len, parts)) for parts in zip(*shares, strict=True)} <= {
        0,
        1,
    }
    assert [len(loader) for loader in loaders] == [3] * size


@pytest.mark.parametrize("done", range(7))
def test_a_state_resumes_on_any_number_of_ranks(done: int) -> None:
    first = Loader(NUMBERS, SIZE, world=WORLDS[2][1])
    while first.step < done:
        next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 200
    shares = []
    for world in WORLDS[3]:
        loader = Loader(NUMBERS, SIZE, world=world)
        loader.load_state_dict(state)
        assert (loader.step, loader.epoch) == (done, done // 3)
        shares.append(batches(loader, epochs=2))
        assert loader.step == done - done % 3 + 6
    together = [join(parts) for parts in zip(*shares, strict=True)]
    assert together == [planned(step) for step in range(done, done + len(together))]


def test_a_loop_continues_behind_a_break() -> None:
    loader = Loader(NUMBERS, SIZE)
    given = []
    for batch in loader:
        given.append(batch.tolist())
        break
    assert given + batches(loader) == [planned(step) for step in range(3)]
    assert loader.epoch == 1
    iter(loader)  # takes nothing
    assert batches(loader)[0] == planned(3)


def test_of_two_loops_the_older_one_ends_with_an_error() -> None:
    loader = Loader(NUMBERS, SIZE)
    older = iter(loader)
    next(older)
    assert next(iter(loader)).tolist() == planned(1)
    with pytest.raises(RuntimeError, match="another loop"):
        next(older)
    assert loader.step == 2


def test_two_loaders_do_not_disturb_each_other() -> None:
    one = Loader(NUMBERS, SIZE)
    other = Loader(NUMBERS, SIZE, seed=1)
    pairs = [(x.tolist(), y.tolist()) for x, y in zip(one, other, strict=True)]
    assert pairs == [(planned(step), planned(step, seed=1)) for step in range(3)]


def test_the_mean_over_a_step_is_that_of_its_samples() -> None:
    sums = np.zeros(3)
    for world in WORLDS[3]:
        loader = Loader(NUMBERS.double(), SIZE, world=world)
        sums += [float(batch.sum()) / loader.step_samples for batch in loader]
    assert sums == pytest.approx([np.mean(planned(step)) for step in range(3)])


def test_the_last_batch_can_be_left_out(tmp_path: Path) -> None:
    loader = Loader(NUMBERS, SIZE, drop_last=True, run_dir=tmp_path / "run")
    assert batches(loader, epochs=2) == [planned(step) for step in (0, 1, 3, 4)]
    loader.close()
    result = audit(tmp_path / "run")
    assert result.ok
    assert [epoch.never_seen for epoch in result.epochs] == [6, 6]


class Rows:
    """A Source of 22 rows or more, in chunks of 5, which notes what is read."""

    def __init__(self, num_rows: int = len(NUMBERS), chunk_rows: int = 5) -> None:
        self.num_rows = num_rows
        self.chunk_edges = [*range(0, num_rows, chunk_rows), num_rows] if chunk_rows else None
        self.reads: list[list[int]] = []

    def __len__(self) -> int:
        return self.num_rows

    def read(self, indices: NDArray[np.int64]) -> torch.Tensor:
        self.reads.append(indices.tolist())
        return torch.from_numpy(indices)


def test_a_source_is_read_in_the_order_of_its_chunks(tmp_path: Path) -> None:
    first = Loader(Rows(), SIZE, run_dir=tmp_path / "run")
    given = [next(iter(first)).tolist() for _ in range(2)]
    state = first.state_dict()
    first.close()
    second = Loader(Rows(), SIZE, run_dir=tmp_path / "run")
    second.load_state_dict(state)
    given += batches(second)
    second.close()
    assert sorted(join(given)) == list(range(22))
    assert audit(tmp_path / "run").ok


def test_a_resume_reads_what_comes_next_and_nothing_before() -> None:
    rows = Rows(10**7, chunk_rows=0)
    loader = Loader(rows, 100)
    state = loader.state_dict()
    loader.load_state_dict({**state, "step": 90_000})
    first = next(iter(loader)).tolist()
    loader.close()
    assert rows.reads[0] == first
    assert len(rows.reads) <= 6


class Workers(Dataset[Any]):
    """Each item is its index, a random number, and the process that read it."""

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        return index, torch.rand(()).item(), os.getpid()


def test_workers_outlive_an_epoch_and_change_nothing() -> None:
    alone = Loader(Workers(), SIZE)
    loader = Loader(Workers(), SIZE, num_workers=2)
    pids = set()
    for _ in range(2):
        for ours, expected in zip(loader, alone, strict=True):
            assert ours[0].tolist() == expected[0].tolist()
            assert ours[1].tolist() == expected[1].tolist()
            pids |= set(ours[2].tolist())
    assert len(pids) == 2 and os.getpid() not in pids
    loader.close()
    assert not any(map(psutil.pid_exists, pids))
    assert next(iter(loader))[0].tolist() == planned(6)
    loader.close()


def test_a_script_that_closes_nothing_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom stepladder import Loader\n"
        "loader = Loader(list(range(22)), 8, num_workers=2)\n"
        "print(len(next(iter(loader))))\n"
    )
    done = run(script, cwd=tmp_path, command=(sys.executable,))
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


class Breaks(Dataset[int]):
    """Cannot read one item, until it is repaired."""

    broken = True

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: int) -> int:
        if self.broken and index == planned(1)[0]:
            raise OSError("no such image")
        return index


def test_an_error_of_the_data_takes_no_batch() -> None:
    data = Breaks()
    loader = Loader(data, SIZE)
    given = []
    with pytest.raises(OSError, match="no such image"):
        given += [batch.tolist() for batch in loader]
    assert loader.step == 1
    data.broken = False
    assert batches(loader) == [planned(1), planned(2)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 1}, r"seed=0, .* seed=1\. HINT: Loader\(\.\.\., seed=0\)"),
        ({"global_batch": 4}, "global_batch=8, .* global_batch=4"),
        ({"drop_last": True}, "drop_last=False, .* drop_last=True"),
        ({"data": torch.arange(23)}, "num_samples=22, .* num_samples=23. HINT: the data"),
        ({"data": Rows()}, "order='sort .* HINT: the data"),
    ],
)
def test_a_state_of_another_loader_is_refused(options: dict[str, Any], named: str) -> None:
    state = Loader(NUMBERS, SIZE).state_dict()
    loader = Loader(**{"data": NUMBERS, "global_batch": SIZE, **options})
    with pytest.raises(InputError, match=named):
        loader.load_state_dict(state)
    assert loader.step == 0


@pytest.mark.parametrize("state", [{}, {"step": -1, "attempt": 0}, {"step": "3", "attempt": 0}])
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=r"step=.*, not a number\. HINT: what a Loader's state_dict"
    ):
        Loader(NUMBERS, SIZE).load_state_dict(state)


def test_a_checkpoint_without_a_state_is_refused() -> None:
    checkpoint: dict[str, Any] = {}
    with pytest.raises(InputError, match="the Loader's state is a NoneType"):
        Loader(NUMBERS, SIZE).load_state_dict(checkpoint.get("loader"))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"num_workers": -1}, {"device": "gpu"}])
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InputError, match=f"{name}={options[name]!r}"):
        Loader(NUMBERS, SIZE, **options)


@pytest.mark.parametrize(
    ("num_samples", "options", "named"),
    [
        (22, {"global_batch": 2}, "2 samples .* for 3 ranks. HINT: global_batch=3 or more"),
        (17, {}, "1 samples .* for 3 ranks. HINT: drop_last=True"),
        (7, {"drop_last": True}, "drop_last leaves no batch"),
    ],
)
def test_a_rank_that_would_get_no_sample_is_refused(
    num_samples: int, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        Loader(
            torch.arange(num_samples), **{"global_batch": SIZE, "world": WORLDS[3][0], **options}
        )


# -- the ledger ------------------------------------------------------------------------------------


def test_what_was_given_after_the_state_is_superseded(tmp_path: Path) -> None:
    loader = Loader(NUMBERS, SIZE, run_dir=tmp_path / "run")
    batches(loader)
    state = loader.state_dict()
    batches(loader)
    loader.load_state_dict(state)
    batches(loader, epochs=2)
    loader.close()
    result = audit(tmp_path / "run")
    assert (result.ok, result.superseded, result.attempts) == (True, 3, 2)
    assert [epoch.never_seen for epoch in result.epochs] == [0, 0, 0]


def test_a_state_of_another_run_is_not_proved(tmp_path: Path) -> None:
    loader = Loader(NUMBERS, SIZE, run_dir=tmp_path / "one")
    batches(loader)
    other = Loader(NUMBERS, SIZE, run_dir=tmp_path / "other")
    other.load_state_dict(loader.state_dict())
    batches(other)
    loader.close()
    other.close()
    result = audit(tmp_path / "other")
    assert not result.ok and result.lost == 22
    assert "resumed from step 3, which no earlier attempt" in result.problems[0]


def test_a_run_dir_of_another_order_is_refused(tmp_path: Path) -> None:
    loader = Loader(NUMBERS, SIZE, run_dir=tmp_path / "run")
    next(iter(loader))
    loader.close()
    with pytest.raises(InputError, match="was begun with seed=0, and this Loader has 1"):
        next(iter(Loader(NUMBERS, SIZE, seed=1, run_dir=tmp_path / "run")))


def test_ranks_without_a_group_write_no_ledger(tmp_path: Path) -> None:
    loader = Loader(NUMBERS, SIZE, run_dir=tmp_path / "run", world=WORLDS[2][0])
    with pytest.raises(InputError, match=r"no process group.*init_process_group"):
        next(iter(loader))
    assert not (tmp_path / "run").exists()


def give(comm: Comm, path: Path, state: dict[str, Any] | None, steps: int) -> Any:
    loader = Loader(NUMBERS, SIZE, run_dir=path)
    if state is not None:
        loader.load_state_dict(state)
    try:
        while steps:
            next(iter(loader))
            steps -= 1
    except InputError as error:
        return str(error)
    loader.close()
    return loader.state_dict()


@pytest.mark.ranks
def test_ranks_agree_on_the_attempt_and_on_its_error(tmp_path: Path) -> None:
    path = tmp_path / "run"
    states = run_ranks(give, 2, path, None, 4)
    assert states[0] == states[1] and states[0]["attempt"] == 1
    run_ranks(give, 3, path, {**states[0], "step": 3}, 3)
    result = audit(path)
    assert (result.ok, result.superseded) == (True, 1)
    (path / "config.json").write_text("{}")
    errors = run_ranks(give, 2, path, None, 1)
    assert errors[0] == errors[1] and "is damaged" in errors[0]


@pytest.mark.parametrize(
    "wrong", [{"global_batch": 2.5}, {"global_batch": "8"}, {"num_workers": 1.5}]
)
def test_what_is_no_number_is_refused(wrong: dict[str, Any]) -> None:
    """With a batch of 2.5 a loop had no step, and no error."""
    with pytest.raises(InputError, match=f"{next(iter(wrong))}="):
        Loader(NUMBERS, **{"global_batch": SIZE, **wrong})


class Arrays:
    """A source of an array."""

    chunk_edges = None

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: NDArray[np.int64]) -> Any:
        return self.array[np.sort(indices)][::-1]


def test_an_array_from_its_end_on_is_one_of_tensors() -> None:
    for data in (np.arange(6)[::-1], Arrays(np.arange(6))):
        loader = Loader(data, 6)
        [batch] = loader
        loader.close()
        [values] = batch if isinstance(batch, list) else [batch]
        assert sorted(values.tolist()) == list(range(6))


@pytest.mark.parametrize("array", [np.arange(6, dtype=">i4"), np.zeros(6, np.longdouble)])
def test_an_array_of_no_type_of_torch_is_one_line(array: NDArray[Any]) -> None:
    with pytest.raises(InputError, match="cannot be tensors: "):
        Loader(array, 6)
    with pytest.raises(InputError, match="a batch of the job's Arrays holds an array of "):
        list(Loader(Arrays(array), 6))
