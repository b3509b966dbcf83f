"""A rank is killed anywhere: the others go on in place, to the bits of the unbroken run."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from processes import JOBS, audited, run, started, train

pytestmark = pytest.mark.ranks

JOB = JOBS / "killed.py"
STEPS = "--epochs", 3, "--steps", 20, "--snapshot-every", 6
EXACT = "--sync", "exact", "--microbatch", 4, "--global-batch", 32, *STEPS
RUN_DIR = Path("runs/killed")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' hash of one process that nothing happens to."""
    return train(JOB, *EXACT, cwd=tmp_path_factory.mktemp("unbroken"))["weights_sha256"]


def survived(
    tmp_path: Path, kills: str, *flags: object, sync: tuple[object, ...] = EXACT, **env: str
) -> dict[str, Any]:
    """What the run printed, which was never started again."""
    done = run(
        "train",
        JOB,
        *sync,
        *flags,
        "--json",
        cwd=tmp_path,
        env={"KILL": kills, "KILLED": str(tmp_path)} | env,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("killed-*"))) == len(kills.split()), done.stderr
    assert "in-place recovery" in done.stderr and "restarting" not in done.stderr, done.stderr
    audit = audited(tmp_path / RUN_DIR)
    proof = {name: audit[name] for name in ("ok", "lost", "repeated", "superseded", "attempts")}
    assert proof == {"ok": True, "lost": 0, "repeated": 0, "superseded": 0, "attempts": 1}, audit
    assert audit["changes"]
    result = json.loads(done.stdout.splitlines()[-1])
    lines = [
        json.loads(line) for line in (tmp_path / RUN_DIR / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, result["steps"] + 1)]
    return result


# By the number of processes: where ranks are killed. The first rank owns the run directory. In the
# backward pass it is killed in test_layout.py.
KILLS = {
    "reading": (2, "1:reading:7"),
    "forward": (3, "2:forward:7"),
    "written down": (3, "1:ledger:7"),
    "before an exchange": (3, "1:exchange-1:7"),
    "in an exchange": (4, "2:in-exchange-2:7"),
    "waiting": (3, "0:wait:7"),
    "voted": (3, "1:vote:7"),
    "optimizer": (3, "0:optimizer:7"),
    "stepped": (2, "0:stepped:7"),
    "evaluating": (3, "0:evaluating:8"),
    "evaluated": (3, "0:evaluation:8"),
    "before a snapshot": (3, "1:snapshot-begins:6"),
    "in a snapshot": (3, "0:snapshot:6"),
    "two at once": (4, "0:optimizer:7 2:forward:7"),
    "two of three": (3, "0:exchange-1:7 1:exchange-1:7"),
    "again while going on": (4, "1:forward:7 2:group-1:7"),
    "the first one too": (4, "1:forward:7 0:levelled-1:7"),
    "first step": (3, "2:forward:1"),
    "last step": (3, "0:stepped:20"),
}
QUICK = "again while going on"


@pytest.mark.parametrize(
    ("nproc", "kills"),
    [
        pytest.param(*case, id=name, marks=() if name == QUICK else pytest.mark.slow)
        for name, case in KILLS.items()
    ],
)
def test_the_others_go_on_in_place(nproc: int, kills: str, tmp_path: Path, unbroken: str) -> None:
    assert survived(tmp_path, kills, "--nproc", nproc)["weights_sha256"] == unbroken


# -- --shard optimizer --shard-copies 2 ------------------------------------------------------------

COPIES = "--shard", "optimizer", "--shard-copies", 2
COPIED = {
    "one has not seen the others meet": (3, "0:deaf:7 2:stepped:7", {}),
    "one has seen the weights gathered": (3, "1:unheard:7 2:forward:8", {}),
    "again while going on": (4, "1:optimizer:7 3:group-1:7", {}),
    "down to one, over gloo": (3, "2:stepped:7 0:exchange-2:9", {"AS_NCCL": "1"}),
}
QUICKEST = "one has not seen the others meet"


@pytest.mark.parametrize(
    ("nproc", "kills", "env"),
    [
        pytest.param(*case, id=name, marks=() if name == QUICKEST else pytest.mark.slow)
        for name, case in COPIED.items()
    ],
)
def test_a_lost_rank_s_slices_are_with_another_one(
    nproc: int, kills: str, env: dict[str, str], tmp_path: Path
) -> None:
    uninterrupted = train(JOB, *EXACT, "--run-dir", "whole", cwd=tmp_path, env={"AVERAGED": "1"})
    result = survived(tmp_path, kills, "--nproc", nproc, *COPIES, AVERAGED="1", **env)
    assert result["weights_sha256"] == uninterrupted["weights_sha256"]
    assert result["metrics"] == pytest.approx(uninterrupted["metrics"], rel=1e-6)  # of the average


@pytest.mark.slow
def test_slices_of_two_lost_neighbours_are_in_the_snapshot_only(
    tmp_path: Path, unbroken: str
) -> None:
    env = {"KILL": "1:forward:8 2:forward:8", "KILLED": str(tmp_path)}
    done = run("train", JOB, *EXACT, "--nproc", 4, *COPIES, "--json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    messages = [line for line in done.stderr.splitlines() if line.startswith("stepladder: ")]
    assert (
        messages[-3:]
        == [
            "stepladder: in-place recovery: continuing with 2 processes",  # nobody has joined these two since
            "stepladder: both processes that had a slice of the optimizer's state are lost",
            "stepladder: restarting all ranks from the last snapshot (1 of 3 restarts)",
        ]
    ), done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["weights_sha256"] == unbroken
    assert audited(tmp_path / RUN_DIR)["ok"]


@pytest.mark.slow
def test_slices_of_two_lost_neighbours_on_two_nodes(tmp_path: Path, unbroken: str) -> None:
    env = {"KILL": "1:forward:8 2:forward:8", "KILLED": str(tmp_path)}
    flags = "--nodes", 2, "--nproc", 2, "--local-addr", "127.0.0.1", *COPIES
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(started("train", JOB, *EXACT, *flags, cwd=tmp_path, env=env))
            for _ in "12"
        ]
        ended = [node.end() for node in nodes]
        outputs = [node.err.read_text() for node in nodes]
    assert ended == [0, 0], outputs
    state_lost = "stepladder: both processes that had a slice of the optimizer's state are lost: restarting all"
    for text in outputs:
        assert (
            text.count(state_lost) == 1 and "Traceback" not in text and "has joined" not in text
        ), text
    assert (
        json.loads((tmp_path / RUN_DIR / "result.json").read_text())["weights_sha256"] == unbroken
    )
    audit = audited(tmp_path / RUN_DIR)
    assert audit["ok"] and audit["attempts"] == 2, audit


@pytest.mark.slow
def test_it_waits_and_leaves_as_with_nccl(tmp_path: Path, unbroken: str) -> None:
    kills = "1:in-exchange-1:7 0:optimizer:12"
    assert survived(tmp_path, kills, "--nproc", 3, AS_NCCL="1")["weights_sha256"] == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ddp", "manual"])
def test_other_modes_lose_nothing_either(sync: str, tmp_path: Path) -> None:
    flags = "--sync", sync, *EXACT[4:]
    survived(tmp_path, "0:backward:7 2:stepped:12", "--nproc", 3, sync=flags)


@pytest.mark.slow
def test_a_process_joins_from_a_peer_s_state(tmp_path: Path, unbroken: str) -> None:
    flags = "--epochs", 50, "--global-batch", 32, "--steps", 400
    result = survived(tmp_path, "1:forward:2", "--nproc", 2, sync=(*EXACT[:4], *flags))
    assert result["world_size"] == 2 and audited(tmp_path / RUN_DIR)["changes"] == 2


@pytest.mark.corpus
@pytest.mark.slow
def test_one_that_has_joined_goes_on_alone_and_the_ledger_has_what_the_other_did_alone(
    tmp_path: Path,
) -> None:
    long = *EXACT[:6], "--epochs", 50, "--steps", 400, "--snapshot-every", 100
    uninterrupted = train(JOB, *long, "--run-dir", "whole", cwd=tmp_path)["weights_sha256"]
    result = survived(tmp_path, "1:forward:2 0:levelled-2:*", "--nproc", 2, sync=long)
    assert result["weights_sha256"] == uninterrupted


@pytest.mark.corpus
@pytest.mark.slow
def test_a_process_that_joins_when_nobody_has_the_state_any_more(tmp_path: Path) -> None:
    long = *EXACT[:6], "--epochs", 50, "--steps", 400, "--snapshot-every", 6
    uninterrupted = train(JOB, *long, "--run-dir", "whole", cwd=tmp_path)["weights_sha256"]
    env = {"KILL": "1:forward:8 0:group-2:*", "KILLED": str(tmp_path)}
    done = run("train", JOB, *long, "--nproc", 2, "--json", cwd=tmp_path, env=env)
    assert done.returncode == 0 and "restarting all ranks from the last snapshot" in done.stderr, (
        done.stderr
    )
    assert "stepladder: all processes that had the state are lost\n" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["weights_sha256"] == uninterrupted
    audit = audited(tmp_path / RUN_DIR)
    assert audit["ok"] and audit["attempts"] == 2, audit


@pytest.mark.slow
def test_a_place_that_fails_again_and_again_is_left_out(tmp_path: Path, unbroken: str) -> None:
    flags = "--epochs", 50, "--global-batch", 32, "--steps", 400
    result = survived(
        tmp_path, "1:forward:2 3:forward:*", "--nproc", "1:3", sync=(*EXACT[:4], *flags)
    )
    assert result["world_size"] == 2


def test_a_bug_that_another_rank_takes_over_ends_the_run(tmp_path: Path) -> None:
    done = run("train", JOB, *EXACT, "--nproc", 3, cwd=tmp_path, env={"WRONG": "5"})
    assert (
        done.returncode == 1 and "a bug, not a fault: the same step failed twice" in done.stderr
    ), done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_before_they_have_met_all_begin_again(rank: int, tmp_path: Path, unbroken: str) -> None:
    """One that waits for its first group hears of nothing until its timeout, so it cannot go on."""
    env = {"KILL": f"{rank}:meeting:0", "KILLED": str(tmp_path)}
    done = run("train", JOB, *EXACT, "--nproc", 2, "--json", cwd=tmp_path, env=env)
    assert "restarting all ranks" in done.stderr and "continuing" not in done.stderr, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["weights_sha256"] == unbroken


def test_on_loss_stop_ends_the_run_and_the_same_command_goes_on(
    tmp_path: Path, unbroken: str
) -> None:
    options = "train", JOB, *EXACT, "--nproc", 2, "--on-loss", "stop"
    env = {"KILL": "1:forward:9", "KILLED": str(tmp_path)}
    done = run(*options, cwd=tmp_path, env=env)
    assert (
        done.returncode == 1 and "continuing" not in done.stderr and "restarting" not in done.stderr
    ), done.stderr
    result = train(*options[1:], cwd=tmp_path, env=env)
    assert (result["weights_sha256"], result["resumed_from_step"]) == (unbroken, 6)
