"""An honest ledger is proved whole: any number of ranks, resumes, roll-backs, kills, unfinished
runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ledgers import FakeRun
from stepladder.core.errors import InputError
from stepladder.core.plan import Plan
from stepladder.storage.audit import Audit, audit
from stepladder.storage.ledger import Ledger, LedgerHeader, compute_digests

PLAN = Plan(
    num_samples=22, global_batch=8, microbatch=2
)  # 3 steps per epoch; the last has 3 microbatches


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run", PLAN)


def assert_whole(result: Audit, epochs: int, superseded: int = 0, never_seen: int = 0) -> None:
    assert result.problems == []
    assert (result.lost, result.repeated, result.superseded) == (0, 0, superseded)
    assert [epoch.never_seen for epoch in result.epochs] == [0] * (epochs - 1) + [never_seen]
    assert result.ok


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_finished_run_of_any_number_of_ranks_is_whole(run: FakeRun, world_size: int) -> None:
    attempt = run.attempt(world_size, range(1, 7))
    run.snapshot(attempt, 6)
    run.result(6)
    assert_whole(audit(run.path), epochs=2)


@pytest.mark.parametrize("min_microbatch", [1, 2])
def test_a_rest_of_one_sample_is_whole_too(tmp_path: Path, min_microbatch: int) -> None:
    plan = Plan(num_samples=25, global_batch=8, microbatch=2, min_microbatch=min_microbatch)
    run = FakeRun(tmp_path / "run", plan)
    run.attempt(2, range(1, 2 * plan.steps_per_epoch + 1))
    assert_whole(audit(run.path), epochs=2)


def test_the_order_in_which_a_rank_read_its_samples_does_not_matter(run: FakeRun) -> None:
    run.attempt(
        2, range(1, 7), read=lambda step, rank, parts: [part[::-1] for part in reversed(parts)]
    )
    assert_whole(audit(run.path), epochs=2)


def test_attempts_resumed_on_other_numbers_of_ranks_are_one_line(run: FakeRun) -> None:
    first = run.attempt(2, range(1, 3))
    second = run.attempt(3, range(3, 5), after=first)
    third = run.attempt(1, range(5, 10), after=second)
    run.snapshot(third, 9)
    result = audit(run.path)
    assert_whole(result, epochs=3)
    assert result.attempts == 3


def test_an_attempt_may_name_the_one_before_it_by_its_number(run: FakeRun) -> None:
    """It begins where that one ended, or before; not after."""
    first = run.attempt(2, range(1, 3))
    second = run.attempt(3, range(3, 6), after=first, by_number=True)
    assert_whole(audit(run.path), epochs=2, never_seen=6)
    run.attempt(1, range(5, 7), after=second, by_number=True)
    assert_whole(audit(run.path), epochs=2, superseded=1)
    run.attempt(1, range(8, 10), after=second, by_number=True)
    assert any("resumed from step 7" in problem for problem in audit(run.path).problems)


def test_steps_after_the_snapshot_that_a_later_attempt_resumed_from_are_superseded(
    run: FakeRun,
) -> None:
    first = run.attempt(2, range(1, 6))
    second = run.attempt(4, range(4, 8), after=first)
    run.attempt(3, range(6, 10), after=second)
    assert_whole(audit(run.path), epochs=3, superseded=2 + 2)


def test_two_attempts_resumed_from_one_snapshot_the_later_one_survives(run: FakeRun) -> None:
    first = run.attempt(2, range(1, 4))
    run.attempt(2, range(4, 6), after=first)
    run.attempt(3, range(4, 7), after=first)
    assert_whole(audit(run.path), epochs=2, superseded=2)


def test_a_long_run_is_whole(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", Plan(num_samples=4, global_batch=2, microbatch=1))
    first = run.attempt(2, range(1, 301))
    run.attempt(1, range(301, 321), after=first)
    assert_whole(audit(run.path), epochs=160)


def test_an_attempt_begun_anew_supersedes_all_before_it(run: FakeRun) -> None:
    run.attempt(2, range(1, 5))
    run.attempt(3, range(1, 4))
    assert_whole(audit(run.path), epochs=1, superseded=4)


def test_samples_that_an_unfinished_run_has_not_reached_are_never_seen_not_lost(
    run: FakeRun,
) -> None:
    run.attempt(2, range(1, 5))
    assert_whole(audit(run.path), epochs=2, never_seen=22 - 8)


@pytest.mark.parametrize("bytes_left", [1, 40, -1])
def test_a_torn_last_line_is_a_step_not_done(run: FakeRun, bytes_left: int) -> None:
    run.attempt(2, range(1, 5))
    last = run.lines(1, 0)[-1]
    run.edit(1, 0, lambda lines: lines.__setitem__(-1, last[:bytes_left]))
    assert_whole(audit(run.path), epochs=1, never_seen=0)


def test_ranks_killed_at_different_steps_have_done_what_all_of_them_wrote(run: FakeRun) -> None:
    run.attempt(3, range(1, 7), flushed={0: 5, 2: 4})
    assert_whole(audit(run.path), epochs=2, never_seen=22 - 8)


@pytest.mark.parametrize(
    "files",
    [
        ("whole", "whole"),
        ("whole", None),
        (None, "whole"),
        ("whole", ""),
        ("", ""),
        ('{"attempt": 2, "ra', None),
    ],
)
def test_an_attempt_killed_while_it_started_did_nothing(
    run: FakeRun, files: tuple[str | None, ...]
) -> None:
    first = run.attempt(2, range(1, 4))
    run.snapshot(first, 3)
    second = run.attempt(2, range(4, 4), after=first)
    for rank, text in enumerate(files):
        if text is None:
            run.file(second, rank).unlink()
        elif text != "whole":
            run.file(second, rank).write_text(text)
    result = audit(run.path)
    assert_whole(result, epochs=1)
    assert result.attempts == 2


def test_a_run_killed_before_its_first_step_has_lost_nothing(run: FakeRun) -> None:
    run.attempt(1, range(1, 1))
    run.file(1, 0).write_text("")
    assert_whole(audit(run.path), epochs=1, never_seen=22)


def test_steps_that_no_attempt_has_recorded_are_lost_in_each_epoch(run: FakeRun) -> None:
    run.attempt(2, range(1, 1))
    run.result(6)
    assert [epoch.lost for epoch in audit(run.path).epochs] == [22, 22]


def test_a_run_goes_on_after_an_attempt_killed_while_it_started(run: FakeRun) -> None:
    first = run.attempt(2, range(1, 4))
    second = run.attempt(2, range(4, 4), after=first)
    run.file(second, 0).write_text("")
    run.attempt(2, range(4, 7), after=first)
    assert_whole(audit(run.path), epochs=2)


def test_a_damaged_snapshot_that_was_set_aside_asks_nothing_of_the_ledger(run: FakeRun) -> None:
    first = run.attempt(2, range(1, 7))
    run.snapshot(first, 3)
    run.snapshot(first, 6, name="step_00000006.damaged")
    second = run.attempt(2, range(4, 6), after=first)
    run.snapshot(second, 5)
    assert_whole(audit(run.path), epochs=2, superseded=3, never_seen=6)


@pytest.mark.parametrize("manifest", [None, "", "{", "{}", "[]", '{"step": 6}'])
def test_a_snapshot_without_a_manifest_that_can_be_read_proves_nothing(
    run: FakeRun, manifest: str | None
) -> None:
    first = run.attempt(2, range(1, 6))
    run.snapshot(first, 3)
    folder = run.path / "snapshots" / "step_00000006"
    folder.mkdir()
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    assert_whole(audit(run.path), epochs=2, never_seen=6)


def test_the_json_form_has_one_entry_per_epoch(run: FakeRun) -> None:
    run.attempt(2, range(1, 5))
    assert audit(run.path).as_json() == {
        "schema": 1, "ok": True, "lost": 0, "repeated": 0, "superseded": 0, "attempts": 1,
        "changes": 0,
        "history": [], "problems": [],
        "epochs": [
            {"epoch": 0, "lost": 0, "repeated": 0, "never_seen": 0},
            {"epoch": 1, "lost": 0, "repeated": 0, "never_seen": 14},
        ],
    }  # fmt: skip


@pytest.mark.parametrize("config", [None, "", "{}", '{"plan": {}}', '{"plan": 3}', "[]"])
def test_what_is_no_run_directory_is_an_input_error(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(
        InputError, match="is not a run directory" if config is None else "config.json is damaged"
    ):
        audit(tmp_path)


def test_a_run_without_a_ledger_is_an_input_error(run: FakeRun) -> None:
    with pytest.raises(InputError, match="no ledger"):
        audit(run.path)


# -- digests ---------------------------------------------------------------------------------------


def digest(*samples: int) -> int:
    return int(compute_digests(np.array(samples, dtype=np.int64), [len(samples)])[0])


def test_a_digest_does_not_depend_on_order() -> None:
    assert digest(5, 0, 9) == digest(0, 5, 9) == digest(9, 5, 0)


@pytest.mark.parametrize(
    "changed",
    [(0, 5), (0, 5, 9, 9), (0, 5, 8), (0, 0, 5, 9), (5, 9), (1, 4, 9), (0, 5, 9, 2)],
    ids=["missing", "twice", "replaced", "zero twice", "zero missing", "same sum", "extra"],
)
def test_a_digest_changes_with_a_sample_missing_extra_or_replaced(changed: tuple[int, ...]) -> None:
    assert digest(*changed) != digest(0, 5, 9)


def test_digests_of_neighbouring_samples_spread_over_64_bits() -> None:
    values = [digest(i) for i in range(2000)]
    assert len(set(values)) == 2000
    share_of_ones = np.mean([[value >> bit & 1 for bit in range(64)] for value in values], axis=0)
    assert share_of_ones.min() > 0.4 and share_of_ones.max() < 0.6


def test_groups_have_their_own_digests_and_an_empty_one_is_zero() -> None:
    together = compute_digests(np.array([4, 7, 1], dtype=np.int64), [0, 2, 0, 1])
    assert together.tolist() == [0, digest(4, 7), 0, digest(1)]


def test_a_digest_stays_the_same_with_every_version() -> None:
    """Frozen: ledgers that were written before must still prove what they proved."""
    assert digest(0, 1, 2**40) == 0x9308474EF730EDF9


def test_a_rank_makes_the_run_directory_where_its_node_has_none(tmp_path: Path) -> None:
    """Only the first rank's node has one if the nodes share no file system."""
    for rank in (0, 1):
        Ledger(tmp_path / "runs" / "run", LedgerHeader(1, rank, 2, 0, "")).close()
    assert len(list((tmp_path / "runs" / "run" / "ledger").iterdir())) == 2


@pytest.mark.parametrize(
    "damaged", [3, 9], ids=["an older one is damaged", "a newer one is damaged"]
)
def test_a_damaged_snapshot_hides_no_other(run: FakeRun, damaged: int) -> None:
    """The ledger of attempt 1 ends before the good snapshot's step: that must be seen beside the
    damaged one.
    """
    run.attempt(1, range(1, 7))
    run.snapshot(1, 6)
    folder = run.path / "snapshots" / f"step_{damaged:08d}"
    folder.mkdir()
    (folder / "manifest.json").write_text("{")
    run.edit(1, 0, lambda lines: lines.pop())
    assert any("snapshot of step 6" in problem for problem in audit(run.path).problems)


def test_attempts_are_told_apart_by_all_their_digits(run: FakeRun) -> None:
    """1001 attempts: the last one's number must not be read as 1."""
    run.attempt(1, range(1, 4))
    run.snapshot(1, 3)
    run.chains |= dict.fromkeys(range(2, 1001), run.chains[1])
    run.attempt(1, range(4, 7), after=1)
    result = audit(run.path)
    assert result.ok and result.attempts == 2, result.problems


def test_a_header_names_only_what_it_has() -> None:
    """A ledger of an earlier version has no such entries, and its lines have the same hashes."""
    assert set(json.loads(LedgerHeader(1, 0, 1, 0, "").text)) == {
        "attempt", "rank", "world_size", "resumed_from_step", "chain"
    }  # fmt: skip
    header = json.loads(LedgerHeader(3, 0, 1, 4, "", in_rounds=True, parent=2).text)
    assert (header["in_rounds"], header["parent"]) == (True, 2)
