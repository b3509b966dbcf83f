"""One script on two nodes, which are two launchers on this machine: they meet, fail and restart
together.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from processes import JOBS, SECONDS, started
from stepladder.core.address import find_free_port

pytestmark = pytest.mark.ranks


def nodes(folder: Path, flags: list[tuple[object, ...]], *script: object) -> list[Any]:
    """One `run` for each entry of flags, at the same time: (exit code, stdout, stderr)."""
    with ExitStack() as stack:
        commands = [("run", "--timeout", SECONDS, *f, *script) for f in flags]
        agents = [stack.enter_context(started(*each, cwd=folder)) for each in commands]
        return [(agent.end(), agent.out.read_text(), agent.err.read_text()) for agent in agents]


def own_addresses() -> dict[str, str]:
    """Of this machine, beside loopback and link-local: by "4" and "6"."""
    reports = {}
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                reports["4"] = entry.address
            if (
                entry.family == socket.AF_INET6
                and entry.address != "::1"
                and not entry.address.startswith("fe80")
            ):
                reports["6"] = f"[{entry.address.partition('%')[0]}]"
    return reports


def test_two_nodes_run_the_tutorial_s_script(tmp_path: Path) -> None:
    node_flags = (
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint",
        f"127.0.0.1:{find_free_port()}",
    )
    flags = [(*node_flags, "--local-addr", "127.0.0.1")] * 2
    ended = nodes(tmp_path, flags, JOBS / "tutorial.py", 1, 1, "--batch-size", 128)
    assert [code for code, *_ in ended] == [0, 0], ended
    text = "".join(out for _, out, _ in ended)
    assert sorted(text.splitlines()) == [
        f"[rank {rank}] [GPU{rank}] Epoch 0 | Batchsize: 128 | Steps: 8" for rank in (0, 1)
    ]
    assert "stepladder: nodes 2, ranks 2" in "".join(err for *_, err in ended)


@pytest.mark.slow
def test_two_nodes_meet_over_ipv6_by_rank_and_name_the_first_failure(tmp_path: Path) -> None:
    address = own_addresses().get("6")
    if address is None:
        pytest.skip("this machine has no IPv6 address but loopback")
    (tmp_path / "two.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 1: raise KeyError('the cause')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    node_flags = "--nnodes=2", "--master_addr", address, "--master_port", find_free_port()
    ended = nodes(tmp_path, [(*node_flags, "--node_rank", rank) for rank in (0, 1)], "two.py")
    assert [code for code, *_ in ended] == [1, 1], ended
    assert "ended by node 1: rank 1 failed: KeyError: 'the cause'" in ended[0][2]
    assert "Traceback" not in ended[0][2] and ended[1][2].count("Traceback") == 1


@pytest.mark.slow
def test_a_lost_rank_restarts_both_nodes(tmp_path: Path) -> None:
    node_flags = (
        "--nodes",
        2,
        "--max-restarts",
        2,
        "--rdzv-endpoint",
        f"127.0.0.1:{find_free_port()}",
    )
    (tmp_path / "two.py").write_text(
        "import os, pathlib, signal, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1 and not pathlib.Path('marker').exists():\n"
        "    pathlib.Path('marker').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print('done', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    ended = nodes(tmp_path, [(*node_flags, "--local-addr", "127.0.0.1")] * 2, "two.py")
    assert [code for code, *_ in ended] == [0, 0], ended
    assert sorted(out for _, out, _ in ended) == ["[rank 0] done 1\n", "[rank 1] done 1\n"]
