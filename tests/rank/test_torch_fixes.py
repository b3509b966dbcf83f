"""An optimizer is built and steps without torch.compile's tracer, to the same bits; who wants it
gets it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import processes
from stepladder.rank.torch_fixes_groups import describe_members

OPTIMIZERS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)

TRACER = "torch._dynamo.eval_frame"

STEPS = """
import sys
import torch
from stepladder.rank.torch_fixes import defer_dynamo

def weights(names):
    for name in names:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            def closure():
                loss = model(torch.ones(2, 4)).square().sum()
                loss.backward()
                return loss
            closure()
            optimizer.step(*[closure] * (name == "LBFGS"))
        optimizer.load_state_dict(optimizer.state_dict())
        yield model.weight.detach()
"""

JOB = """
import sys
import torch
from dataclasses import dataclass
from stepladder import Job

@dataclass
class Config:
    global_batch: int = 8

def build(config):
    model = torch.nn.Linear(2, 1)
    def loaded(model, batch):
        return {"loaded": (float("torch._dynamo.eval_frame" in sys.modules), 1)}
    data = torch.ones(16, 2), torch.ones(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    return Job(model, optimizer, lambda m, b: (m(b[0]).square().sum(), 8), data, eval_data=data,
               metrics=loaded)
"""


def python(*lines: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([STEPS, *lines])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_optimizer_steps_to_the_same_bits_without_the_tracer() -> None:
    python(
        "defer_dynamo()",
        f"names = {OPTIMIZERS}",
        "without = list(weights(names))",
        f"assert {TRACER!r} not in sys.modules",
        f"import {TRACER}",
        "assert all(map(torch.equal, without, weights(names)))",
        "assert torch.compile(lambda value: value * 2, backend='eager')(torch.ones(1)).item() == 2",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "wants",
    [
        "__import__('torch._dynamo.config')",
        "torch.compile(lambda: 0)",
        "torch.compiler.disable(lambda: 0)",
    ],
)
def test_who_wants_the_tracer_gets_it(wants: str) -> None:
    python(
        "defer_dynamo()",
        "list(weights(['SGD']))",
        "zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__",
        "assert hasattr(zero_grad, '__dynamo_disable')",
        wants,
        "assert not hasattr(zero_grad, '__dynamo_disable')",
        "assert hasattr(sys.modules['torch._dynamo'], 'optimize')",
        "list(weights(['Adam']))",
        "assert sys.modules['torch._dynamo'] is torch._dynamo and hasattr(torch._dynamo, 'optimize')",
        "double = torch.compile(lambda value: value * 2, backend='eager')",
        "assert double(torch.ones(1)).item() == 2",
    )


@pytest.mark.slow
def test_within_a_step_too() -> None:
    """As an optimizer whose own step is compiled does."""
    python(
        "defer_dynamo()",
        "class Compiled(torch.optim.SGD):",
        "    def step(self):",
        "        torch._dynamo.optimize('eager')",
        "        super().step()",
        "Compiled([torch.ones(1, requires_grad=True)]).step()",
    )


@pytest.mark.slow
def test_a_data_parallel_step_does_not_load_it() -> None:
    python(
        "defer_dynamo()",
        "import torch.distributed as dist",
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))",
        "model(torch.ones(1, 2)).sum().backward()",
        "torch.optim.Adam(model.parameters()).step()",
        "dist.destroy_process_group()",
        f"assert {TRACER!r} not in sys.modules",
    )


@pytest.mark.slow
def test_a_run_never_loads_it(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    cold = {"PYTHONHASHSEED": "0"}  # a new interpreter: what tests are forked from has loaded it
    result = processes.train(
        "job.py", "--nproc", 2, "--sync", "exact", "--microbatch", 4, cwd=tmp_path, env=cold
    )
    assert result["metrics"] == {"loaded": 0}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (None, "all ranks"),
        ([3], "rank 3"),
        ([2, 0], "ranks 0, 2"),
        (range(0, 64, 2), "ranks 0, 2, 4, 6, 8, 10, 12, ..., 62 (32 ranks)"),
    ],
)
def test_the_members_of_a_group_in_words(ranks: Sequence[int] | None, words: str) -> None:
    assert describe_members(ranks) == words
