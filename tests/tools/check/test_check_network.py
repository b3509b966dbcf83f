"""Whoever is on the network reaches no rank of a script under check."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

LISTENS = """import psutil
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
held = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
if not held or not all(address.removeprefix("::ffff:").startswith(("127.", "::1")) for address in held):
    raise SystemExit(f"it listens on {held}")
dist.barrier()
dist.destroy_process_group()
"""


MEETS_AT_ITS_PORT = """import os
import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "{}"
os.environ["MASTER_PORT"] = "{}"
dist.init_process_group("gloo")
sum_of_ranks = torch.ones(1)
dist.all_reduce(sum_of_ranks)
print("ranks that met:", int(sum_of_ranks))
raise SystemExit(9)
"""


def check(script: str, folder: Path) -> str:
    """Return all that a check says of a script."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "stepladder", "check", "train.py"]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    return ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_under_check_listen_on_loopback_alone(tmp_path: Path) -> None:
    assert "it listens on" not in check(LISTENS, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_meet_at_their_port_though_another_program_listens_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = check(MEETS_AT_ITS_PORT.format("localhost", other.getsockname()[1]), tmp_path)
    assert "ranks that met: 2" in said


@pytest.mark.ranks
@pytest.mark.parametrize("address", [pytest.param("10.128.0.2", marks=pytest.mark.slow), "node001"])
def test_ranks_meet_though_the_address_of_another_machine_is_written_into_the_script(
    address: str, tmp_path: Path
) -> None:
    assert "ranks that met: 2" in check(MEETS_AT_ITS_PORT.format(address, 29500), tmp_path)
