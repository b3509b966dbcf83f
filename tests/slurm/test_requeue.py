"""What the end of a job's ranks means, and when it goes on."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from processes import run
from stepladder.rank.exit_record import (
    END_FILE_VARIABLE,
    identify_start,
    read_end,
    remove_end,
    write_end,
)
from stepladder.slurm.requeue import (
    REQUEUES_FILE,
    RequeueMode,
    RequeuePolicy,
    RequeueRecord,
    StartEnd,
    decide,
    find_end_reason,
    find_ends_by_slurm,
    find_lost_nodes,
    handle_end,
)
from stepladder.slurm.submitted_jobs import read_job_records

POLICY = RequeuePolicy(50)
STOPPED = StartEnd(75, ranks_code=75, step=40, margin=120, seconds_left=3000)


@pytest.mark.parametrize(
    ("end", "reason", "requeue"),
    [
        (StartEnd(0), "finished", False),
        (
            StartEnd(137, ranks_code=0, step=90, lost_nodes=("n2",)),
            "finished",
            False,
        ),  # --no-kill: srun mourns the lost node
        (STOPPED, "signal", True),
        (replace(STOPPED, seconds_left=100), "time limit", True),
        (
            replace(STOPPED, seconds_left=170),
            "time limit",
            True,
        ),  # the warning may come a minute early
        (replace(STOPPED, preempted=True), "preemption", True),
        (
            replace(STOPPED, code=1),
            "signal",
            True,
        ),  # torchrun gives 1 where all ranks have stopped well
        (replace(STOPPED, code=0), "signal", True),
        (
            replace(STOPPED, state="CANCELLED"),
            "cancelled",
            False,
        ),  # a requeue would raise it from the dead
        (StartEnd(1, ranks_code=1, lost_nodes=("n2",), step=3), "node failure", True),
        (StartEnd(137, lost_nodes=("n2",), step=3), "node failure", True),
        (StartEnd(1, ranks_code=74, step=3), "storage fault", True),
        (StartEnd(137, step=3), "out of memory", True),
        (StartEnd(1, step=3, state="OUT_OF_MEMORY"), "out of memory", True),
        (
            StartEnd(1, ranks_code=137, step=3),
            "out of memory",
            True,
        ),  # the launcher saw a rank killed
        (StartEnd(1, ranks_code=143), "signal", False),  # a script that does not say it can go on
        (StartEnd(1, ranks_code=143, preempted=True), "preemption", False),
        (StartEnd(1, ranks_code=143, margin=120, seconds_left=100), "time limit", False),
        (
            StartEnd(1, ranks_code=143, lost_nodes=("n2",)),
            "node failure",
            True,
        ),  # srun ends the others then
        (
            StartEnd(75, ranks_code=1),
            "bug",
            False,
        ),  # srun gives the largest code: an agent's that it ended itself
        (StartEnd(2, ranks_code=1), "bug", False),
        (
            StartEnd(137, ranks_code=1, step=3),
            "bug",
            False,
        ),  # srun kills the others with the first that fails
        (StartEnd(143, ranks_code=1, step=3), "bug", False),
        (StartEnd(143, step=3), "signal", True),  # before there were ranks
        (StartEnd(1, step=3), "bug", False),
        (StartEnd(127), "bug", False),
        (StartEnd(2, ranks_code=2), "bad input", False),
    ],
)
def test_reasons_are_told_apart(end: StartEnd, reason: str, requeue: bool) -> None:
    assert find_end_reason(end) == reason
    decision = decide(end, [], POLICY)
    assert (decision.reason, decision.requeue) == (reason, requeue)


def test_requeues_have_a_cap() -> None:
    assert decide(replace(STOPPED, restart=49), [], POLICY).requeue
    last = decide(replace(STOPPED, restart=50), [], POLICY)
    assert not last.requeue and "requeued 50 times already, and not again" in last.text


def test_two_restarts_without_a_step_are_enough() -> None:
    assert decide(STOPPED, [40], POLICY).requeue
    assert decide(STOPPED, [40, 40, 39], POLICY).requeue
    stop = decide(STOPPED, [20, 40, 40], POLICY)
    assert not stop.requeue and "nothing new was saved" in stop.text
    assert decide(replace(STOPPED, step=None), [None, None, None], POLICY).requeue, (
        "a script of one's own has no steps"
    )
    assert not decide(replace(STOPPED, step=0), [0, 0], POLICY).requeue


def test_out_of_memory_at_the_same_step_again_is_enough() -> None:
    killed = StartEnd(137, step=40)
    assert decide(killed, [20], POLICY).requeue
    for before, end in (([40], killed), ([], StartEnd(137, step=0)), ([], StartEnd(137))):
        stop = decide(end, before, POLICY)
        assert not stop.requeue and "more --mem" in stop.text


TERMINATED = StartEnd(1, ranks_code=143, preempted=True)
RAISED = StartEnd(1, ranks_code=1)


@pytest.mark.parametrize(
    ("end", "before", "mode", "text"),
    [
        (TERMINATED, [], "preempted", "no file to resume from is known"),
        (replace(TERMINATED, saves=0), [], "preempted", "no file to resume from is known"),
        (replace(TERMINATED, saves=1), [], "preempted", "requeued (1 of at most 50)"),
        (replace(TERMINATED, saves=1), [1], "preempted", "requeued (1 of at most 50)"),
        (replace(TERMINATED, saves=1), [1, 1], "preempted", "nothing new was saved"),
        (replace(TERMINATED, saves=1), [], "never", "because of --requeue never"),
        (TERMINATED, [], "failed", "requeued (1 of at most 50)"),
        (replace(STOPPED, step=None, saves=0), [0, 0], "preempted", "nothing new was saved"),
        (STOPPED, [], "never", "because of --requeue never"),
        (RAISED, [], "preempted", "not by the cluster's fault"),
        (RAISED, [None] * 9, "failed", "failed with exit code 1: requeued (1 of at most 50)"),
        (replace(RAISED, saves=2), [2, 2], "failed", "nothing new was saved"),
        (replace(RAISED, restart=50), [], "failed", "requeued 50 times already"),
        (replace(RAISED, ranks_code=2), [], "failed", "bad input"),
        (replace(RAISED, ranks_code=0), [], "failed", "finished"),
        (replace(RAISED, state="CANCELLED"), [], "failed", "cancelled"),
    ],
)
def test_what_is_requeued_of_a_script(
    end: StartEnd, before: list[int | None], mode: RequeueMode, text: str
) -> None:
    decision = decide(end, before, RequeuePolicy(50, mode))
    assert text in decision.text
    assert decision.requeue == ("requeued (1" in text)


def test_a_node_is_lost_when_slurm_or_its_daemon_says_so() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        def node(name: str, state: str, port: int) -> str:
            return (
                f"NodeName={name} A=x\n   NodeAddr=127.0.0.1 NodeHostName=h Port={port}\n"
                f"   State={state} B=y\n"
            )

        job = "JobId=1 JobName=NodeName=n9 State=DOWN\n   JobState=RUNNING Reason=None\n"
        facts = (
            job + node("n1", "MIXED", port) + node("n2", "DOWN*", port) + node("n3", "ALLOCATED", 1)
        )
        assert find_lost_nodes(facts) == ("n2", "n3")


def test_the_word_of_another_start_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_end(75, 3)
    assert read_end() is None, "no batch script asks"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for foreign in (f"{tmp_path}/word", f"13:{tmp_path}/word", f":{tmp_path}/word", "12:", "12"):
        monkeypatch.setenv(END_FILE_VARIABLE, foreign)
        write_end(75)
        assert not list(tmp_path.iterdir()), "it is not of this job's batch script"
    monkeypatch.setenv(END_FILE_VARIABLE, f"12:{tmp_path}/run/ended.json")
    write_end(75)
    write_end(1)
    first = read_end()
    assert first is not None and (first["code"], first["step"]) == (75, None), (
        "the first word counts"
    )
    write_end(75, 40, late=True)
    better = read_end()
    assert better is not None and (better["step"], better["late"]) == (40, True), (
        "but for one that knows the step"
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert read_end() is None
    write_end(1)
    write_end(143)
    write_end(137)  # of the node where a rank was killed: why the others have failed
    write_end(1)
    later = read_end()
    assert later is not None and later["code"] == 137
    remove_end()
    assert read_end() is None and not list(tmp_path.glob("run/*"))


def test_starts_that_slurm_ended_are_read_from_the_log(tmp_path: Path) -> None:
    """The log has what Slurm 22.05 prints, which is nothing if the node has lost power."""
    log = tmp_path / "slurm-5.out"
    ends = [
        "PREEMPTION ***",
        "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        "",
        "JOB REQUEUE ***",
    ]
    at = "CANCELLED AT 2026-01-02T16:15:37"
    log.write_text("".join(
        f"stepladder: start {number} of job 5\n"
        f"slurmstepd-n1: error: *** STEP 5.0 ON n1 {at} DUE TO {end}\n"
        + f"slurmstepd-n1: error: *** JOB 5 ON n1 {at} DUE TO {end}\n" * bool(end)
        for number, end in enumerate(ends, 1)
    ))  # fmt: skip
    assert find_ends_by_slurm(log) == {0: "preemption", 1: "node failure", 3: "requeue"}
    assert find_ends_by_slurm(tmp_path / "nothing") == {}


def test_the_command_of_the_batch_script(tmp_path: Path) -> None:
    """Its input is what Slurm 22.05 printed for a job whose run has stopped."""
    job_dir = tmp_path / "run"
    (job_dir / "snapshots" / "step_00000040").mkdir(parents=True)
    (job_dir / "snapshots" / "step_00000050.damaged").mkdir()
    (job_dir / "config.json").touch()
    soon = (datetime.now() + timedelta(seconds=60)).isoformat(timespec="seconds")
    facts = tmp_path / "facts"
    facts.write_text(
        f"JobId=12 JobName=x\n   JobState=RUNNING Reason=None\n   EndTime={soon} Deadline=N/A\n"
    )
    env = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "0"}

    def after(code: int, restart: int) -> tuple[int, str]:
        arguments = (
            f"exec stepladder after {code} --job-dir run --margin 120 --max-requeues 5 < facts"
        )
        done = run(
            arguments.replace("stepladder", f"{sys.executable} -m stepladder"),
            cwd=tmp_path,
            env={**env, "SLURM_RESTART_COUNT": str(restart)},
            command=("bash", "-c"),
        )
        return done.returncode, done.stderr

    (job_dir / "ended.json").write_text(
        json.dumps({"code": 75, "step": 40, "late": False, "job": "12", "restart": 0})
    )
    assert after(1, 0) == (
        75,
        "stepladder: stopped at step 40 (time limit): requeued (1 of at most 5)\n",
    )
    code, recorded_code = after(1, 1)  # this start left no word
    assert code == 1 and "not requeued" in recorded_code
    code, recorded_code = after(75, 2)  # an agent that srun ended, not the ranks' word
    assert code == 1 and "not requeued" in recorded_code
    assert after(0, 3) == (0, "stepladder: finished\n")
    records = read_job_records(job_dir / REQUEUES_FILE, "12", RequeueRecord)
    assert [(record["restart"], record["reason"]) for record in records] == [
        (0, "time limit"), (1, "bug"), (2, "bug"), (3, "finished"),
    ]  # fmt: skip
    assert read_job_records(job_dir / REQUEUES_FILE, "13", RequeueRecord) == []
    for record in records:  # as an older version wrote them
        del record["saves"], record["text"]
    (job_dir / REQUEUES_FILE).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert after(0, 4) == (0, "stepladder: finished\n")


def test_a_script_with_a_loader_is_requeued_as_often_as_it_is_preempted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Loader's run directory is the one that `submit` gives the script."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    (tmp_path / "config.json").write_text('{"definition": {"recipe": "Loader"}}')
    facts = "JobState=RUNNING PreemptTime=2026-01-01T00:00:00\n"
    for restart in range(4):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        (tmp_path / "ended.json").write_text(json.dumps({"code": 75, **identify_start()}))
        decision = handle_end(tmp_path, 75, 120, facts, RequeuePolicy(5))
        assert decision.requeue, (restart, decision)
    records = read_job_records(tmp_path / REQUEUES_FILE, "12", RequeueRecord)
    assert [record["step"] for record in records] == [None] * 4


def test_a_file_that_a_start_has_written_lets_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input is what Slurm 22.05 prints; the pattern is that of `submit --resume-from`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    started = datetime.now().replace(microsecond=0)
    facts = f"JobState=RUNNING Reason=None\n   StartTime={started.isoformat()} EndTime=Unknown\n"
    facts += "   PreemptTime=2026-01-01T00:00:00\n"
    policy = RequeuePolicy(5, resume_from="out/**/*.pt")
    (tmp_path / "out" / "a").mkdir(parents=True)
    saved = tmp_path / "out" / "a" / "last.pt"
    saved.touch()
    decisions = []
    for restart, seconds in enumerate((-10, 10, -10, -10)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        (tmp_path / "ended.json").write_text(json.dumps({"code": 143, **identify_start()}))
        os.utime(saved, times=(started.timestamp() + seconds,) * 2)
        decisions.append(handle_end(tmp_path, 1, 120, facts, policy).requeue)
    assert decisions == [False, True, True, False]
    records = read_job_records(tmp_path / REQUEUES_FILE, "12", RequeueRecord)
    assert [record["saves"] for record in records] == [0, 1, 1, 1]
    assert "StopSignals" in records[0]["text"] and "nothing new" in records[3]["text"]


@pytest.mark.parametrize(
    ("error", "recorded_code"), [("ValueError", 1), ("PeerLost", None), ("InputError", None)]
)
def test_a_rank_that_slurm_has_started_says_that_it_failed(
    error: str, recorded_code: int | None, tmp_path: Path
) -> None:
    """Unless another one's end was the cause: srun gives the exit code of a rank that it has ended
    for it.
    """
    fail = f"""
from stepladder.train.comm import PeerLost
from stepladder.core.errors import InputError
from stepladder.rank.lifecycle import run_and_exit
def fail(): raise {error}("trouble", "mend it")
run_and_exit(fail)
"""
    (tmp_path / "fail.py").write_text(fail)
    end_file = tmp_path / "ended.json"
    done = run(
        "fail.py",
        cwd=tmp_path,
        env={END_FILE_VARIABLE: f"7:{end_file}", "SLURM_JOB_ID": "7"},
        command=(sys.executable,),
    )
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1)
    assert (
        json.loads(end_file.read_text())["code"] if end_file.exists() else None
    ) == recorded_code
