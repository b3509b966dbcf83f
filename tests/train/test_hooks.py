"""Hooks of weights, modules and optimizers: what the table of docs/shard.md says is what happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from five_ways import Net, cross_entropy, fit, make_data, train_in_ways
from stepladder import InputError, Job, World
from stepladder.train.comm import Comm
from stepladder.train.job_validation import validate_state

PAGE = Path(__file__).parents[2] / "docs" / "shard.md"
COLUMNS = {
    "`--shard none`": ["three", "resumed"],
    "`--shard optimizer`": ["optimizer", "copies"],
    "`--shard full`": ["full"],
}
Register = Callable[[nn.Module, torch.optim.Optimizer], Any]


def shrink(gradient: torch.Tensor) -> torch.Tensor:
    """Scale by the norm: a slice has another norm."""
    return gradient / (1 + gradient.norm())


def shrink_in_place(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad = shrink(param.grad)


def centralise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.ndim > 1:
                param.grad.sub_(param.grad.mean(1, keepdim=True))


def limit_rows(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.div_(param.norm(dim=-1, keepdim=True).clamp(min=0.1))


def replace_step(optimizer: Any) -> None:
    step = optimizer.step

    def centralise_and_step(closure: Any = None) -> Any:
        centralise(optimizer)
        return step(closure)

    optimizer.step = centralise_and_step


def hook_output(model: Any, hook: Any) -> None:
    def register(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(hook)

    model.register_forward_hook(register)


def halve(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if value is None else value * 0.5 for value in values)


HOOKS: dict[str, Register] = {
    "`register_hook` of a weight": lambda model, _: [
        param.register_hook(shrink) for param in model.parameters()
    ],
    "`register_post_accumulate_grad_hook` of a weight": lambda model, _: [
        param.register_post_accumulate_grad_hook(shrink_in_place) for param in model.parameters()
    ],
    "`register_hook` of an activation": lambda model, _: hook_output(model, shrink),
    "`register_forward_pre_hook` of a module": lambda model, _: model.blocks[  # type: ignore[index,union-attr,operator]
        0
    ].register_forward_pre_hook(lambda module, args: (args[0] + module.weight.mean(),)),
    "`register_forward_hook` of a module": lambda model, _: model.blocks[  # type: ignore[index,union-attr,operator]
        0
    ].register_forward_hook(lambda module, args, output: output * module.weight.norm()),
    "`register_full_backward_pre_hook` of a module": lambda model, _: model.blocks[  # type: ignore[index,union-attr,operator]
        0
    ].register_full_backward_pre_hook(lambda module, gradients: halve(gradients)),
    "`register_full_backward_hook` of a module": lambda model, _: model.blocks[  # type: ignore[index,union-attr,operator]
        0
    ].register_full_backward_hook(lambda module, inputs, outputs: halve(inputs)),
    "`register_step_pre_hook` of an optimizer": lambda _, it: it.register_step_pre_hook(centralise),
    "`register_step_post_hook` of an optimizer": lambda _, it: it.register_step_post_hook(
        limit_rows
    ),
    "a function in place of `optimizer.step`": lambda _, it: replace_step(it),
    "`register_state_dict_post_hook` of an optimizer": lambda _, it: (
        it.register_state_dict_post_hook(lambda optimizer, state: {**state, "note": 1})
    ),
    "`register_state_dict_pre_hook` of a module": lambda model, _: (
        model.register_state_dict_pre_hook(lambda *_args: None)
    ),
}


def make_job(kind: str) -> Job:
    """A job with one hook; "late ..." registers it in the first call of loss."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    name = kind.removeprefix("late ").removeprefix("global ")
    register = HOOKS.get(name)
    loss = cross_entropy
    if kind.startswith("late ") and register is not None:
        waiting = [register]

        def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
            while waiting:
                waiting.pop()(model, optimizer)
            return cross_entropy(model, batch)

    elif register is not None:
        register(model, optimizer)
    return Job(model, optimizer, loss, make_data())


def read_table() -> dict[str, dict[str, str]]:
    """The table on the page: hook -> column -> cell."""
    section = PAGE.read_text(encoding="utf-8").split("## Hooks")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    header, _, *body = rows
    return {
        hook: dict(zip(header[1:], cells, strict=True))
        for names, *cells in body
        for hook in split_hooks(names)
    }


def split_hooks(names: str) -> list[str]:
    """The keys of HOOKS in a cell such as "`a`, `b` of a module, `c` of a weight"."""
    hooks = []
    waiting: list[str] = []
    for name in names.split(", "):
        waiting.append(name)
        if not name.endswith("`") or name.startswith("a function"):
            owner = name.split("` ", 1)[1] if not name.startswith("a function") else ""
            hooks += [each if " " in each else f"{each} {owner}" for each in waiting]
            waiting = []
    return hooks


def test_the_page_has_a_row_for_each_hook_and_a_column_for_each_layout() -> None:
    table = read_table()
    assert set(table) == set(HOOKS)
    assert all(list(cells) == list(COLUMNS) for cells in table.values())
    assert {cell for cells in table.values() for cell in cells.values()} == {"same bits", "refused"}


@pytest.mark.slow
@pytest.mark.ranks
def test_each_cell_of_the_table_is_what_happens(tmp_path: Path) -> None:
    results = train_in_ways(make_job, [*HOOKS, "no hook"], tmp_path)
    expected = results["one"]
    for hook, cells in read_table().items():
        has_effect = "state_dict" not in hook
        assert (expected[hook] != expected["no hook"]) == has_effect, hook
        for column, cell in cells.items():
            for way in COLUMNS[column]:
                result = results[way][hook]
                if cell == "refused":
                    assert re.match(f"refused: {column.strip('`')}: .* hook.* HINT: ", result)
                else:
                    assert result == expected[hook], (hook, way)


LATE = {
    "optimizer": ["late `register_step_pre_hook` of an optimizer"],
    "full": [
        "late `register_step_post_hook` of an optimizer",
        "late `register_hook` of a weight",
        "late `register_post_accumulate_grad_hook` of a weight",
    ],
}


@pytest.mark.ranks
@pytest.mark.parametrize("shard", LATE)
def test_a_hook_that_is_registered_while_training_is_refused_too(
    shard: str, tmp_path: Path
) -> None:
    results = train_in_ways(make_job, LATE[shard], tmp_path, [shard])[shard]
    for result in results.values():
        assert re.match(rf"refused: --shard {shard}: .* hook.* HINT: ", result)


def leave_out(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    del state["last.weight"]


def test_a_model_whose_state_dict_leaves_a_trained_weight_out_is_refused(tmp_path: Path) -> None:
    def make(_kind: str) -> Job:
        job = make_job("no hook")
        job.model.register_state_dict_post_hook(leave_out)
        return job

    comm = Comm(World(), torch.device("cpu"))
    result = fit(comm, make, ["left out"], tmp_path, {})["left out"]
    assert result.startswith(
        "refused: state_dict of the model has no last.weight, which is trained"
    )
    assert not (tmp_path / "left out").exists()


class Tempered(nn.Linear):
    def get_extra_state(self) -> dict[str, float]:
        return {"temperature": 0.5}


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 2)
    model.register_buffer("shares", buffer)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Tempered(4, 2), "state_dict of the model has _extra_state, which is no tensor but a dict"),
        (nn.LazyLinear(2), "the weight weight has no shape yet"),
        (with_buffer(torch.eye(2).to_sparse()), "shares is torch.float32, torch.sparse_coo on cpu"),
        (
            with_buffer(torch.ones(2, device="meta")),
            "shares is torch.float32, torch.strided on meta",
        ),
        (
            with_buffer(torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8)),
            "shares is torch.qint8",
        ),
        (with_buffer(torch.ones(1).expand(2)), "shares is expanded: no snapshot can have it"),
    ],
)
def test_a_model_that_no_snapshot_can_have_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        validate_state(model)
