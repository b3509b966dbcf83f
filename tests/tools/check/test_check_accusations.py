"""Scripts without a mistake that a check could accuse: each is run, and nothing wrong is said of
it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from check_recordings import evidence_of, forward, rules_of, step
from pages import EXAMPLES
from stepladder.tools.check.probe import digests, hooks_data
from stepladder.tools.check.probe.hooks_data import AHEAD_ATTRIBUTE, read_ahead
from stepladder.tools.check.probe.patching import WrappedCall
from stepladder.tools.check.probe.probe_log import ProbeLog
from stepladder.tools.check.probe_settings import ProbeSettings
from stepladder.tools.check.rules.all_rules import apply_rules
from stepladder.tools.check.rules.training import learns_nothing

# The slow ones are run by hand.
pytestmark = pytest.mark.corpus

SCRIPTS = Path(__file__).parent / "scripts"
CORPUS = Path(__file__).parents[2] / "check_corpus"
COMPARING = {
    "not-wrapped",
    "same-samples",
    "overlapping-shards",
    "replicas-differ",
    "many-writers",
    "uneven-steps",
}


def run_check(
    folder: Path, script: str, *flags: str, args: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepladder", "check", *flags, script, *args]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )


def checked(
    folder: Path, text: str, *flags: str, args: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any]]:
    (folder / "train.py").write_text(text)
    ran = run_check(folder, "train.py", "--json", *flags, args=args)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def rules(report: dict[str, Any]) -> set[str]:
    return {finding["rule"] for finding in report["findings"]}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_model_that_is_wrapped_only_on_gpus_is_checked_as_on_gpus(tmp_path: Path) -> None:
    """The commonest shape of all: a plain model for a machine without a GPU, and DDP on one with
    GPUs.
    """
    code, report = checked(tmp_path, (SCRIPTS / "wrapped_on_gpus.py").read_text())
    assert (code, report["findings"], report["not_checked"]) == (0, [], None)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_device_that_is_named_by_its_number_alone_is_simulated(tmp_path: Path) -> None:
    code, report = checked(tmp_path, (CORPUS / "stables.py").read_text())
    assert (code, report["findings"], report["not_checked"]) == (0, [], None)


@pytest.mark.slow
@pytest.mark.ranks
def test_what_was_seen_and_written_in_a_start_that_is_repeated_is_forgotten(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "falls_back.py", tmp_path)
    ran = run_check(tmp_path, "falls_back.py")
    assert "missing-zero-grad" not in ran.stdout + ran.stderr
    assert "0 errors, 0 warnings, 0 notes" in ran.stdout
    assert ran.returncode == 0


LOCKS = """
import fcntl, os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
with open("turn.lock", "w") as lock:
    fcntl.LOCK(lock, fcntl.LOCK_EX)
    with open("WRITTEN", "w") as file:
        file.write("rows")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("function", ["flock", "lockf"])
def test_a_file_that_ranks_lock_and_share_is_no_file_of_many_writers(
    function: str, tmp_path: Path
) -> None:
    text = LOCKS.replace("LOCK(", f"{function}(").replace("WRITTEN", "{os.environ['RANK']}")
    own = text.replace('open("{', 'open(f"{')
    assert rules(checked(tmp_path, own, "--notes")[1]) == set()
    shared = text.replace("{os.environ['RANK']}", "rows")
    (finding,) = checked(tmp_path, shared, "--notes")[1]["findings"]
    assert (finding["rule"], finding["line"]) == ("many-writers", 8)


NEEDS_A_GPU = """
import torch
cuda = torch.cuda.is_available()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for step in range(2000):
    if cuda:
        optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
if not cuda:
    raise SystemExit("a GPU is needed")
"""


@pytest.mark.slow
def test_what_was_told_while_a_start_ran_that_is_then_repeated_is_forgotten(tmp_path: Path) -> None:
    """The start without GPUs lasts long enough to be read while it runs."""
    (tmp_path / "train.py").write_text(NEEDS_A_GPU)
    ran = run_check(tmp_path, "train.py")
    assert "missing-zero-grad" not in ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_processes_that_never_meet_are_a_one_process_command(tmp_path: Path) -> None:
    """Workers that train one model in shared memory: two ranks of it would be two commands."""
    code, report = checked(tmp_path, (SCRIPTS / "shared_memory.py").read_text())
    assert (code, report["findings"]) == (0, [])
    assert report["ran"].startswith("1 rank, ")
    assert [
        note
        for note in report["notes"]
        if "does not ask for its rank: it was run as one process" in note
    ]


RANK_OF_THE_ENVIRONMENT = """
import os
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
torch.save(model.state_dict(), f"model-{rank}.pt")
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_one_that_cannot_run_alone_counts_as_run_and_its_ranks_are_not_compared(
    tmp_path: Path,
) -> None:
    code, report = checked(tmp_path, RANK_OF_THE_ENVIRONMENT)
    assert not rules(report) & COMPARING
    assert code == 0
    assert [note for note in report["notes"] if "rules that compare ranks do not apply" in note]


CRASHES = """
import os
import signal
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_crashes_is_not_missed_in_a_collective(tmp_path: Path) -> None:
    code, report = checked(tmp_path, CRASHES)
    assert (code, report["findings"]) == (3, [])
    assert "failed by itself" in report["not_checked"]["line"]


DIVIDED = """
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(data, num_replicas=world, rank=rank)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, 8, sampler=sampler):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_divide_the_samples_are_meant_to_meet(tmp_path: Path) -> None:
    _, report = checked(tmp_path, DIVIDED)
    assert "not-wrapped" in rules(report)


BY_A_MESH = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_group_that_torch_makes_for_a_mesh_is_a_meeting(tmp_path: Path) -> None:
    _, report = checked(tmp_path, BY_A_MESH)
    (finding,) = report["findings"]
    assert finding["rule"] == "not-wrapped" and "never met" not in finding["evidence"]
    assert report["notes"] == []


TENSOR_PARALLEL = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_of_a_tensor_parallel_model_read_the_same_samples_rightly(tmp_path: Path) -> None:
    code, report = checked(tmp_path, TENSOR_PARALLEL)
    assert (code, report["findings"]) == (0, [])
    assert report["notes"] == [
        "the script is not data parallel: rules that compare ranks do not apply"
    ]
    assert report["ran"].startswith("the first of 2 ranks, ")


NAMES_PIPELINES = """
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import parallelize_module
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_data_parallel_script_may_import_what_divides_models_for_others(tmp_path: Path) -> None:
    (tmp_path / "others.py").write_text(NAMES_PIPELINES)
    _, report = checked(tmp_path, f"import others\n{BY_A_MESH}")
    assert [finding["rule"] for finding in report["findings"]] == ["not-wrapped"]
    assert report["notes"] == []


PIPELINE = """
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(4, 4)
stage = PipelineStage(model, rank, world, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(torch.randn(8, 4))
    else:
        schedule.step(target=torch.randn(8, 4))
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_are_stages_of_a_pipeline_are_not_compared(tmp_path: Path) -> None:
    code, report = checked(tmp_path, PIPELINE)
    assert (code, report["findings"]) == (0, [])
    assert report["notes"] == [
        "the script is not data parallel: rules that compare ranks do not apply"
    ]


def test_the_users_code_lies_below_a_root_and_not_beside_it(tmp_path: Path) -> None:
    settings = ProbeSettings(str(tmp_path), ("/me/train",), "/me/train/copy", "/me/train")
    log = ProbeLog(settings)
    os.close(log.file)
    assert log.is_user_file("/me/train/model.py")
    assert not log.is_user_file("model.py")
    assert not log.is_user_file("/me/train-libraries/model.py")


def test_a_file_that_runpy_knows_by_a_relative_name_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path)
    log = ProbeLog(ProbeSettings(folder, (folder,), folder, folder))
    os.close(log.file)
    assert log.is_user_file("model.py") and not log.is_user_file("<string>")
    assert log.absolute_name("../model.py") == str(tmp_path.parent / "model.py")


@pytest.mark.slow
def test_frozen_parameters_are_not_expected_to_have_a_gradient(tmp_path: Path) -> None:
    code, report = checked(tmp_path, (SCRIPTS / "momentum_encoder.py").read_text())
    assert (code, report["findings"]) == (0, [])


def steps_with(frozen: list[str], grads: dict[str, str]) -> list[dict[str, Any]]:
    before = {"w": "w", "head": "h"}
    events: list[dict[str, Any]] = []
    for number in (1, 2, 3):
        events_of_step = step(number, before=before, frozen_names=frozen)
        events_of_step[0] |= {"grads": grads, "norm": 1.0 if grads else 0.0}
        events += [forward(), *events_of_step]
    return events


def test_only_a_frozen_parameter_is_left_out() -> None:
    assert rules_of(steps_with([], {"w": "g"})) == ["no-gradient"]
    assert rules_of(steps_with(["head"], {"w": "g"})) == []


def test_an_optimizer_of_frozen_parameters_is_named_as_that_and_by_no_guess() -> None:
    (finding,) = apply_rules(evidence_of(steps_with(["w", "head"], {})))
    assert finding.rule == "frozen-optimizer"
    assert "all 2 parameters of the optimizer have requires_grad=False" in finding.evidence
    assert "class" not in finding.fix
    (guess,) = learns_nothing(evidence_of(steps_with(["w"], {})))
    assert "class" in guess.fix


FAILS = {
    "script": (
        "import torch\nassert torch.cuda.is_available()\ntorch.nn.Linear(2, 2).cuda()(torch.ones(3, 3))\n",
        "the script failed by itself, as above",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
    "simulation": (
        "import torch\ntorch.nn.Linear(2, 2).cuda()\nprint(torch.cuda.caching_allocator_alloc(16))\n",
        "this check cannot run it: ",
        "torch.cuda.caching_allocator_alloc(16)",
    ),
    "object of the simulation": (
        "import torch\nprint(torch.cuda.Stream().priority)\n",
        "this check cannot run it: ",
        "SimulatedStream has no priority: it is not simulated",
    ),
    "probe": (
        "import torch\nw = torch.ones(2, requires_grad=True)\noptimizer = torch.optim.SGD([w], 0.1)\n"
        "w.sum().backward()\noptimizer.param_groups.append({'lr': 1})\n"
        "type(optimizer).step = torch.optim.Optimizer.profile_hook_step(lambda self: None)\noptimizer.step()\n",
        "this check cannot run it: KeyError: 'params'",
        "optimizer.step()",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "simulation")) for name in FAILS],
)
def test_exit_code_3_says_who_failed(name: str, tmp_path: Path) -> None:
    text, line, output = FAILS[name]
    (tmp_path / "train.py").write_text(text)
    ran = run_check(tmp_path, "train.py")
    assert ran.returncode == 3, ran.stdout
    assert line in ran.stdout and output in ran.stdout
    assert ("failed by itself" in ran.stdout) == (name == "script")
    assert "copy/train.py" not in ran.stdout


NO_STEP = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
epochs = parser.parse_args().epochs
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(epochs):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    print("value", model(torch.ones(1, 2)).shape)
"""


@pytest.mark.slow
def test_a_script_that_trains_nothing_has_not_passed(tmp_path: Path) -> None:
    code, report = checked(tmp_path, NO_STEP, "--sarif", "out.sarif", args=("--epochs", "0"))
    assert (code, report["ok"], report["failed"], report["findings"]) == (3, False, "", [])
    assert report["not_checked"]["cause"] == "no training"
    assert report["not_checked"]["line"].startswith("no training was seen")
    assert "value" in report["not_checked"]["output"]
    (ended,) = json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["invocations"]
    assert (ended["executionSuccessful"], ended["exitCode"]) == (False, 3)
    assert (
        ended["toolExecutionNotifications"][0]["message"]["text"] == report["not_checked"]["line"]
    )


STANDS_STILL = """
import threading
import torch
class Net(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 4:
            threading.Event().wait()
        return super().forward(x)
model = Net(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_that_stands_still_without_an_explanation_has_not_passed(tmp_path: Path) -> None:
    code, report = checked(tmp_path, STANDS_STILL, "--patience", "3")
    assert (code, report["findings"], report["not_checked"]["cause"]) == (3, [], "script")
    assert "it stood still for 3 s" in report["failed"]


@pytest.mark.slow
def test_a_hang_before_training_is_said_first(tmp_path: Path) -> None:
    code, report = checked(tmp_path, (EXAMPLES / "lock_and_barrier.py").read_text())
    assert (code, "hang" in rules(report)) == (1, True)
    assert report["not_checked"]["line"].startswith("the script hung before it trained")


BY_VALUE = """
import torch
weight = torch.zeros(3, requires_grad=True)
for step in range(3):
    (gradient,) = torch.autograd.grad((weight - step).square().sum(), weight)
    weight = (weight - 0.1 * gradient).detach().requires_grad_()
"""


@pytest.mark.slow
def test_gradients_that_are_taken_as_values_are_training(tmp_path: Path) -> None:
    code, report = checked(tmp_path, BY_VALUE)
    assert (code, report["not_checked"]) == (0, None)


def test_a_tensor_can_be_resized_after_it_was_hashed() -> None:
    parameter = nn.Parameter(torch.randn(4, 2))
    assert len(digests.digest(parameter)) == 12
    assert len(digests.row_digests([parameter])) == 4
    parameter.untyped_storage().resize_(0)
    assert parameter.untyped_storage().nbytes() == 0


INNER = """
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(7):
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_of_an_optimizer_within_another_one_counts_once(tmp_path: Path) -> None:
    code, report = checked(tmp_path, INNER)
    assert (code, report["findings"]) == (0, [])
    assert "7 steps on each" in report["ran"]


def test_a_loader_with_batches_of_its_own_has_their_sampler() -> None:
    data = list(range(10))
    batches = BatchSampler(DistributedSampler(data, 2, 0), batch_size=2, drop_last=True)
    described = hooks_data.describe_loader(DataLoader(data, batch_sampler=batches))
    names = ("settable", "distributed", "shuffle", "drop_last")
    assert [described[name] for name in names] == [True] * 4


def test_batches_that_are_read_ahead_are_recorded_when_the_script_gets_them() -> None:
    written: list[str] = []

    def read(loader: SimpleNamespace) -> Iterator[int]:
        state = hooks_data.PassState(ahead=getattr(loader.base_dataloader, AHEAD_ATTRIBUTE))
        for number in range(3):
            state.write(partial(written.append, f"batch {number}"))
            if number:
                yield number - 1
        state.write(partial(written.append, "end"))
        yield number

    loader = SimpleNamespace(base_dataloader=SimpleNamespace())
    for number in read_ahead(WrappedCall(read, (loader,), {})):
        assert written == [f"batch {index}" for index in range(number + 1)]
    assert written == ["batch 0", "batch 1", "batch 2", "end"]
    assert vars(loader.base_dataloader) == {}
