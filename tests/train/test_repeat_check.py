"""A microbatch that is read and computed twice."""

from __future__ import annotations

import itertools
import os
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist

from stepladder.core.plan import Span
from stepladder.train.repeat_check import REREAD_SEED, RepeatCheck, hash_batch

SPAN = Span(0, 0, 2)


class Reader:
    def __init__(self, batch):
        self.batch = batch

    def read(self, step, span):
        return self.batch


def check(batch, again, losses, gathers_weights=False):
    results = iter([*losses, losses[0], losses[0]])  # and twice for the gradients
    check = RepeatCheck(Reader(again), lambda *_: next(results), [], gathers_weights)
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
    with pytest.raises(Exception, match="another loss"):
        check(torch.ones(2), torch.ones(2), losses, gathers_weights=True)


def test_a_rank_without_microbatches_checks_nothing():
    RepeatCheck(Reader(None), lambda *_: torch.ones(()), [], False).validate(0)


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

    check = RepeatCheck(Reader(torch.ones(2)), compute, [], gathers_weights=False)
    check.note_batch(SPAN, torch.ones(2))
    loss = compute()
    check.note_draws()
    check.note_loss(loss)
    with pytest.raises(Exception, match="draws random numbers that later passes do not"):
        check.validate(0)


def weight_check(compute):
    """A check of one weight, whose loss is computed as the argument says."""
    weight = torch.nn.Parameter(torch.ones(2))
    check = RepeatCheck(
        Reader(torch.ones(2)), lambda *_: compute(weight), [weight], gathers_weights=False
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
