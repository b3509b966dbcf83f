"""`doctor --comm` between nodes that have a network of their own: measured, slowed, and cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from labs import TestLab
from processes import run

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MEASURE = "-m", "stepladder", "doctor", "--comm"


def test_all_reduce_is_measured_over_nodes_and_on_one_against_the_link(
    lab: TestLab, tmp_path: Path
) -> None:
    """Typed in an allocation: it starts itself on its nodes."""
    output = lab.slurm(
        "salloc", "-N2", "stepladder", "doctor", "--comm", "--nproc", 2, "--json", cwd=tmp_path
    )
    link = json.loads(output.splitlines()[-1])["comm"]
    assert (link["ranks"], link["nodes"], link["limit"]) == (4, 2, 1.25), (
        "a veth says that it has 10 Gbit/s"
    )
    assert link["stream"] > 0
    for speeds in (link["speeds"], link["within"]):
        assert speeds[0]["bytes"] == 4 and len(speeds) > 5
        assert all(speed["microseconds"] > 0 for speed in speeds)


@contextmanager
def changed(lab: TestLab, node: str, add: str, remove: str) -> Iterator[None]:
    lab.lab("exec", "--node", node, "--", *add.split())
    try:
        yield
    finally:
        lab.lab("exec", "--node", node, "--", *remove.split())


def test_a_link_that_is_slower_than_it_says_is_named(lab: TestLab, tmp_path: Path) -> None:
    slow = "tc qdisc add dev eth0 root tbf rate 160mbit burst 64kb latency 50ms"
    with changed(lab, "n2", slow, "tc qdisc del dev eth0 root"):
        output = lab.slurm(
            "salloc", "-N2", "stepladder", "run", "--nproc", 1, *MEASURE, cwd=tmp_path
        )
    assert "all_reduce over 2 nodes, 2 ranks, gloo; the link has 1.25 GB/s by its driver" in output
    assert "warning link-slow: one plain TCP connection carries 0.0" in output
    assert "link-speed" not in output, "all_reduce reaches what that link carries"


def test_nodes_with_no_way_between_them_are_named(lab: TestLab, tmp_path: Path) -> None:
    first = lab.nodes()["n1"]["address"]
    with changed(
        lab, "n2", f"ip route add blackhole {first}/32", f"ip route del blackhole {first}/32"
    ):
        step = (
            "srun",
            "-N2",
            "--ntasks-per-node=1",
            "--nodelist=n1,n2",
            "stepladder",
            "doctor",
            "--comm",
        )
        done = run(*step, cwd=tmp_path, env=lab.env, command=())
    assert done.returncode == 1, done.stderr
    assert (
        f"error no-way-between-ranks: rank 1 on n2 had no way to the others, at {first}: "
        in done.stdout
    )
    assert "error no-way-between-ranks: rank 0 on n1 had no way to the others" in done.stdout
    assert "Traceback" not in done.stderr and "frame #" not in done.stderr
