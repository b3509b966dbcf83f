"""A ledger that is not what was written, or that is of other samples than planned, is never called
whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ledgers import FakeRun, Indices
from stepladder.core.plan import Plan
from stepladder.storage.audit import audit
from stepladder.storage.ledger import extend_chain, format_line

PLAN = Plan(num_samples=24, global_batch=8, microbatch=2)  # 3 steps per epoch
Tamper = Callable[[FakeRun], object]


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """Attempt 1 on 2 ranks trained steps 1 to 5, attempt 2 on 3 ranks went on from step 3 to the
    end, 9.
    """
    made = FakeRun(tmp_path / "run", PLAN)
    first = made.attempt(2, range(1, 6))
    second = made.attempt(3, range(4, 10), after=first)
    made.snapshot(second, 9)
    made.result(9)
    return made


def problems(run: FakeRun) -> str:
    """All that the audit says of a ledger that must not pass."""
    result = audit(run.path)
    assert not result.ok, f"passed as whole: {result}"
    return "\n".join(result.problems)


def edited(attempt: int, rank: int, line: int, old: str, new: str) -> Tamper:
    """Replace `old` in one line."""

    def tamper(run: FakeRun) -> None:
        text = run.lines(attempt, rank)[line]
        assert old in text, text
        run.edit(attempt, rank, lambda lines: lines.__setitem__(line, text.replace(old, new)))

    return tamper


def deleted(attempt: int, *ranks: int, lines: slice) -> Tamper:
    return lambda run: [
        run.edit(attempt, rank, lambda all_lines: all_lines.__delitem__(lines)) for rank in ranks
    ]


def swapped(first_line: tuple[int, int], second_line: tuple[int, int]) -> Tamper:
    """Exchange two files, each (attempt, rank)."""

    def tamper(run: FakeRun) -> None:
        first = run.file(*first_line)
        second = run.file(*second_line)
        texts = first.read_text(), second.read_text()
        first.write_text(texts[1])
        second.write_text(texts[0])

    return tamper


def another_digest(run: FakeRun) -> None:
    line = json.loads(run.lines(2, 1)[3])
    edited(2, 1, 3, line["digest"], "0" * 16)(run)


def doubled(run: FakeRun) -> None:
    run.edit(2, 2, lambda lines: lines.insert(3, lines[2]))


def from_another_rank(run: FakeRun) -> None:
    line = run.lines(2, 0)[2]
    run.edit(2, 1, lambda lines: lines.__setitem__(2, line))


def in_place_of(attempt: int, rank: int, make: Callable[[Path], object]) -> Tamper:
    """Something else under the name of a rank's file."""

    def tamper(run: FakeRun) -> None:
        run.file(attempt, rank).unlink()
        make(run.file(attempt, rank))

    return tamper


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("tamper", "result"),
    [
        (
            edited(1, 1, 2, '"count": 4', '"count": 5'),
            "attempt 1 rank 1: the line of step 2 was altered",
        ),
        (
            edited(1, 0, 5, '"count": 4', '"count": 5'),
            "attempt 1 rank 0: the line of step 5 was altered",
        ),
        (another_digest, "attempt 2 rank 1: the line of step 6 was altered"),
        (
            edited(2, 0, 2, "}", ', "count": 9}'),
            "attempt 2 rank 0: line after step 4 was appended to after its hash",
        ),
        (
            edited(2, 0, 2, "}", "} "),
            "attempt 2 rank 0: line after step 4 was appended to after its hash",
        ),
        (
            edited(2, 0, 0, "}", ', "attempt": 2}'),
            "attempt 2 rank 0: header was appended to after its hash",
        ),
        (edited(2, 0, 2, '"chain"', '"other"'), "attempt 2 rank 0: unreadable line after step 4"),
        (edited(2, 0, 2, '"step"', '"stop"'), "attempt 2 rank 0: the line of step 5 was altered"),
        (edited(2, 0, 2, "{", ""), "attempt 2 rank 0: unreadable line after step 4"),
        (edited(2, 0, 2, "\n", ""), "attempt 2 rank 0: unreadable line after step 4"),
        (
            deleted(2, 1, lines=slice(3, 4)),
            "attempt 2 rank 1: the line of step 7 was altered or moved, or one before",
        ),
        (
            deleted(1, 0, 1, lines=slice(1, 2)),
            "attempt 1 rank 0: the line of step 2 .* one before it was deleted",
        ),
        (
            deleted(2, 1, lines=slice(-2, None)),
            "does not lead to the snapshot of step 9: lines are missing",
        ),
        (deleted(2, 0, 1, 2, lines=slice(-1, None)), "does not lead to the snapshot of step 9"),
        (
            deleted(1, 0, 1, lines=slice(3, None)),
            "attempt 2 resumed from step 3, which no earlier attempt",
        ),
        (deleted(2, 1, lines=slice(0, 1)), "attempt 2 rank 1: unreadable header"),
        (deleted(2, 0, 1, 2, lines=slice(0, 1)), "attempt 2: no rank's header can be read"),
        (
            lambda run: run.file(2, 1).unlink(),
            "attempt 2 rank 1: attempt-0002.rank-1.jsonl is missing",
        ),
        (
            lambda run: run.file(1, 0).unlink(),
            "attempt 1 rank 0: attempt-0001.rank-0.jsonl is missing",
        ),
        (
            in_place_of(2, 1, Path.mkdir),
            "attempt 2 rank 1: attempt-0002.rank-1.jsonl cannot be read",
        ),
        (
            in_place_of(2, 1, link_to_itself),
            "attempt 2 rank 1: attempt-0002.rank-1.jsonl is missing",
        ),
        (lambda run: run.file(2, 0).write_text(""), "attempt 2 rank 0: unreadable header"),
        (swapped((2, 0), (2, 2)), "attempt 2 rank 0: its header is another rank's"),
        (
            swapped((1, 1), (2, 1)),
            "attempt 1 rank 1: its header is another rank's or another attempt's",
        ),
        (doubled, "attempt 2 rank 2: the line of step 5 was altered or moved"),
        (from_another_rank, "attempt 2 rank 1: the line of step 5 was altered or moved"),
        (edited(1, 0, 0, '"world_size": 2', '"world_size": 1'), "attempt 1 rank 0: header altered"),
        (
            edited(1, 1, 0, '"world_size": 2', '"world_size": 1'),
            "attempt 1 rank 1: its header is another",
        ),
        (
            edited(2, 0, 0, '"resumed_from_step": 3', '"resumed_from_step": 0'),
            "attempt 2 rank 0: header altered",
        ),
        (
            edited(2, 0, 0, '"world_size": 3', '"world_size": 0'),
            "attempt 2 rank 0: its header is another",
        ),
        (
            edited(2, 1, 0, '"attempt": 2', '"attempt": 1'),
            "attempt 2 rank 1: its header is another",
        ),
    ],
)
def test_a_ledger_that_was_altered_is_detected_with_its_place(
    run: FakeRun, tamper: Tamper, result: str
) -> None:
    tamper(run)
    message = problems(run)
    assert re.search(result, message), message


def test_an_untouched_ledger_passes(run: FakeRun) -> None:
    assert audit(run.path).problems == []


@pytest.mark.parametrize(
    ("make", "result"),
    [(Path.mkdir, "cannot be read"), (link_to_itself, "is missing")],
    ids=["folder", "link"],
)
def test_a_rank_that_cannot_be_read_is_a_problem_of_an_attempt_without_steps_too(
    run: FakeRun, make: Callable[[Path], object], result: str
) -> None:
    """Headers may be missing after a kill, but this rank has one."""
    third = run.attempt(2, range(10, 10), after=2)
    in_place_of(third, 1, make)(run)
    assert f"attempt 3 rank 1: attempt-0003.rank-1.jsonl {result}" in problems(run)


@pytest.mark.parametrize(
    ("old", "new", "result"),
    [
        (
            '"count": 8',
            '"other": 8',
            "attempt 1 rank 0: the line of step 2 names no number of samples",
        ),
        (
            '"count": 8',
            '"count": "8"',
            "attempt 1 rank 0: the line of step 2 names no number of samples",
        ),
        (
            '"count": 8',
            '"count": 7',
            r"step 2, rank 0 trained other samples than planned \(7 of 8\)",
        ),
        (
            '"digest": "',
            '"digest": "0',
            r"step 2, rank 0 trained other samples than planned \(8 of 8\)",
        ),
        (
            '"epoch": 0',
            '"epoch": 1',
            r"step 2, rank 0 trained other samples than planned \(8 of 8\)",
        ),
    ],
)
def test_a_line_whose_hash_is_right_is_compared_with_the_plan(
    tmp_path: Path, old: str, new: str, result: str
) -> None:
    """Hashes have no key: whoever writes a ledger anew can make them right."""
    run = FakeRun(tmp_path / "run", PLAN)
    run.attempt(1, range(1, 3))
    first, second = run.lines(1, 0)[1:]
    body = second[: second.rindex(', "chain"')].replace(old, new)
    assert old in second
    rewritten = format_line(body, extend_chain(json.loads(first)["chain"], body))
    run.edit(1, 0, lambda lines: lines.__setitem__(2, rewritten))
    assert re.search(result, problems(run)), problems(run)


def test_a_wrong_step_counts_in_its_own_epoch(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    run.attempt(1, range(1, 7), read=lambda step, _, parts: parts[:-1] if step == 4 else parts)
    assert [epoch.lost for epoch in audit(run.path).epochs] == [0, 8]


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_deleted_attempt_is_detected(run: FakeRun, attempt: int) -> None:
    for rank in range(attempt + 1):
        run.file(attempt, rank).unlink()
    assert "step 3" in problems(run) or "step 9" in problems(run)


def test_attempts_that_changed_names_are_detected(tmp_path: Path) -> None:
    """Both began at step 0 on one rank, so only their numbers tell them apart."""
    run = FakeRun(tmp_path / "run", PLAN)
    run.attempt(1, range(1, 6))
    run.attempt(1, range(1, 4))
    swapped((1, 0), (2, 0))(run)
    assert "attempt 1 rank 0: its header is another" in problems(run)


@pytest.mark.parametrize("bit", [0, 5, 7])
def test_no_flipped_bit_of_a_finished_runs_ledger_goes_unseen(tmp_path: Path, bit: int) -> None:
    run = FakeRun(tmp_path / "run", Plan(num_samples=8, global_batch=4, microbatch=2))
    run.snapshot(run.attempt(2, range(1, 3)), 2)
    complete = run.file(1, 1).read_bytes()
    for position in range(len(complete)):
        changed = bytearray(complete)
        changed[position] ^= 1 << bit
        run.file(1, 1).write_bytes(changed)
        assert not audit(run.path).ok, (
            f"byte {position}, {complete[position : position + 1]!r}, may change unseen"
        )


# -- other samples than planned: the chain is whole, for the ledger is an honest one of a wrong run


def replaced(parts: list[Indices]) -> list[Indices]:
    return [parts[0] * 0 + parts[0][0], *parts[1:]]


@pytest.mark.parametrize(
    ("wrong", "counts"),
    [
        (lambda parts: parts[:-1], r"\(0 of 2\)|\(2 of 4\)"),
        (lambda parts: [*parts, parts[0]], r"\(4 of 2\)|\(6 of 4\)"),
        (replaced, r"\(2 of 2\)|\(4 of 4\)"),
        (lambda parts: [part + 1 for part in parts], r"\(2 of 2\)|\(4 of 4\)"),
    ],
    ids=[
        "a microbatch left out",
        "a microbatch twice",
        "one sample for another",
        "all samples others",
    ],
)
@pytest.mark.parametrize(("rank", "bad"), [(0, 5), (2, 5), (0, 6)])
def test_a_rank_that_trained_other_samples_is_named_with_the_step(
    tmp_path: Path,
    wrong: Callable[[list[Indices]], list[Indices]],
    counts: str,
    rank: int,
    bad: int,
) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    run.attempt(
        3,
        range(1, 7),
        read=lambda step, r, parts: wrong(parts) if (step, r) == (bad, rank) else parts,
    )
    result = audit(run.path)
    assert len(result.problems) == 1
    assert (
        f"attempt 1: step {bad}, rank {rank} trained other samples than planned"
        in result.problems[0]
    )
    assert result.lost > 0 and not result.ok
    assert [epoch.lost for epoch in result.epochs] == [0, result.lost]


def test_ranks_that_each_read_the_whole_batch_have_repeated_samples(tmp_path: Path) -> None:
    """The commonest mistake in a script of one's own: a loader without a sampler for the ranks."""
    run = FakeRun(tmp_path / "run", PLAN)

    def whole_batch(step: int, rank: int, parts: list[Indices]) -> list[Indices]:
        return [PLAN.indices(step - 1, span) for span in PLAN.microbatches(step - 1)]

    run.attempt(2, range(1, 4), read=whole_batch)
    result = audit(run.path)
    assert len(result.problems) == 2 * 3, "each rank is wrong in each step"
    assert result.repeated == 24


def test_steps_that_a_finished_run_claims_and_nobody_recorded_are_lost(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    run.attempt(2, range(1, 6))
    run.result(6)
    result = audit(run.path)
    assert (result.lost, result.ok) == (8, False)


def test_steps_between_two_attempts_that_nobody_recorded_are_lost(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    first = run.attempt(2, range(1, 4))
    run.chains[first][4] = run.chains[first][3]
    run.attempt(2, range(5, 7), after=first)
    result = audit(run.path)
    assert result.lost > 0 and not result.ok


def test_steps_before_an_attempt_whose_parent_is_gone_are_lost_each_with_its_samples(
    tmp_path: Path,
) -> None:
    run = FakeRun(tmp_path / "run", Plan(num_samples=22, global_batch=8, microbatch=2))
    first = run.attempt(2, range(1, 4))
    run.attempt(2, range(4, 6), after=first)
    for rank in range(2):
        run.file(first, rank).unlink()
    result = audit(run.path)
    assert [(epoch.lost, epoch.never_seen) for epoch in result.epochs] == [(22, 0), (0, 6)]
    assert result.problems == [
        "attempt 2 resumed from step 3, which no earlier attempt's ledger proves"
    ]


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "3", '{"steps": null}', '{"steps": "many"}'])
def test_a_result_that_says_nothing_is_a_problem_and_claims_no_step(
    tmp_path: Path, text: str
) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    run.attempt(1, range(1, 1))
    (run.path / "result.json").write_text(text)
    result = audit(run.path)
    assert len(result.problems) == 1 and result.problems[0].startswith(
        "result.json cannot be read ("
    )
    assert (result.lost, result.epochs[0].never_seen, result.ok) == (0, 24, False)


def test_a_step_that_no_rank_recorded_in_the_middle_is_named(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    run.attempt(2, range(1, 6, 2))
    assert "attempt 1 rank 0: step 2 is missing" in problems(run)


@pytest.mark.parametrize("chain", ["0" * 32, "f" * 32, ""])
def test_a_newest_snapshot_with_another_hash_is_not_what_the_ledger_leads_to(
    run: FakeRun, chain: str
) -> None:
    run.chains[2][9] = chain
    (run.path / "snapshots" / "step_00000009" / "manifest.json").unlink()
    (run.path / "snapshots" / "step_00000009").rmdir()
    run.snapshot(2, 9)
    assert "does not lead to the snapshot of step 9" in problems(run)


def test_a_newest_snapshot_of_superseded_steps_is_not_what_the_ledger_leads_to(
    tmp_path: Path,
) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    first = run.attempt(2, range(1, 7))
    run.snapshot(first, 6)
    run.attempt(2, range(4, 6), after=first)
    assert "does not lead to the snapshot of step 6" in problems(run)
