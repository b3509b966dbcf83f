"""--capture where there is no GPU: what is refused, and what is kept of a memory that each replay
writes anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from processes import refused, run, train
from stepladder import InputError, Job, Settings, Shards, Trainer, write_shards
from stepladder.core.plan import Plan
from stepladder.data.sources import open_source
from stepladder.train.cuda_graphs import (
    CapturedLoss,
    make_loss_programs,
    raise_if_capture_failed,
    validate_capturable,
)

CUDA = torch.device("cuda")


def test_on_a_cpu_it_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    done = run("train", "mlp", "--device", "cpu", "--capture", cwd=tmp_path)
    refused(
        done,
        "--capture with --device cpu: it records what a CUDA GPU does. HINT: leave --capture out",
    )
    assert not list(tmp_path.iterdir())


def test_data_that_are_read_while_training_are_refused(tmp_path: Path) -> None:
    write_shards(({"x": np.full(5, i, np.float32)} for i in range(8)), tmp_path / "s", chunk_rows=4)
    with pytest.raises(InputError, match="the job's data are read while it trains"):
        validate_capturable(open_source(Shards(tmp_path / "s"), torch.device("cpu"), 0), CUDA)
    validate_capturable(open_source(torch.ones(3, 2), torch.device("cpu"), 0), CUDA)


@pytest.mark.parametrize(
    ("options", "results"),
    [
        ({"shard": "full"}, "--capture with --shard full, whose weights come and go"),
        ({"checkpoint_blocks": True}, "--capture with --checkpoint-blocks"),
    ],
)
def test_what_does_not_go_with_it(options: dict[str, Any], results: str) -> None:
    with pytest.raises(InputError, match=results):
        Settings(Path("run"), capture=True, **options)


def test_a_run_without_it_is_defined_as_before_it_could_be_asked_for(tmp_path: Path) -> None:
    results = train("mlp", "--steps", 1, cwd=tmp_path)
    assert (
        "capture"
        not in json.loads((tmp_path / results["run_dir"] / "config.json").read_text())["definition"]
    )


def test_passes_of_full_length_are_recorded_and_no_others() -> None:
    plan = Plan(num_samples=46, global_batch=16, microbatch=4)
    results = make_loss_programs(summed, Settings(Path("run"), capture=True), plan.microbatches(0))
    assert list(results) == [4] and isinstance(results[4], CapturedLoss)
    assert make_loss_programs(summed, Settings(Path("run"), capture=True), []) == {}, (
        "a rank without work"
    )


# -- a recorder that does on a CPU what torch's does by its source: one memory for the results of all replays ---


def replayed(
    module: nn.Module, sample: tuple[Any], allow_unused_input: bool
) -> Callable[[Any], Any]:
    (batch,) = sample
    params = list(module.parameters())
    for _ in range(4):
        saved = module(batch)
    gradients = torch.autograd.grad(saved[0], params, allow_unused=allow_unused_input)
    results = tuple(item.detach().clone() for item in saved)

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                for tensor, given in zip(batch, inputs, strict=False):
                    tensor.copy_(given)
            with torch.enable_grad():
                ctx.found = module(batch)
            for tensor, result in zip(results, ctx.found, strict=True):
                tensor.copy_(result.detach())
            return tuple(item.detach() for item in results)

        @staticmethod
        def backward(ctx: Any, *incoming: Any) -> Any:
            outcome = torch.autograd.grad(ctx.found[0], params, incoming[0], allow_unused=True)
            for tensor, gradient in zip(gradients, outcome, strict=True):
                if tensor is not None:
                    tensor.copy_(gradient)
            return (
                *[None] * len(batch),
                *[None if item is None else item.detach() for item in gradients],
            )

    return lambda batch: Graphed.apply(*batch, *params)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", replayed)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)


def model_and_batches() -> tuple[nn.Module, list[list[torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)
    )
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return model, [[torch.randn(4, 6), torch.randn(4, 1)] for _ in range(3)]


def summed(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def weighted(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return summed(model, batch)[0], (batch[1] > 0).sum()


def plain(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return summed(model, batch)[0]


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("loss", [summed, weighted, plain])
@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_of_several_passes_add_up_and_losses_stay_what_they_were(
    loss: Any, steps: int
) -> None:
    outcome = []
    for way in (loss, CapturedLoss(loss)):
        model, batches = model_and_batches()
        for _ in range(steps):
            results = []
            for param in model.parameters():
                param.grad = None
            for number, batch in enumerate(batches):
                torch.manual_seed(number)
                result = way(model, batch)
                results.append(result if isinstance(result, tuple) else (result,))
                results[-1][0].backward()
        grads = [
            None if param.grad is None else param.grad.tolist() for param in model.parameters()
        ]
        losses = [[float(torch.as_tensor(item).detach()) for item in result] for result in results]
        outcome.append((losses, grads, model.state_dict()))
    assert outcome[0][0] == outcome[1][0]
    assert outcome[0][1] == outcome[1][1] and None in outcome[0][1], "nobody uses one of them"
    assert all(
        torch.equal(a, b)
        for a, b in zip(outcome[0][2].values(), outcome[1][2].values(), strict=True)
    )


@pytest.mark.usefixtures("recorder")
def test_an_odd_loss_is_refused_as_without_it() -> None:
    model, (batch, *_) = model_and_batches()
    with pytest.raises(InputError, match="loss of the Job has returned"):
        CapturedLoss(lambda model, batch: {"loss": 1})(model, batch)


def test_a_loss_that_cannot_be_recorded_is_one_line_and_its_own_errors_stay() -> None:
    first = RuntimeError(
        "CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might"
    )
    last = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    last.__context__ = first
    with pytest.raises(
        InputError, match=r"not permitted when stream is capturing\). HINT: a loss that reads no"
    ):
        raise_if_capture_failed(last)
    raise_if_capture_failed(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_count_may_be_a_tensor(tmp_path: Path) -> None:
    ends = []
    for number, loss in enumerate(
        (summed, lambda model, batch: (summed(model, batch)[0], torch.tensor(len(batch[0]))))
    ):
        model, batches = model_and_batches()
        data = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, data)
        settings = Settings(
            tmp_path / str(number), global_batch=4, epochs=2, threads=1, progress=False
        )
        ends.append(Trainer(job, settings).fit().weights_sha256)
    assert ends[0] == ends[1]
