"""Ranks on several machines: two launchers, of which one cannot see the processes of the other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from processes import COMMAND, Started, started
from stepladder.core.address import find_free_port

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

APART = "unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", *COMMAND
WITHIN_AND_BETWEEN = (
    "the ranks exchange tensors in shared memory within each of 2 machines, by gloo between them"
)

ALL = """\
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
LENGTHS = 0, 1, 17, 200_000  # the last does not fit into a half of a slot


def draw(rank, length):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def check(result, expected):
    assert torch.equal(result, expected), (result, expected)


for length in LENGTHS:
    a, b, c, d = (draw(source, length) for source in range(size))
    total = draw(rank, length)
    work = dist.all_reduce(total, async_op=True)
    mean = draw(rank, length)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    work.wait()
    check(total, (a + b) + (c + d))
    check(mean, ((a + b) + (c + d)) / 4)
    most = draw(rank, length).to(torch.bfloat16)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    check(most, torch.stack([a, b, c, d]).amax(0).to(torch.bfloat16))
    for root in range(size):
        message = draw(rank, length)
        dist.broadcast(message, root)
        check(message, draw(root, length))
    parts = [torch.empty(length) for _ in range(size)]
    dist.all_gather(parts, draw(rank, length))
    check(torch.stack(parts), torch.stack([a, b, c, d]))
    sent = [[draw(10 * source + n, length) for n in range(size)] for source in range(size)]
    expected = (sent[0][rank] + sent[1][rank]) + (sent[2][rank] + sent[3][rank])
    own = torch.empty(length)
    dist.reduce_scatter(own, sent[rank])
    check(own, expected)
    own = torch.empty(length)
    dist.reduce_scatter_tensor(own, torch.cat(sent[rank]), dist.ReduceOp.AVG)
    check(own, expected / 4)
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert [value["rank"] for value in objects] == list(range(size))
uneven = dist.new_group([0, 2, 3])  # one of its machines has only one of its ranks
within = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][rank // 2]
for group in (uneven, within):
    total = torch.tensor([float(rank)])
    if dist.get_rank(group) >= 0:
        dist.all_reduce(total, group=group)
        assert total.item() == sum(dist.get_process_group_ranks(group))
        dist.barrier(group)
dist.barrier()
print(uneven.obstacle if rank == 0 else "", within._network, flush=True)
dist.destroy_process_group()
"""

# gloo's threads free the tensor of a sum while the next call comes.
SUMS_AND_BARRIERS = """\
import torch, torch.distributed as dist

dist.init_process_group("gloo")
group = dist.distributed_c10d._get_default_group()
for _ in range(3_000):
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    outputs = [torch.zeros(2)]
    group.all_gather_single_coalesced(outputs, [torch.ones(1)]).wait()
print(outputs, flush=True)
dist.destroy_process_group()
"""

KILLED = """\
import os, signal, sys, torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
if rank == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
for attempt in range(2):
    try:
        while True:
            dist.CALL
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
"""


# The victim ends when its first number has come: all of them take longer than that.
IN_THE_MIDDLE = """\
import os, signal, sys, threading, torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
victim = int(sys.argv[1])
numbers = torch.zeros(60_000_000)
dist.barrier()


def await_first_number():
    while not numbers[0]:
        pass
    os.close(os.open("begun", os.O_WRONLY))


def await_end():
    os.open("begun", os.O_RDONLY)
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_WHILE_IT_SENDS = """
if rank == victim:
    numbers.fill_(1.0)
    threading.Thread(target=await_end, daemon=True).start()
elif rank == 2 - victim:  # the leader of the other machine
    threading.Thread(target=await_first_number, daemon=True).start()
for attempt in range(2):
    try:
        while True:
            dist.broadcast(numbers, victim)
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
"""


CUT_OFF = """
sends = (rank == victim) == (sys.argv[2] == "sends")
if rank == victim:
    threading.Thread(target=await_end, daemon=True).start()
if not sends:
    threading.Thread(target=await_first_number, daemon=True).start()
try:
    while rank % 2 == 0:
        if sends:
            dist.send(numbers.fill_(1.0), 2 - rank)
        else:
            dist.recv(numbers, 2 - rank)
    dist.barrier()
except RuntimeError as error:
    print(f"rank {rank}: {error}", flush=True)
"""


DIFFERENT = """\
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
try:
    dist.all_reduce(torch.ones(5 if rank == 3 else 4))
except RuntimeError as error:
    print(f"rank {rank}: {error}", flush=True)
"""


@contextmanager
def two_machines(folder: Path, *arguments: object, nproc: int = 2) -> Iterator[list[Started]]:
    """A launcher of some ranks on each of two machines, as far as processes can tell."""
    if shutil.which("unshare") is None or subprocess.run([*APART[:-3], "true"]).returncode:
        pytest.skip("no namespace of processes can be made here")
    place = "--nodes", 2, "--nproc", nproc, "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}"
    line = "run", *place, "--local-addr", "127.0.0.1", *arguments
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(*line, cwd=folder, command=command))
            for command in (COMMAND, APART)
        ]


def read_all(machines: list[Started]) -> tuple[str, str]:
    """What they have printed, and what they have said."""
    return (
        "".join(machine.out.read_text() for machine in machines),
        "".join(machine.err.read_text() for machine in machines),
    )


Lose = Callable[..., tuple[str, str]]


@pytest.fixture
def lose_in_the_middle(tmp_path: Path) -> Lose:
    """Run a script after IN_THE_MIDDLE; return what the machines have printed, and have said."""

    def lose(script: str, *arguments: object) -> tuple[str, str]:
        (tmp_path / "killed.py").write_text(IN_THE_MIDDLE + script)
        os.mkfifo(tmp_path / "begun")
        with two_machines(tmp_path, tmp_path / "killed.py", *arguments) as machines:
            codes = [machine.end() for machine in machines]
        assert any(codes)
        return read_all(machines)

    return lose


def test_collectives_of_two_machines_are_those_of_gloo_summed_by_machine(tmp_path: Path) -> None:
    script = tmp_path / "all.py"
    script.write_text(ALL)
    with two_machines(tmp_path, script) as machines:
        codes = [machine.end() for machine in machines]
    printed, said = read_all(machines)
    assert codes == [0, 0], said
    assert WITHIN_AND_BETWEEN in said
    assert printed.count("a machine has only one of the ranks None") == 1
    assert printed.count("None") == 4


def test_gloo_that_frees_a_tensor_and_a_call_of_python_do_not_wait_for_each_other(
    tmp_path: Path,
) -> None:
    script = tmp_path / "sums.py"
    script.write_text(SUMS_AND_BARRIERS)
    with two_machines(tmp_path, script, nproc=1) as machines:
        codes = [machine.end() for machine in machines]
    printed, said = read_all(machines)
    assert codes == [0, 0], said
    assert "a machine has only one of the ranks" in said
    assert printed.count("[tensor([1., 1.])]") == 2


@pytest.mark.parametrize(
    "call", ["all_reduce(torch.ones(40_000))", "all_reduce(torch.eye(3).to_sparse())"]
)
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_rank_that_is_lost_on_one_machine_is_named_on_all(
    tmp_path: Path, victim: int, call: str
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED.replace("CALL", call))
    with two_machines(tmp_path, script, victim) as machines:
        codes = [machine.end() for machine in machines]
    assert any(codes)
    printed, _ = read_all(machines)
    for rank in {0, 1, 2, 3} - {victim}:
        assert printed.count(f"rank {rank}: rank {victim} has gone\n") == 2, printed


@pytest.mark.parametrize(
    ("victim", "message"), [(2, "rank 2 has gone"), (0, "another machine does not answer")]
)
def test_a_rank_that_is_lost_while_it_sends_leaves_no_other_machine_waiting(
    lose_in_the_middle: Lose, victim: int, message: str
) -> None:
    """gloo does not tell who waits for data on their way. Rank 0 takes the store with it."""
    printed, _ = lose_in_the_middle(KILLED_WHILE_IT_SENDS, victim)
    for rank in (2 - victim, 3 - victim):  # of the other machine
        assert printed.count(f"rank {rank}: {message}") == 2, printed


def test_different_calls_on_one_machine_are_named_there_and_end_the_others(tmp_path: Path) -> None:
    script = tmp_path / "different.py"
    script.write_text(DIFFERENT)
    with two_machines(tmp_path, script) as machines:
        for machine in machines:
            machine.end()
    printed, _ = read_all(machines)
    for own, other, length in ((2, 3, 5), (3, 2, 4)):
        assert (
            f"rank {own}: rank {other} passes another size here than rank {own}:"
            f" all_reduce sum ({length} float32) in <module>(), different.py:7, where" in printed
        ), printed
    assert len(re.findall("rank [01]: ", printed)) == 2, printed


@pytest.mark.parametrize(
    ("victim", "verb", "message"),
    [
        (2, "sends", "rank 2 has gone"),
        (2, "receives", "rank 2 has gone"),
        (0, "sends", "another machine does not answer"),
    ],
)
def test_a_message_to_another_machine_that_is_cut_off_is_awaited_no_longer(
    lose_in_the_middle: Lose, victim: int, verb: str, message: str
) -> None:
    """The other rank of the victim's machine, which is in a collective, tells of its end."""
    printed, said = lose_in_the_middle(CUT_OFF, victim, verb)
    assert printed.count(f"rank {2 - victim}: {message}") == 1, printed + said


def test_another_machine_does_not_answer_when_it_took_the_store_with_it(tmp_path: Path) -> None:
    """The store, through which machines tell each other of a loss, is in the process of rank 0."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.replace("CALL", "barrier()"))
    with two_machines(tmp_path, script, 0) as machines:
        codes = [machine.end() for machine in machines]
    assert any(codes)
    printed, _ = read_all(machines)
    assert printed.count("rank 1: rank 0 has gone\n") == 2, printed
    for rank in (2, 3):
        assert len(re.findall(f"rank {rank}: another machine does not answer", printed)) == 2
