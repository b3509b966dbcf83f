"""What a job gives that is not what its docstring says: one line that names it, and no traceback."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from stepladder import InputError, Job, Settings, Trainer
from stepladder.data.loader import collate_items
from stepladder.data.workers import call_in_worker
from stepladder.storage.audit import audit
from stepladder.train.return_values import find_doubtful_counts, parse_loss

ROWS = torch.ones(16, 2), torch.ones(16, 1)


def fit(folder: Path, **parts: Any) -> None:
    model = torch.nn.Linear(2, 1)
    arguments: dict[str, Any] = {
        "loss": lambda model, batch: (model(batch[0]).sum(), 8),
        "train_data": ROWS,
    } | parts
    job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
    Trainer(job, Settings(folder / "run", steps=1, global_batch=8, progress=False)).fit()


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda total: 0.5, "0.5"),
        (lambda total: None, "None"),
        (lambda total: [total, 8], "[tensor("),
        (lambda total: total.expand(3), "a tensor of shape [3], with a gradient"),
        (lambda total: total.detach(), "a tensor of shape [], without a gradient"),
        (lambda total: (0.5, 8), "(0.5, 8)"),
        (lambda total: (total, None), "(a tensor of shape [], with a gradient, None)"),
        (lambda total: (total, "8"), "(a tensor of shape [], with a gradient, '8')"),
        (lambda total: (total, -1), "(a tensor of shape [], with a gradient, -1)"),
        (lambda total: (total, float("nan")), "(a tensor of shape [], with a gradient, nan)"),
        (lambda total: (total, float("inf")), "(a tensor of shape [], with a gradient, inf)"),
        (lambda total: (total, 10**400), "(a tensor of shape [], with a gradient, 1000"),
        (
            lambda total: (total.to(torch.complex64), 8),
            "(a tensor of shape [], with a gradient, 8)",
        ),
        (lambda total: (total, 8, 9), "(a tensor of shape [], with a gradient, 8, 9)"),
    ],
)
def test_a_loss_that_is_no_sum_and_count_is_refused(
    returned: Any, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        fit(tmp_path, loss=lambda model, batch: returned(model(batch[0]).sum()))
    assert caught.value.problem.startswith(f"loss of the Job has returned {problem}")
    assert "(sum, count)" in caught.value.hint


def test_a_loss_in_a_tensor_of_one_row_is_a_scalar() -> None:
    total = torch.ones(1, requires_grad=True) * 3
    for result, expected in (((total, torch.tensor(4)), (3.0, 4.0)), (total, (12.0, 4.0))):
        loss, count = parse_loss(result, samples=4)
        assert (loss.shape, loss.item(), count) == (torch.Size([]), *expected)


@pytest.mark.parametrize(
    "returned",
    [
        None,
        [1],
        {"a": 0.5},
        {"a": (1, 2, 3)},
        {"a": ("x", 1)},
        {"a": (torch.ones(2), 1)},
        {"a": (1j, 1)},
        {},
        {"a": (10**400, 1)},
        {"a": (1.0, float("nan"))},
        {"a": (1.0, float("inf"))},
        {"a": (1.0, -1)},
    ],
    ids=str,
)
def test_metrics_that_are_no_sums_and_counts_are_refused(returned: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="metrics of the Job has returned"):
        fit(tmp_path, eval_data=ROWS, metrics=lambda model, batch: returned)


@pytest.mark.parametrize(
    "name", ["step", "epoch", "lr", "train_loss", "", "a\nb", "x" * 101, "\udcff", 3], ids=ascii
)
@pytest.mark.parametrize("part", ["metrics", "derived"])
def test_a_metric_that_no_line_could_name_is_refused(part: str, name: Any, tmp_path: Path) -> None:
    """A metric called `step` took the place of the step, and the run could not be resumed."""
    parts = {"metrics": lambda *_: {"a": (1.0, 1)}, "derived": lambda _: {}}
    parts |= {part: (lambda *_: {name: (1.0, 1)}) if part == "metrics" else lambda _: {name: 1.0}}
    with pytest.raises(InputError, match=f"{part} of the Job names a metric"):
        fit(tmp_path, eval_data=ROWS, **parts)


def test_a_job_that_is_mended_goes_on_in_the_directory_that_it_has_left(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="loss of the Job"):
        fit(tmp_path, loss=lambda *_: None)
    fit(tmp_path)
    assert not audit(tmp_path / "run").problems


def test_metrics_of_other_names_in_another_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"metrics of the Job has returned \{'of 4'"):
        fit(
            tmp_path,
            eval_data=ROWS,
            eval_batch=12,
            metrics=lambda _, batch: {f"of {len(batch[0])}": (1.0, 1)},
        )


@pytest.mark.parametrize("returned", [None, [1], {"a": "x"}, {"a": torch.ones(2)}], ids=str)
def test_derived_metrics_that_are_no_numbers_are_refused(returned: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="derived of the Job has returned"):
        fit(
            tmp_path, eval_data=ROWS, metrics=lambda *_: {"a": (1.0, 1)}, derived=lambda _: returned
        )


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))

    def __len__(self) -> int:
        return 16


class Unsized(Dataset[int]):
    def __len__(self) -> int:
        return -1


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "is a NoneType"),
        ("x", "is a str"),
        (b"xyz", "is a bytes"),
        (Unsized, "is a type"),
        (3, "is a int"),
        (Stream(), r"is an IterableDataset \(Stream\)"),
        (Unsized(), "len.. of the job's Unsized fails"),
        ((ROWS[0], [1] * 16), "is a tuple"),
        ({"x": ROWS[0], "y": [1] * 16}, "is a dict"),
        (np.array(["a"]), "cannot be tensors"),
        (np.ma.masked_less(np.eye(16), 1), "some numbers of an array are masked"),
        (ROWS[0].to_sparse(), "torch.sparse_coo"),
        (torch.ones(16, 2, device="meta"), "on meta"),
        (torch.nested.nested_tensor([ROWS[0]], layout=torch.jagged), "a nested tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_data_of_no_samples_is_refused_before_anything_is_made(
    data: Any, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"job's data.*{problem}|{problem}"):
        fit(tmp_path, train_data=data)
    assert not list(tmp_path.iterdir())


def test_a_table_of_pandas_is_no_dataset(tmp_path: Path) -> None:
    class Table(SimpleNamespace):
        def __getitem__(self, _: int) -> None: ...
        def __len__(self) -> int:
            return 16

    with pytest.raises(InputError, match="data is a Table"):
        fit(tmp_path, train_data=Table(iloc=None))


@pytest.mark.parametrize("items", [[None] * 16, [(torch.ones(1 + i % 2), i) for i in range(16)]])
def test_items_that_make_no_batch_are_refused(items: list[Any], tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"items of the job's Dataset, from [0-9]+ on, do not make a batch"
    ):
        fit(tmp_path, train_data=items)
    sent = pickle.loads(
        pickle.dumps(collate_items(default_collate, call_in_worker, list(enumerate(items))))
    )
    with pytest.raises(InputError, match="do not make a batch"):
        sent.reraise()


def test_an_error_of_the_users_own_collate_is_the_users(tmp_path: Path) -> None:
    def collate(items: list[Any]) -> Any:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        fit(tmp_path, train_data=[1] * 16, collate=collate)


def test_best_must_name_a_metric(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"best of the Job names the metric 'b'\. HINT: one of a; or None"
    ):
        fit(tmp_path, eval_data=ROWS, metrics=lambda *_: {"a": (1.0, 1)}, best=("b", "max"))


@pytest.mark.parametrize("count", [float("nan"), -1.0, 1j])
def test_a_count_that_is_a_tensor_is_told_by_its_number(count: complex) -> None:
    message = re.escape(f"without a gradient: {torch.tensor(count).item()})")
    with pytest.raises(InputError, match=message):
        parse_loss((torch.ones((), requires_grad=True), torch.tensor(count)), 4)


@pytest.mark.parametrize(
    ("counts", "sizes", "doubted"),
    [
        ([[1, 8], [1, 8], [1, 3]], [8, 8, 3], ["mean"]),
        ([[1, 8], [1, 8]], [8, 8], []),  # all batches weigh the same
        ([[8, 8], [1, 1]], [8, 1], []),  # the last batch has one sample
        ([[1, 1], [0, 1]], [8, 3], ["sum"]),
    ],
)
def test_a_mean_that_counts_once_is_doubted(
    counts: list[list[int]], sizes: list[int], doubted: list[str]
) -> None:
    lines = find_doubtful_counts(np.array(counts, np.float64), sizes, ["mean", "sum"])
    assert [line.split()[1] for line in lines] == doubted
    assert all("HINT: return (sum over the batch, its samples)" in line for line in lines)
