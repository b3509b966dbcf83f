"""Learning rates and schedules: what metrics.jsonl says of them, and which can be used."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from stepladder import InputError, Job, Settings, Trainer, World
from stepladder.train.comm import Comm

MakeSchedule = Callable[[Optimizer], Any]


def make_job(rate: Any, make_schedule: MakeSchedule | None = None, **parts: Any) -> Job:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    schedule = None if make_schedule is None else make_schedule(optimizer)

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(x).square().sum(), len(x)

    return Job(model, optimizer, loss, x, schedule=schedule, **parts)


def fit(run_dir: Path, job: Job, **settings: Any) -> list[dict[str, Any]]:
    """Train, and return the lines of metrics.jsonl."""
    base = {"epochs": 2, "global_batch": 8, "sync": "exact", "progress": False}
    comm = Comm(World(), torch.device("cpu"))
    Trainer(job, Settings(run_dir, **{**base, **settings}), comm=comm).fit()
    return list(map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()))


def cosine(optimizer: Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, 10)


@pytest.mark.parametrize(
    "rate", [torch.tensor(0.05, dtype=torch.float64), np.float64(0.05)], ids=["torch", "numpy"]
)
def test_a_rate_of_torch_or_numpy_is_the_number_that_the_step_used(
    rate: Any, tmp_path: Path
) -> None:
    expected = fit(tmp_path / "float", make_job(0.05, cosine))
    lines = fit(tmp_path / "other", make_job(rate, cosine), steps=4)
    assert len(lines) == 5
    lines = fit(tmp_path / "other", make_job(rate, cosine))
    steps = [line for line in lines if "lr" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert [line["lr"] for line in steps] == pytest.approx(
        [line["lr"] for line in expected if "lr" in line], abs=1e-9
    )


def test_a_rate_that_is_no_number_ends_the_run_with_its_step(tmp_path: Path) -> None:
    job = make_job(0.05, lambda optimizer: lr_scheduler.LambdaLR(optimizer, rate_of_step))
    with pytest.raises(InputError, match=r"^the learning rate of step 4 is inf\. HINT: a schedule"):
        fit(tmp_path, job)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def rate_of_step(step: int) -> float:
    return 1.0 if step < 3 else float("inf")


def fit_with_stops(run_dir: Path, make: Callable[[], Job]) -> list[dict[str, Any]]:
    """Train to step 7, then to step 10, which is the end of the second epoch, then to the end."""
    fit(run_dir, make(), epochs=3, steps=7)
    fit(run_dir, make(), epochs=3, steps=10)
    return fit(run_dir, make(), epochs=3)


def halve_on_plateau(mode: Any = "min", threshold: float = 0.9) -> MakeSchedule:
    return lambda it: lr_scheduler.ReduceLROnPlateau(
        it, mode, factor=0.5, patience=0, threshold=threshold
    )


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_a_plateau_of_the_training_loss_halves_the_rate_after_an_epoch_without_progress(
    per: str, tmp_path: Path
) -> None:
    def make() -> Job:
        return make_job(1e-4, halve_on_plateau(), schedule_per=per)

    lines = fit(tmp_path / "whole", make(), epochs=3)
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates == [1e-4] * 10 + [5e-5] * 5
    assert fit_with_stops(tmp_path / "stopped", make) == lines


def test_a_plateau_follows_the_best_metric_that_the_job_names(tmp_path: Path) -> None:
    def make() -> Job:
        evaluation = torch.zeros(3, 4)
        parts = {
            "eval_data": evaluation,
            "metrics": lambda model, x: {"same": (torch.ones(()), len(x))},
            "best": ("same", "max"),
        }
        return make_job(1e-4, halve_on_plateau("max", 0.0), **parts)

    lines = fit(tmp_path / "whole", make(), epochs=3)
    assert [line["lr"] for line in lines if "lr" in line] == [1e-4] * 10 + [5e-5] * 5
    assert fit_with_stops(tmp_path / "stopped", make) == lines


class StoresNothing:
    def step(self) -> None: ...


class WantsAnEpoch:
    def step(self, epoch: int) -> None: ...
    def state_dict(self) -> None: ...
    def load_state_dict(self, state: None) -> None: ...


@pytest.mark.parametrize(
    ("make_schedule", "parts", "message"),
    [
        (halve_on_plateau("max"), {}, 'mode="max".* watches the training loss, whose best is its'),
        (halve_on_plateau(), {"best": ("error", "min")}, "watches error, but .* evaluates nothing"),
        (lambda _: WantsAnEpoch(), {}, "a step of WantsAnEpoch wants epoch"),
        (lambda _: StoresNothing(), {}, "schedule of the Job is <.*StoresNothing"),
        (
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, ([1.0] * 99).__getitem__),
            {},
            "state_dict of LambdaLR: .* no attribute '__dict__'",
        ),
    ],
)
def test_a_schedule_that_cannot_be_stepped_is_refused_before_anything_is_written(
    make_schedule: MakeSchedule, parts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"{message}.* HINT: "):
        fit(tmp_path / "run", make_job(0.1, make_schedule, **parts))
    assert not (tmp_path / "run").exists()


class CountsSteps(torch.optim.SGD):
    """Keeps its state where state_dict does not find it, but for `stored`."""

    counter = 0
    moments: dict[Any, torch.Tensor] = {}  # noqa: RUF012
    stored = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counter += 1
        super().step()


class KeepsMoments(CountsSteps):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.moments = {param: torch.zeros_like(param) for param in self.param_groups[0]["params"]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, moment in self.moments.items():
            moment.add_(param.grad)
        torch.optim.SGD.step(self)


class StoresCounter(CountsSteps):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counter": self.counter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counter = state_dict.pop("counter")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize(
    ("kind", "attribute"), [(CountsSteps, "counter"), (KeepsMoments, "moments")]
)
def test_an_optimizer_that_keeps_state_in_an_attribute_is_refused_in_the_first_step(
    kind: Any, attribute: str, tmp_path: Path
) -> None:
    job = make_job(0.1)
    optimizer = kind(job.model.parameters(), lr=0.1)
    message = f"^a step changes the attribute {attribute} of {kind.__name__}, .* HINT: keep it"
    with pytest.raises(InputError, match=message):
        fit(tmp_path, replace(job, optimizer=optimizer))
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_an_optimizer_that_stores_its_attribute_is_not_refused(tmp_path: Path) -> None:
    job = make_job(0.1)
    optimizer = StoresCounter(job.model.parameters(), lr=0.1)
    fit(tmp_path, replace(job, optimizer=optimizer))
    assert optimizer.counter == 10


def test_a_function_of_a_schedule_that_changes_what_it_encloses_is_refused(tmp_path: Path) -> None:
    calls = []

    def rate(step: int) -> float:
        calls.append(step)
        return 0.9 ** len(calls)

    job = make_job(0.1, lambda it: lr_scheduler.LambdaLR(it, rate))
    with pytest.raises(InputError, match=r"^a step changes the variable calls of .*rate, which no"):
        fit(tmp_path, job)


STEPS: list[int] = []


def count_steps() -> int:
    STEPS.append(1)
    return len(STEPS)


class ReadsVariable(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["params"][0].add_(self.param_groups[0]["params"][0].grad)
        count_steps()


class DecaysByVariable(lr_scheduler.LRScheduler):
    def get_lr(self) -> Any:
        return [rate * 0.9 ** count_steps() for rate in self.base_lrs]


@pytest.mark.parametrize(
    "change",
    [
        lambda job: replace(job, optimizer=ReadsVariable(job.model.parameters(), lr=0.1)),
        lambda job: replace(job, schedule=DecaysByVariable(job.optimizer)),
        lambda job: replace(
            job, schedule=lr_scheduler.LambdaLR(job.optimizer, lambda step: 0.9 ** count_steps())
        ),
    ],
    ids=["optimizer", "schedule", "function"],
)
def test_a_global_variable_that_a_step_changes_is_refused(
    change: Callable[[Job], Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "STEPS", [])
    with pytest.raises(
        InputError, match=r"^a step changes the variable STEPS of count_steps, which"
    ):
        fit(tmp_path, change(make_job(0.1)))


def change_rate(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] *= 0.9


def add_group(job: Job) -> None:
    assert isinstance(job.model, nn.Linear)
    bias = job.optimizer.param_groups[0]["params"].pop()
    job.optimizer.add_param_group({"params": [bias]})


def freeze(job: Job) -> None:
    next(job.model.parameters()).requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message", "rate"),
    [
        (change_rate, "lr of the optimizer changed outside of its step.* HINT: rates", 0.1),
        (change_rate, "lr of the optimizer changed", torch.tensor(0.1)),  # in place
        (add_group, "the list of the optimizer's parameters has changed since build", 0.1),
        (freeze, "requires_grad of a weight has changed since build, .* HINT: freeze", 0.1),
    ],
)
def test_a_loss_that_changes_the_optimizer_is_refused_at_that_step(
    change: Callable[[Job], None], message: str, rate: float | torch.Tensor, tmp_path: Path
) -> None:
    job = make_job(rate)
    calls = []

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        calls.append(x)
        result = job.loss(model, x)
        if len(calls) == 16:
            change(job)
        return result  # type: ignore[return-value]

    with pytest.raises(InputError, match=f"^{message}"):
        fit(tmp_path, replace(job, loss=loss), microbatch=2)
    # Three steps of four microbatches, and the first one of steps 1 and 2 three times more.
    assert len(calls) == 18


def test_a_schedule_whose_state_no_snapshot_can_have_is_refused_by_name(tmp_path: Path) -> None:
    class OwnSchedule(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Optimizer) -> None:
            self.function = lambda step: 0.9**step
            super().__init__(optimizer)

        def get_lr(self) -> Any:
            return [rate * self.function(self.last_epoch) for rate in self.base_lrs]

    with pytest.raises(
        InputError, match=r"^state state/schedule/function is a function, .* HINT: "
    ):
        fit(tmp_path, make_job(0.1, OwnSchedule))


def test_steps_that_are_to_be_differentiated_are_refused(tmp_path: Path) -> None:
    job = make_job(0.1)
    optimizer = torch.optim.AdamW(job.model.parameters(), differentiable=True)
    with pytest.raises(InputError, match=r"^AdamW has differentiable=True.* HINT: leave"):
        fit(tmp_path / "run", replace(job, optimizer=optimizer))


def test_freezing_in_a_hook_of_the_step_is_refused_since_no_snapshot_has_it(tmp_path: Path) -> None:
    job = make_job(0.1)
    job.optimizer.register_step_post_hook(lambda *_: freeze(job))
    with pytest.raises(InputError, match=r"^requires_grad of a weight has changed since build"):
        fit(tmp_path, job)


class Unfreezing(lr_scheduler.ConstantLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 2:
            self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_schedule_that_adds_parameters_is_refused_before_a_snapshot(tmp_path: Path) -> None:
    job = make_job(0.1, lambda optimizer: Unfreezing(optimizer, factor=1.0))
    with pytest.raises(InputError, match=r"^the list of the optimizer's parameters has changed"):
        fit(tmp_path, job, snapshot_every=1)
    assert len(list((tmp_path / "snapshots").glob("step_*"))) == 1


def test_a_function_of_a_schedule_that_reads_the_time_is_refused(tmp_path: Path) -> None:
    rate = lambda step: 1 + 1e-3 * time.perf_counter()  # noqa: E731
    job = make_job(0.1, lambda it: lr_scheduler.LambdaLR(it, rate))
    with pytest.raises(
        InputError, match=r"^a step changes the result of .*lambda.* for the same argument"
    ):
        fit(tmp_path, job)


class Noisy(torch.optim.SGD):
    """Langevin dynamics: it adds noise to the weights."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                noise = torch.randn_like(param) * np.random.rand() * random.random()
                param.add_(noise)


class CountedRate:
    """A rate with a state of its own, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**self.calls


def test_an_object_that_a_schedule_calls_and_saves_is_called_by_the_schedule_alone(
    tmp_path: Path,
) -> None:
    rate = CountedRate()
    lines = fit(tmp_path, make_job(0.1, lambda it: lr_scheduler.LambdaLR(it, rate)))
    assert rate.calls == 11  # as it is made, and after each of ten steps
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates == pytest.approx([0.1 * 0.9**calls for calls in range(1, 11)])


def test_an_optimizer_draws_the_same_numbers_after_other_passes(tmp_path: Path) -> None:
    weights = []
    for name, draws in (("a", 0), ("b", 1)):
        job = make_job(0.1)

        def loss(model: nn.Module, x: torch.Tensor, draws: int = draws, job: Job = job) -> Any:
            torch.rand(draws)
            np.random.rand(draws)
            return job.loss(model, x)

        optimizer = Noisy(job.model.parameters(), lr=0.1)
        fit(tmp_path / name, replace(job, loss=loss, optimizer=optimizer))
        weights.append(torch.nn.utils.parameters_to_vector(job.model.parameters()))
    assert torch.equal(*weights)
