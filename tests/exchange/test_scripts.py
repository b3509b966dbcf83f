"""Unmodified scripts under `run`: they get shared memory, gloo's results, and news of a lost rank."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from processes import JOBS, run

pytestmark = pytest.mark.ranks

IN_MEMORY = "the ranks exchange tensors in shared memory"
TRAIN = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ARGUMENTS
torch.manual_seed(3)
torch.set_num_threads(1)
inner = torch.nn.Sequential(
    torch.nn.Linear(8, 600), torch.nn.BatchNorm1d(600), torch.nn.ReLU(), torch.nn.Linear(600, 1)
)
model = DistributedDataParallel(inner, OPTIONS)
optimizer = torch.optim.Adam(model.parameters())
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(8):
    inputs = torch.randn(6, 8, generator=generator)
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    if step % 3:
        optimizer.step()
        optimizer.zero_grad()
total = sum(parameter.double().abs().sum() for parameter in model.parameters())
print(type(dist.group.WORLD).__name__, dist.get_backend(), repr(total.item()))
dist.destroy_process_group()
"""


def trained(
    folder: Path,
    *flags: object,
    arguments: str = 'dist.init_process_group("gloo")',
    options: str = "",
) -> tuple[list[str], str]:
    """The last words of each rank, without its number, and what the command said."""
    script = folder / "train.py"
    script.write_text(TRAIN.replace("ARGUMENTS", arguments).replace("OPTIONS", options))
    ended = run("run", *flags, script, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return sorted(line.split("] ")[-1] for line in ended.stdout.splitlines()), ended.stderr


DDP_OPTIONS = "static_graph=True", "find_unused_parameters=True", "gradient_as_bucket_view=True"


@pytest.mark.parametrize(
    "options", ["", *(pytest.param(option, marks=pytest.mark.slow) for option in DDP_OPTIONS)]
)
def test_ddp_gives_the_bits_of_gloo_on_two_ranks(tmp_path: Path, options: str) -> None:
    ours, said = trained(tmp_path, "--nproc", 2, options=options)
    theirs, of_gloo = trained(tmp_path, "--nproc", 2, "--exchange", "gloo", options=options)
    assert IN_MEMORY in said and IN_MEMORY not in of_gloo
    assert ours == [line.replace("ProcessGroup", "SharedMemoryGroup") for line in theirs]
    assert ours[0].startswith("SharedMemoryGroup gloo") and len(set(ours)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        "dist.init_process_group()",
        pytest.param('dist.init_process_group("cpu:gloo,cuda:gloo")', marks=pytest.mark.slow),
    ],
)
def test_whatever_names_gloo_shares_memory(tmp_path: Path, arguments: str) -> None:
    said, _ = trained(tmp_path, "--nproc", 3, "--start-method", "spawn", arguments=arguments)
    assert all(line.startswith("SharedMemoryGroup") for line in said) and len(set(said)) == 1


def test_more_ranks_than_read_each_other_use_gloo_and_say_so(tmp_path: Path) -> None:
    script = tmp_path / "nine.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "one = torch.ones(1)\n"
        "dist.all_reduce(one)\n"
        "print(one.item())\n"
    )
    ended = run("run", "--nproc", 9, script, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("9.0") == 9
    assert "exchange tensors by gloo: more than 8 ranks share none" in ended.stderr


def test_what_torch_builds_on_collectives_gives_the_bits_of_gloo(tmp_path: Path) -> None:
    """Hooks of DDP, no_sync, ZeroRedundancyOptimizer, Join, FSDP2 with checkpoints, DTensor."""
    printed = []
    for exchange in ("memory", "gloo"):
        flags = "--nproc", 2, "--exchange", exchange
        ended = run("run", *flags, JOBS / "many_ways.py", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert (IN_MEMORY in ended.stderr) == (exchange == "memory")
        printed.append(sorted(line.split("] ")[-1] for line in ended.stdout.splitlines()))
    assert printed[0] == printed[1] and len(printed[0]) == 16


KILLED = """\
import os, select, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
pids = [None] * 3
dist.all_gather_object(pids, os.getpid())
if rank == 2:
    ended = os.pidfd_open(pids[1])
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 2:  # it comes to the collective when the other has gone already
    select.select([ended], [], [])
for attempt in range(2):
    try:
        CALL
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
"""


CALLS = {  # all but the first are carried by gloo
    "shared": "dist.all_reduce(torch.ones(4))",
    "sparse": "dist.all_reduce(torch.ones(4).to_sparse())",
    "monitored": "dist.monitored_barrier()",
    "message": "dist.recv(torch.ones(1), 1)",
}


@pytest.mark.parametrize(
    "call",
    ["shared", "sparse", *(pytest.param(n, marks=pytest.mark.slow) for n in CALLS if n[0] != "s")],
)
def test_a_killed_rank_is_named_in_the_exception_of_all_others(tmp_path: Path, call: str) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED.replace("CALL", CALLS[call]))
    ended = run("run", "--nproc", 3, script, cwd=tmp_path)
    assert ended.returncode != 0
    for rank in (0, 2):
        assert ended.stdout.count(f"rank {rank}: rank 1 has gone") == 2


@pytest.mark.parametrize(
    ("kind", "lengths", "functions", "difference", "cause"),
    [
        (
            "alone",
            (1, 5),
            ("log_loss", "main"),
            "calls a different collective",
            "take different branches",
        ),
        ("shapes", (6, 7), ("hang", "hang"), "passes another size", ""),
    ],
)
def test_ranks_that_call_different_collectives_name_both_calls(
    kind: str,
    lengths: tuple[int, ...],
    functions: tuple[str, ...],
    difference: str,
    cause: str,
    tmp_path: Path,
) -> None:
    """gloo aborts the process in one case, and mixes up numbers in the other."""
    ended = run(
        *("run", "--nproc", 2, JOBS / "hangs_script.py"), cwd=tmp_path, env={"HANG": f"{kind} 3"}
    )
    assert ended.returncode == 1
    calls = [
        rf"all_reduce sum \({lengths[rank]} float32\) in {functions[rank]}\(\), hangs_script.py:\d+"
        for rank in range(2)
    ]
    assert any(
        re.search(
            f"rank {rank} failed: RuntimeError: rank {1 - rank} {difference} here"
            f" than rank {rank}: {calls[1 - rank]}, where rank {rank} calls {calls[rank]}\n",
            ended.stderr,
        )
        for rank in range(2)
    ), ended.stderr
    assert ended.stderr.count(f"{difference} here") == 1, ended.stderr
    assert "stepladder: cause: " in ended.stderr and cause in ended.stderr
    frames = re.findall(r"File \"(.*?)\", line", ended.stderr)
    assert frames and {Path(frame).name for frame in frames} == {"hangs_script.py"}


AGAIN = """\
import os
import torch, torch.distributed as dist

rank = int(os.environ["RANK"])
for number in range(10):
    if number and rank == 1:  # a moment ahead: the first rank has not left the group before
        os.write(os.open("ahead", os.O_WRONLY), b"!")
    dist.init_process_group("gloo")
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    assert total.item() == 2 * number
    if number < 9 and rank == 0:
        os.read(os.open("ahead", os.O_RDONLY), 1)
    dist.destroy_process_group()
print("ended", type(dist.group.WORLD).__name__)
"""


def test_a_rank_that_is_ahead_may_form_the_next_group(tmp_path: Path) -> None:
    """Each of torch's own launchers fails here: the store of the group before answers."""
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    os.mkfifo(tmp_path / "ahead")
    ended = run("run", "--nproc", 2, script, cwd=tmp_path)
    assert ended.stderr.count(IN_MEMORY) == 1
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ended") == 2


FORMED_AGAIN = """\
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for number in range(20):
    group = dist.new_group([0, 1], use_local_synchronization=True)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 2
    dist.destroy_process_group(group)
print("ended", type(group).__name__)
"""


@pytest.mark.slow
def test_a_group_of_some_ranks_may_be_formed_again_and_again(tmp_path: Path) -> None:
    """gloo alone hangs here: a rank reads where the others were in the group before."""
    script = tmp_path / "formed_again.py"
    script.write_text(FORMED_AGAIN)
    ended = run("run", "--nproc", 2, script, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ended SharedMemoryGroup") == 2


DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


@pytest.mark.parametrize(
    ("nproc", "env"),
    [
        (3, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(4, DETAIL, marks=pytest.mark.slow),
    ],
)
def test_groups_of_some_ranks_get_what_gloo_gives(
    tmp_path: Path, nproc: int, env: dict[str, str]
) -> None:
    printed = []
    for exchange in ("memory", "gloo"):
        flags = "--nproc", nproc, "--exchange", exchange
        ended = run("run", *flags, JOBS / "sub_groups.py", cwd=tmp_path, env=env)
        assert ended.returncode == 0, ended.stderr
        assert (IN_MEMORY in ended.stderr) == (exchange == "memory" and not env)
        assert ("DETAIL compares" in ended.stderr) == (exchange == "memory" and bool(env))
        printed.append(sorted(ended.stdout.splitlines()))
    assert printed[0] == printed[1] and len(printed[0]) == nproc


@pytest.mark.slow
def test_a_script_of_one_rank_is_not_told_how_ranks_exchange(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    ended = run("run", "--nproc", 1, script, cwd=tmp_path)
    assert ended.returncode == 0 and "the ranks exchange" not in ended.stderr
