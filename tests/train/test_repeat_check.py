"""A microbatch that is read and computed twice."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from stepladder.core.plan import Span
from stepladder.train.repeat_check import REREAD_SEED, RepeatCheck, hash_batch

SPAN = Span(0, 0, 2)


class Reader:
    def __init__(self, batch):
        self.batch = batch

    def read(self, step, span):
        return self.batch


def check(batch, again, losses, gathers_weights=False):
    results = iter(losses)
    check = RepeatCheck(Reader(again), lambda *_: next(results), gathers_weights)
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
    check(torch.ones(2), torch.ones(2), losses, gathers_weights=True)


def test_a_rank_without_microbatches_checks_nothing():
    RepeatCheck(Reader(None), lambda *_: torch.ones(()), False).validate(0)


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

    check = RepeatCheck(Reader(torch.ones(2)), compute, gathers_weights=False)
    check.note_batch(SPAN, torch.ones(2))
    loss = compute()
    check.note_draws()
    check.note_loss(loss)
    with pytest.raises(Exception, match="draws random numbers that later passes do not"):
        check.validate(0)
