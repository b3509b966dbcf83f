"""An optimizer that steps one vector: the bits and the state of one that steps each parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stepladder import Settings, World
from stepladder.train.comm import Comm
from stepladder.train.layout.flat import Flat
from stepladder.train.optimizers import ELEMENTWISE_OPTIMIZERS

CPU = torch.device("cpu")
SCALER = torch.amp.GradScaler(enabled=False)
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ELEMENTWISE_OPTIMIZERS),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1, "foreach": True}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"foreach": True, "maximize": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
]


def made(kind: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A net whose tensors have all kinds of lengths beyond whole vectors, and an optimizer with two
    groups.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(13, 37), nn.Linear(37, 5), nn.Linear(5, 1))
    groups = [
        {"params": [p for p in net.parameters() if p.ndim == d], "weight_decay": 0.1 * d}
        for d in (1, 2)
    ]
    return net, getattr(torch.optim, kind)(groups, lr=0.01, **options)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, flat: Flat | None, number: int) -> None:
    net.zero_grad()
    parts = list(net.children())[
        : 2 if number == 4 else 3
    ]  # in one step the last layer has no gradient
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(number))
    for part in parts:
        x = part(x).tanh()
    x.sum().backward()
    if flat is None:
        optimizer.step()
    else:
        flat.step(SCALER)


def make_flat_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> Flat | None:
    job: Any = SimpleNamespace(model=None, optimizer=optimizer)
    comm = Comm(World(), device)
    return Flat(job, comm) if Flat.choose(Settings("runs/flat"), job, comm) is Flat else None  # type: ignore[arg-type]


def held(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer.state_dict()["state"]
    return [p.tolist() for p in net.parameters()], {
        number: {name: value.tolist() for name, value in values.items()}
        for number, values in state.items()
    }


@pytest.mark.parametrize(
    ("kind", "options"), OPTIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_it_has_the_bits_and_the_state_of_single_steps(kind: str, options: dict[str, Any]) -> None:
    (net, optimizer), (peer, of_other) = made(kind, **options), made(kind, **options)
    flat = make_flat_optimizer(optimizer, CPU)
    assert flat is not None
    for number in range(3):
        step(net, optimizer, flat, number)
        step(peer, of_other, None, number)
        assert held(net, optimizer) == held(peer, of_other), number
    assert flat.is_flat

    resumed, of_resumed = made(kind, **options)
    rerun = make_flat_optimizer(of_resumed, CPU)
    assert rerun is not None
    resumed.load_state_dict(net.state_dict())
    of_resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    rerun.adopt_state()
    assert rerun.is_flat
    for number in range(3, 7):  # on the way it gives up
        step(resumed, of_resumed, rerun, number)
        step(peer, of_other, None, number)
        assert held(resumed, of_resumed) == held(peer, of_other), number
        assert rerun.is_flat == (number < 4)


def test_steps_that_count_differently_are_not_taken_as_one() -> None:
    net, optimizer = made("Adam")
    for number in (3, 4):
        step(net, optimizer, None, number)
    flat = make_flat_optimizer(optimizer, CPU)
    assert flat is not None and not flat.is_flat
    before = held(net, optimizer)
    peer, of_other = deepcopy((net, optimizer))
    step(net, optimizer, flat, 5)
    step(peer, of_other, None, 5)
    assert before != held(net, optimizer) == held(peer, of_other)


def watched(optimizer: torch.optim.Optimizer, _net: nn.Module) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


def replaced(optimizer: torch.optim.Optimizer, _net: nn.Module) -> None:
    step = optimizer.step
    optimizer.step = lambda: step()  # type: ignore[method-assign]


def moved(_optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    first = next(net.parameters())
    first.data = first.data.clone()


def grown(optimizer: torch.optim.Optimizer, _net: nn.Module) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("change", [watched, replaced, moved, grown])
def test_who_changes_the_optimizer_or_its_parameters_has_single_steps(
    change: Callable[..., None],
) -> None:
    (net, optimizer), (peer, of_other) = made("Adam"), made("Adam")
    flat = make_flat_optimizer(optimizer, CPU)
    assert flat is not None
    for number in range(3):
        if number == 1:
            change(optimizer, net)
            change(of_other, peer)
        step(net, optimizer, flat, number)
        step(peer, of_other, None, number)
    assert not flat.is_flat
    assert held(net, optimizer) == held(peer, of_other)


def test_a_schedule_that_counts_steps_is_no_reason() -> None:
    net, optimizer = made("SGD")
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    flat = make_flat_optimizer(optimizer, CPU)
    with warnings.catch_warnings(
        action="error"
    ):  # it would say that its step comes before the optimizer's
        step(net, optimizer, flat, 0)
        schedule.step()
    assert flat is not None and flat.is_flat


def test_only_what_is_known_to_have_the_same_bits_is_flat() -> None:
    layer = nn.Linear(3, 2)
    assert (
        make_flat_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1), torch.device("cuda"))
        is None
    )
    assert make_flat_optimizer(torch.optim.AdamW(layer.parameters(), fused=True), CPU) is None
    assert (
        make_flat_optimizer(type("Own", (torch.optim.SGD,), {})(layer.parameters(), lr=0.1), CPU)
        is None
    )
    assert (
        make_flat_optimizer(torch.optim.SGD([layer.weight], lr=0.1), CPU) is None
    )  # of one it is the same
    mixed = [layer.weight, nn.Parameter(torch.ones(3, dtype=torch.float64))]
    assert make_flat_optimizer(torch.optim.SGD(mixed, lr=0.1), CPU) is None
    large = nn.Linear(1000, 1000)
    assert (
        make_flat_optimizer(torch.optim.SGD(large.parameters(), lr=0.1), CPU) is None
    )  # there the arithmetic counts
