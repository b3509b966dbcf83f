"""A network that loses messages: loopback with a queue that is too short, in a namespace of a test's
own."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from processes import COMMAND, run

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

UNSHARE = "unshare", "--net", *(() if os.geteuid() == 0 else ("--map-root-user",))
# What a queue of so many bytes cannot take is dropped. TCP sends it again; a segment that is longer
# than the queue is dropped each time.
QUEUES = {"loses messages": (1500, 20_000), "loses every long message": (65_536, 8_000)}
LOSE = """
ip link set lo up mtu {mtu} && tc qdisc add dev lo root tbf rate 200mbit burst 64k limit {limit} || exit 99
"$@"
code=$?
tc -s qdisc show dev lo
exit $code
"""
SCRIPT = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
values = torch.arange(100_000.0) + dist.get_rank()
for _ in range(4):
    dist.all_reduce(values)
print(f"the sum is {values.double().sum().item()}")
dist.barrier()
dist.destroy_process_group()
"""
SUM = 8 * sum(2 * value + 1 for value in range(100_000))


def run_on(queue: str, folder: Path) -> subprocess.CompletedProcess[str]:
    mtu, limit = QUEUES[queue]
    (folder / "sums.py").write_text(SCRIPT)
    command = (*UNSHARE, "sh", "-c", LOSE.format(mtu=mtu, limit=limit), "sh", *COMMAND)
    try:
        done = run(
            "run", "--nproc", 2, "--exchange", "gloo", "sums.py", cwd=folder, command=command
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare, which makes a network of a test's own")
    if done.returncode in (1, 99, 127) and "qdisc tbf" not in done.stdout:
        pytest.skip(f"no network can be made to lose messages here: {done.stderr}")
    dropped = re.search(r"dropped (\d+)", done.stdout)
    assert dropped is not None and int(dropped[1]) > 0, done.stdout
    return done


def test_messages_that_are_lost_are_sent_again(tmp_path: Path) -> None:
    done = run_on("loses messages", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"the sum is {float(SUM)}") == 2, done.stdout


def test_where_no_message_arrives_gloo_s_error_is_shown_with_the_user_s_line(
    tmp_path: Path,
) -> None:
    done = run_on("loses every long message", tmp_path)
    assert done.returncode == 1
    assert re.search(r"rank \d failed: RuntimeError: .*Connection timed out", done.stderr)
    assert "dist.all_reduce(values)" in done.stderr
