"""Scripts under torchrun that name the back end."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from exchange_ranks import run_torchrun

TRAIN = """\
import stepladder_exchange
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sys

dist.init_process_group(sys.argv[1])
torch.manual_seed(3)
torch.set_num_threads(1)
inner = torch.nn.Sequential(
    torch.nn.Linear(8, 600), torch.nn.BatchNorm1d(600), torch.nn.ReLU(), torch.nn.Linear(600, 1)
)
model = DistributedDataParallel(inner)
optimizer = torch.optim.Adam(model.parameters())
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(8):
    inputs = torch.randn(6, 8, generator=generator)
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    if step % 3:
        optimizer.step()
        optimizer.zero_grad()
total = sum(parameter.double().abs().sum() for parameter in model.parameters())
group = type(dist.group.WORLD).__name__
sys.stdout.write(f"{group} {dist.get_backend()} {total.item()!r}\\n")
dist.destroy_process_group()
"""

AGAIN = """\
import os, sys
import stepladder_exchange
import torch, torch.distributed as dist

rank = int(os.environ["RANK"])
for number in range(10):
    if number and rank == 1:  # a moment ahead: the first rank has not left the group before
        os.write(os.open("ahead", os.O_WRONLY), b"!")
    dist.init_process_group("stepladder")
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    assert total.item() == 2 * number
    if number < 9 and rank == 0:
        os.read(os.open("ahead", os.O_RDONLY), 1)
    dist.destroy_process_group()
sys.stdout.write("ended\\n")
"""

BUSY_AT_THE_END = """\
import os, sys, threading
import stepladder_exchange
import torch, torch.distributed as dist

rank = int(os.environ["RANK"])
store = dist.FileStore("late")
begun = threading.Event()
large = torch.ones(10_000_000)

def add(_):
    begun.set()
    for _ in range(50):
        large.add_(1)

dist.init_process_group("stepladder")
if rank == 1:
    store.wait(["the other rank has a thread"])
work = dist.all_reduce(torch.ones(1), async_op=True)
if rank == 0:
    work.get_future().then(add)
    store.set("the other rank has a thread", "")
    begun.wait()
else:
    work.wait()
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
"""

DIFFERENT_CALLS = """\
import sys
import stepladder_exchange
import torch, torch.distributed as dist

dist.init_process_group("stepladder")
try:
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(4), 0)
    else:
        dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    sys.stdout.write(f"{error}\\n")
"""

KILLED = """\
import os, signal, sys
import stepladder_exchange
import torch, torch.distributed as dist

dist.init_process_group("stepladder")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(4))
except RuntimeError as error:
    sys.stdout.write(f"{error}\\n")
"""


def write_script(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(text)
    return script


def test_a_training_has_the_bits_of_gloo(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    lines = []
    for backend, group in (("stepladder", "SharedMemoryGroup"), ("gloo", "ProcessGroup")):
        ended = run_torchrun(script, 2, backend)
        assert ended.returncode == 0, ended.stderr
        first, second = ended.stdout.splitlines()
        assert first == second and first.startswith(f"{group} {backend} ")
        lines.append(first.split()[-1])
    assert lines[0] == lines[1]


def test_a_rank_that_is_ahead_may_form_the_next_group(tmp_path: Path) -> None:
    """torchrun alone fails here: the store of the group before answers."""
    os.mkfifo(tmp_path / "ahead")
    ended = run_torchrun(write_script(tmp_path, AGAIN), 2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ended") == 2


@pytest.mark.parametrize("end", ["destroy", "leave"])
def test_the_interpreter_ends_after_the_thread_of_a_collective(tmp_path: Path, end: str) -> None:
    ended = run_torchrun(write_script(tmp_path, BUSY_AT_THE_END), 2, end)
    assert ended.returncode == 0, ended.stderr


def test_ranks_that_call_different_collectives_name_both_lines(tmp_path: Path) -> None:
    """And the flight recorder's file has the call of the script."""
    dumps = {"TORCH_FR_BUFFER_SIZE": "10", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dump-"}
    ended = run_torchrun(write_script(tmp_path, DIFFERENT_CALLS), 2, env=dumps)
    calls = (
        "broadcast from rank 0 (4 float32) in <module>(), script.py:8",
        "all_reduce sum (3 float32) in <module>(), script.py:10",
    )
    assert sorted(ended.stdout.splitlines()) == [
        f"rank {1 - rank} calls a different collective here than rank {rank}: {calls[1 - rank]},"
        f" where rank {rank} calls {calls[rank]}"
        for rank in (1, 0)
    ]
    record = pickle.loads((tmp_path / "dump-1").read_bytes())
    assert record["entries"][-1]["frames"] == [
        {"name": "<module>", "filename": str(tmp_path / "script.py"), "line": 10}
    ]


def test_the_other_ranks_name_a_killed_rank(tmp_path: Path) -> None:
    ended = run_torchrun(write_script(tmp_path, KILLED), 3)
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == ["rank 1 has gone"] * 2


@pytest.mark.parametrize("order", ["stepladder_exchange, torch", "torch, stepladder_exchange"])
def test_the_back_end_is_known_whichever_is_imported_first(order: str) -> None:
    code = f"import {order}, sys; print(torch.distributed.is_backend_available('stepladder'))"
    shown = "; print('stepladder_exchange.process_group' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code + shown], capture_output=True, text=True)
    assert ended.stdout.split() == ["True", "False"], ended.stderr


def test_the_import_brings_neither_torch_nor_the_exchange() -> None:
    code = "import stepladder_exchange, sys; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    modules = ended.stdout.split()
    assert "torch" not in modules
    assert {name for name in modules if name.startswith("stepladder")} == {
        "stepladder_exchange",
        "stepladder_exchange.after_import",
        "stepladder_exchange.backend",
        "stepladder_exchange.torch_fixes_store",
    }
