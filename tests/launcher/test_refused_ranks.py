"""Bad input of ranks that another launcher has started: one message, connected or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import JOBS
from tasks import RANKS, said_by, tasks

pytestmark = pytest.mark.ranks

SLOW = pytest.mark.slow
OWN = "train", JOBS / "augmented.py"
CASES = {
    "a job that is not there": (("train", "nowhere.py"), "job file nowhere.py does not exist"),
    "other seeds": (
        (*OWN, "--seed", "1{rank}"),
        "seed is 10 on rank 0, and 11 on rank 1. HINT: start all ranks",
    ),
    "a command for one": (("audit", "nowhere"), "nowhere is not a run directory"),
    "a flag that there is not": ((*OWN, "--no-such"), "No such option"),
    "too many steps": ((*OWN, "--steps", "1000000"), "--steps 1000000 is more than"),
    "other numbers": (
        (*OWN, "--steps", "100000{rank}"),
        "steps is 1000000 on rank 0, and 1000001 on rank 1",
    ),
    "other jobs": (
        ("train", "augmented-{rank}.py"),
        "recipe is augmented-0 on rank 0, and augmented-1 on rank 1",
    ),
    "other microbatches": (
        (*OWN, "--microbatch", "{rank}1"),
        "microbatch is 1 on rank 0, and 11 on rank 1",
    ),
    "other replays": (
        (*OWN, "--sync", "exact", "--replay-every", "1{rank}"),
        "replay_every is 10 on rank 0, and 11 on rank 1",
    ),
    "other guards": (
        (*OWN, "--guard-every", "1{rank}"),
        "guard_every is 10 on rank 0, and 11 on rank 1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*list(CASES)[:1], *(pytest.param(name, marks=SLOW) for name in list(CASES)[1:])]
)
def test_it_is_one_line_of_all_ranks(case: str, tmp_path: Path) -> None:
    for rank in range(RANKS):
        (tmp_path / f"augmented-{rank}.py").write_bytes((JOBS / "augmented.py").read_bytes())
    command, message = CASES[case]
    with tasks(
        tmp_path, *command, OMP_DYNAMIC="false"
    ) as ranks:  # each a new interpreter: gloo is quiet by a variable
        assert [rank.end() for rank in ranks] == [2] * RANKS, said_by(ranks)
    lines = said_by(ranks).splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {message}"), said_by(ranks)
    assert not (tmp_path / "runs").exists()
