"""check --preempt: what scripts lose that a cluster interrupts, and where they go on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from check_recordings import MOVED, SAVED, evidence_of, forward, train_pass
from preemptions import KINDS, write_script
from processes import refused, run
from stepladder.tools.check.preempt import (
    InterruptedRun,
    Moment,
    choose_moments,
    find_begin,
    find_losses,
)
from stepladder.tools.lint.lint import find_warning_signal

MOMENTS = 4
UNBROKEN = [(0, 1), (2, 3), (0, 1), (4, 5)]


def check(kind: str, folder: Path, *flags: object) -> tuple[int, list[str], list[str]]:
    """Return the exit code, the evidence of findings, and the lines of the rehearsals."""
    write_script(kind, folder)
    done = run("check", "--json", "--preempt", MOMENTS, *flags, "train.py", cwd=folder)
    report = json.loads(done.stdout)
    seen = [finding["evidence"] for finding in report["findings"] if finding["rule"] == "preempted"]
    assert len(seen) == len(report["findings"]) or kind == "saves over the only snapshot"
    begin = next(i for i, line in enumerate(report["held"]) if line.startswith("preemption: "))
    return done.returncode, seen, report["held"][begin : begin + 1 + MOMENTS]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_script_that_saves_on_the_signal_loses_nothing(tmp_path: Path) -> None:
    code, seen, lines = check("right", tmp_path)
    assert (code, seen) == (0, [])
    assert lines == [
        "preemption: saved in 2 of 2 after the signal; at most 10 steps lost, 160 samples trained "
        "again",
        "  in step 20 (SIGTERM): 0 steps lost; interrupted again: 0 steps lost",
        "  while it evaluates (SIGTERM): 0 steps lost; interrupted again: 0 steps lost",
        "  while it saves (SIGKILL): 10 steps lost; interrupted again: 0 steps lost",
        "  between write and rename (SIGKILL): 10 steps lost; interrupted again: 0 steps lost",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "evidence"),
    [
        ("no handler", "interrupted in step 20 (SIGTERM): 10 steps lost; interrupted again: 2 st"),
        ("goes on with the next epoch", "steps left out"),
        ("saves over the only snapshot", "interrupted while it saves (SIGKILL), the next start fa"),
        (
            "removes the old snapshot before the rename",
            "interrupted between write and rename (SIGKILL), the next start fails: no snapshot is",
        ),
        ("the second resume begins at the first epoch", "0 steps lost; interrupted again: 33 st"),
        ("ignores the signal", "the signal ends nothing: 20 steps more, up to its own end"),
    ],
)
def test_a_mistake_is_named_with_what_it_costs(kind: str, evidence: str, tmp_path: Path) -> None:
    code, seen, _ = check(kind, tmp_path)
    assert code == 1 and any(evidence in text for text in seen), seen


@pytest.mark.ranks
@pytest.mark.slow
def test_another_signal_is_sent_if_asked(tmp_path: Path) -> None:
    kind = "right, stopped by USR1 too"
    code, seen, lines = check(kind, tmp_path, "--signal", "USR1")
    assert (code, seen) == (0, []) and "(SIGUSR1): 0 steps lost" in lines[1]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("job.sbatch", "#SBATCH --signal=USR1@60\nsrun python train.py\n", "USR1"),
        ("job.slurm", "#SBATCH --signal B:SIGTERM@120\nsrun python train.py\n", "TERM"),
        ("job.sbatch", "#SBATCH --signal=USR1@60\nsrun python other.py\n", ""),
        ("job.sbatch", "#SBATCH --nodes 2\nsrun python train.py\n", ""),
        ("notes.txt", "#SBATCH --signal=USR1@60\nsrun python train.py\n", ""),
    ],
)
def test_the_warning_signal_is_that_of_the_batch_script(
    name: str, text: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
    (tmp_path / "damaged.sh").write_bytes(b"\xff\xfe train.py")
    assert find_warning_signal(tmp_path / "train.py") == expected


@pytest.mark.ranks
@pytest.mark.slow
def test_a_batch_script_says_which_signal_is_rehearsed(tmp_path: Path) -> None:
    batch_script = "#!/bin/bash\n#SBATCH --signal=USR1@60\nsrun torchrun train.py\n"
    (tmp_path / "job.sbatch").write_text(batch_script)
    code, seen, lines = check("right, stopped by USR1 too", tmp_path)
    assert (code, seen) == (0, []) and "(SIGUSR1): 0 steps lost" in lines[1]


def test_moments_differ_and_come_from_the_run() -> None:
    log = evidence_of([*train_pass(1, [[0, 1], [2, 3]]), forward(grad=False)]).rank_0
    moments = choose_moments(log, 7, signal.SIGTERM)
    assert [moment.pause_at for moment in moments] == [
        "step:1", "evaluation:1", "step:1", "load:1", "step:1", "step:1", "step:2"
    ]  # fmt: skip
    assert str(moments[4]) == "in step 1 (SIGKILL to the last rank)"
    assert choose_moments(log, 1, signal.SIGUSR1) == [Moment("in step 1", "step:1", signal.SIGUSR1)]


def test_a_snapshot_is_renamed_when_an_older_one_can_be_lost() -> None:
    events = [
        SAVED | {"path": "/run/new/model.pt"},
        MOVED | {"source": "/run/new", "target": "/run/last"},
        MOVED,
    ]
    log = evidence_of([*train_pass(1, [[0, 1], [2, 3]]), *events]).rank_0
    once = Moment("between write and rename", "rename:1", signal.SIGKILL)
    assert choose_moments(log, 3, signal.SIGTERM)[2] == once
    log = evidence_of([*train_pass(1, [[0, 1], [2, 3]]), *events, *events]).rank_0
    twice = Moment("between write and rename", "rename:3", signal.SIGKILL, has_snapshot=True)
    assert choose_moments(log, 3, signal.SIGTERM)[2] == twice


def test_a_start_that_fails_is_told_after_lost_steps_with_a_fix_of_its_own() -> None:
    """Of findings of one rule at one line the report shows the last one."""
    rehearsals = [
        InterruptedRun(Moment("while it saves", "save:1", signal.SIGKILL), failure="EOFError"),
        InterruptedRun(Moment("in step 2", "step:2", signal.SIGTERM), (3, 0)),
    ]
    *_, last = find_losses(evidence_of(train_pass(1, [[0, 1]])), rehearsals)
    assert (last.rule, last.severity) == ("preempted", "error")
    assert "EOFError" in last.evidence and "os.replace" in last.fix


def test_a_start_goes_on_at_the_nearest_of_equal_batches() -> None:
    assert find_begin(UNBROKEN, [(0, 1)], 3, has_loaded=True) == 2
    assert find_begin(UNBROKEN, [(0, 1)], 3, has_loaded=False) == 0
    assert find_begin(UNBROKEN, [(9, 9)], 3, has_loaded=True) is None
    assert find_begin(UNBROKEN, [], 4, has_loaded=False) == 4


def test_bad_flags_are_one_line(tmp_path: Path) -> None:
    write_script("right", tmp_path)
    done = run("check", "--preempt", 3, "--static", "train.py", cwd=tmp_path)
    refused(done, "--preempt with --static, which runs nothing")
    refused(run("check", "--preempt", 0, "train.py", cwd=tmp_path), "--preempt")


def test_each_kind_changes_the_script(tmp_path: Path) -> None:
    texts = {write_script(kind, tmp_path).read_text() for kind in KINDS}
    assert len(texts) == len(KINDS)
    for text in texts:
        compile(text, "train.py", "exec")
