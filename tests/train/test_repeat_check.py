"""A microbatch that is read and computed twice."""

from __future__ import annotations

import itertools
import os
from collections import namedtuple
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepladder import InputError, Job, Settings, Trainer, World
from stepladder.core.plan import Span
from stepladder.train.batch_norm import RunningStatistics
from stepladder.train.comm import Comm
from stepladder.train.repeat_check import (
    REREAD_SEED,
    RepeatCheck,
    hash_batch,
    validate_next_values_on_all_ranks,
)
from stepladder.train.sync.base import Sync

SPAN = Span(0, 0, 2)
NONE = RunningStatistics(None)
KEPT = SimpleNamespace(read=dict, tell_changed=lambda before: None)


def no_gradients(loss):
    return b""


class Reader:
    comm = SimpleNamespace(world=World())

    def __init__(self, batch):
        self.batch = batch

    def read(self, step, span):
        return self.batch


def check(batch, again, losses):
    results = iter([*losses, losses[0], losses[0]])  # and twice for the gradients
    check = RepeatCheck(Reader(again), lambda *_: next(results), [], NONE, no_gradients, KEPT)
    check.note_batch(SPAN, batch)
    torch.manual_seed(REREAD_SEED)
    check.note_draws()
    check.note_loss(next(results))
    check.validate(0)


def test_equal_data_and_losses_pass():
    batch = {"x": torch.ones(2), "y": [1, "a"]}
    check(batch, dict(batch), [torch.tensor(1.0), torch.tensor(1.0)])
    check(batch, batch, [torch.tensor(float("nan"))] * 2)


def test_other_data_and_another_loss_are_refused():
    with pytest.raises(Exception, match="other data"):
        check(torch.ones(2), torch.zeros(2), [torch.ones(())] * 2)
    losses = [torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0))]
    with pytest.raises(Exception, match="another loss"):
        check(torch.ones(2), torch.ones(2), losses)


def test_data_that_change_slowly_are_refused_once_the_first_microbatch_is_other_data():
    epochs = itertools.count()
    reader = SimpleNamespace(
        read=lambda step, span: torch.ones(2) if step else torch.zeros(2), comm=Reader.comm
    )
    check = RepeatCheck(reader, lambda *_: torch.ones(()), [], NONE, no_gradients, KEPT)

    def validate(step):
        check.note_batch(SPAN, reader.read(step, SPAN))
        torch.manual_seed(REREAD_SEED)
        check.note_draws()
        check.note_loss(torch.ones(()))
        check.validate(step)

    validate(0)
    validate(5)
    reader.read = lambda step, span: (
        torch.ones(2) if step else torch.full((2,), float(next(epochs)))
    )
    validate(9)
    for ask in (check.validate_first, lambda: validate(9)):
        with pytest.raises(InputError, match="other data when they are read again"):
            ask()


@pytest.mark.parametrize("is_moved", [False, True])
def test_statistics_that_a_layer_moves_from_where_they_are_are_refused(tmp_path, is_moved):
    class Norm(nn.BatchNorm1d):
        def forward(self, x):
            if is_moved:
                self.num_batches_tracked += 1
                self.running_mean.lerp_(x.mean(0), 0.1)
                return x
            return super().forward(x)

    match = "or other statistics of batch norm"
    with pytest.raises(InputError, match=match) if is_moved else nullcontext():
        fit(tmp_path / "run", lambda model, x: (model(x).square().sum(), len(x)), 1, Norm(4))


def test_statistics_of_a_skipped_layer_are_0_whatever_its_values_are():
    statistics = RunningStatistics(nn.BatchNorm1d(1))
    statistics.captured = torch.zeros(1)
    check = RepeatCheck(Reader(0.0), lambda *_: torch.ones(()), [], statistics, no_gradients, KEPT)
    check.note_batch(SPAN, 0.0)
    torch.manual_seed(REREAD_SEED)
    check.note_draws()
    check.note_loss(torch.ones(()))
    statistics.captured = -torch.zeros(1)
    check.validate(0)


def fit(run_dir, loss, epochs, layer=None):
    model = nn.Sequential(nn.Linear(4, 4), layer or nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = Job(model, optimizer, loss, torch.ones(16, 4))
    settings = Settings(run_dir, sync="exact", progress=False, epochs=epochs, global_batch=4)
    Trainer(job, settings, comm=Comm(World(), torch.device("cpu"))).fit()


@pytest.mark.parametrize(
    ("epochs", "message"), [(2, "the same microbatch has another loss"), (1, "the next loss is")]
)
def test_state_of_the_loss_that_acts_later_is_refused_in_the_next_epoch_or_at_a_snapshot(
    tmp_path, epochs, message
):
    calls = itertools.count()  # 25 in the first epoch

    def loss(model, x):
        return model(x).square().sum() * max(25, next(calls)), len(x)

    with pytest.raises(InputError, match=message):
        fit(tmp_path / "run", loss, epochs)


def test_steps_are_compared_in_each_epoch_and_else_ever_rarer(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(RepeatCheck, "validate", lambda self, step: steps.append(step))
    fit(tmp_path / "run", lambda model, x: (model(x).square().sum(), len(x)), 6)
    assert steps == [0, 1, 3, 4, 7, 8, 12, 15, 16, 20]


def test_next_values_that_differ_between_ranks_are_refused():
    comm = SimpleNamespace(gather_bytes=lambda own: [b"other", own, own])
    validate_next_values_on_all_ranks({}, SimpleNamespace(gather_bytes=lambda own: [own] * 2))
    with pytest.raises(InputError, match="others on rank 0 than on others: the job keeps"):
        validate_next_values_on_all_ranks({"loss": 1.0}, comm)


def test_a_rank_without_microbatches_checks_nothing():
    RepeatCheck(Reader(None), lambda *_: torch.ones(()), [], NONE, no_gradients, KEPT).validate(0)


def test_the_parts_of_a_batch_count_and_other_objects_do_not():
    pair = namedtuple("pair", "x y")
    first = pair(torch.ones(2), object())
    assert hash_batch(first) == hash_batch(pair(torch.ones(2), object()))
    assert hash_batch(first) != hash_batch(pair(torch.zeros(2), object()))


def test_numbers_that_only_the_first_pass_draws_are_refused():
    cache = []

    def compute(*_):
        torch.manual_seed(0)
        if not cache:
            cache.append(torch.randn(2))
        return cache[0].sum()

    check = RepeatCheck(Reader(torch.ones(2)), compute, [], NONE, no_gradients, KEPT)
    check.note_batch(SPAN, torch.ones(2))
    loss = compute()
    check.note_draws()
    check.note_loss(loss)
    with pytest.raises(Exception, match="draws random numbers that later passes do not"):
        check.validate(0)


def weight_check(compute):
    """A check of one weight, whose loss is computed as the argument says."""
    weight = torch.nn.Parameter(torch.ones(2))
    sync = Sync(nn.ParameterList([weight]), Comm(World(), torch.device("cpu")))
    check = RepeatCheck(
        Reader(torch.ones(2)), lambda *_: compute(weight), [weight], NONE, sync.hash_gradients, KEPT
    )
    check.note_batch(SPAN, torch.ones(2))
    loss = compute(weight)
    weight.grad = torch.zeros(2)
    torch.manual_seed(REREAD_SEED)
    check.note_draws()
    check.note_loss(loss.detach())
    return check, weight


def test_gradients_that_a_hook_changes_each_time_are_refused():
    check, weight = weight_check(lambda weight: weight.sum())
    check.validate(0)
    calls = itertools.count(1)
    weight.register_hook(lambda gradient: gradient * next(calls))
    with pytest.raises(Exception, match="other gradients"):
        check.validate(0)
    assert weight.grad.equal(torch.zeros(2))


def test_a_loss_that_calls_backward_is_refused():
    def compute(weight):
        if weight.grad is not None:
            weight.square().sum().backward()
        return weight.sum()

    check, _ = weight_check(compute)
    with pytest.raises(Exception, match="by backward or zero_grad"):
        check.validate(0)


def test_a_loss_that_asks_for_the_number_of_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    check, _ = weight_check(lambda weight: weight.sum() / dist.get_world_size())
    with pytest.raises(Exception, match="another loss"):
        check.validate(0)
    check, _ = weight_check(lambda weight: weight.sum() * (1 if dist.get_rank() else 2))
    check.validate(0)
    assert (dist.get_world_size(), dist.get_rank()) == (3, 1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # as on one process
    check, _ = weight_check(lambda weight: weight.sum() / int(os.environ.get("WORLD_SIZE", 1)))
    with pytest.raises(Exception, match="another loss"):
        check.validate(0)
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        lambda x: torch.nested.nested_tensor([x[0], x[1][:1]]),
    ],
    ids=["coo", "csr", "jagged", "nested"],
)
def test_sparse_and_nested_tensors_have_hashes_of_their_values(make):
    x = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 4.0]])
    assert hash_batch(make(x)) == hash_batch(make(x.clone()))
    assert hash_batch(make(x)) != hash_batch(make(x + 1))
