"""Whoever is on the network reaches no rank of a script under check."""

from __future__ import annotations

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
if not held or any(address not in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for address in held):
    raise SystemExit(f"it listens on {held}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_ranks_under_check_listen_on_loopback_alone(tmp_path: Path) -> None:
    (tmp_path / "listens.py").write_text(LISTENS)
    command = [sys.executable, "-m", "stepladder", "check", "listens.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert "it listens on" not in done.stdout + done.stderr, done.stdout
