"""Facts that the probe records of values and of callers, without a run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from check_recordings import evidence_of, train_pass
from stepladder.tools.check.held import describe_samples
from stepladder.tools.check.probe import hooks_model, hooks_shown, hooks_train
from stepladder.tools.check.probe.layer_outputs import layer_outputs
from stepladder.tools.check.probe.patching import WrappedCall
from stepladder.tools.check.probe.probe_log import ProbeLog


def test_numbers_of_a_logged_dict_are_shown_with_their_names() -> None:
    values = ({"train": {"loss": torch.tensor(0.5)}, "step": 3},)
    event = hooks_shown.metric_event(WrappedCall(print, values, {"commit": True}))
    assert event.text == "train loss 0.5 step 3 True"


def test_what_goes_into_a_loss_is_not_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss is a module, too, but one without parameters; what the model returns goes into it."""
    begun: list[Any] = []
    monkeypatch.setattr(layer_outputs, "begin", lambda module, _: begun.append(module))
    monkeypatch.setattr(hooks_model, "record_forward", lambda *_: None)
    model, loss = nn.Linear(2, 1), nn.MSELoss()
    for module in (model, loss):
        hooks_model.call(lambda *_: None, module, torch.ones(2))
    assert begun == [model]


@pytest.mark.parametrize(("way", "is_own"), [(["torch"], True), (["torch", "vision"], False)])
def test_a_load_is_the_users_if_torch_alone_is_between(
    way: list[str], is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        "check/hooks.py",
        *(f"/lib/site-packages/{name}/hub.py" for name in way),
        "/me/train.py",
    ]
    frame = None
    for name in reversed(files):
        frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=name), f_back=frame)
    log = object.__new__(ProbeLog)
    log.roots = ("/me/",)
    log.start_folder = "/me"
    monkeypatch.setattr(sys, "_getframe", lambda _: frame.f_back)
    assert log.is_called_by_user("/lib/site-packages/torch") == is_own


def test_the_samples_that_are_never_read_are_said() -> None:
    ranks = [train_pass(1, [[0, 2]], length=8), train_pass(1, [[1, 3]], length=8)]
    line = describe_samples(evidence_of(*ranks))
    assert line == "samples: 4 of 8 samples, each once an epoch, in 1 epoch"
    same = describe_samples(evidence_of(ranks[0], ranks[0]))
    assert "2 of 8 samples, each 2 times an epoch" in same


@pytest.mark.parametrize("frozen", ["", "plain"])
def test_clipping_shows_its_norm_and_changes_no_gradient_of_frozen_weights(
    frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 3.0)
    recorded: list[Any] = []
    monkeypatch.setattr(hooks_train, "record", recorded.append)
    log = SimpleNamespace(settings=SimpleNamespace(frozen=frozen))
    monkeypatch.setattr(hooks_train, "current_log", lambda: log)
    call = WrappedCall(nn.utils.clip_grad_norm_, ([weight],), {"max_norm": 1.0})
    assert hooks_train.record_clipping(call).item() == recorded[0].norm == 6.0
    assert weight.grad.norm().item() == pytest.approx(6.0 if frozen else 1.0)
