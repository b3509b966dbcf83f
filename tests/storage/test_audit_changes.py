"""Ranks that are lost, and join, within an attempt: the ledgers of all of them tell one story."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers import FakeRun
from stepladder import Plan
from stepladder.storage.audit import audit
from stepladder.storage.ledger import Ledger, LedgerHeader, join_chains
from stepladder.storage.ledger_rank_reader import Attempt, ChangeLine, RankLedgerReader

PLAN = Plan(num_samples=24, global_batch=6, microbatch=1, seed=1)
STEPS = 8


class Ranks:
    """Ranks that write their ledgers as a run does, and can be lost at any line."""

    def __init__(self, run: FakeRun, count: int) -> None:
        self.run = run
        self.group = 0
        self.step = 0
        self.known = count
        self.ledgers = {
            rank: Ledger(run.path, LedgerHeader(1, rank, count, 0, "")) for rank in range(count)
        }
        run.chains[1] = {}

    def compute(self, ranks: list[int]) -> None:
        """These of them write down their share of the next step."""
        members = list(self.ledgers)
        for rank in ranks:
            spans = PLAN.share(self.step, members.index(rank), len(members))
            indices = [PLAN.indices(self.step, span) for span in spans]
            self.ledgers[rank].record_step(self.step + 1, PLAN.epoch_of_step(self.step), indices)
            self.ledgers[rank].flush()

    def do_step(self) -> None:
        self.compute(list(self.ledgers))
        self.step += 1

    def change(self, informed: list[int] | None = None, ahead: int = 0) -> None:
        """A new group. told: those that come to write it down.  ahead: steps that some of it have
        done more.
        """
        self.group += 1
        for rank in informed if informed is not None else list(self.ledgers):
            self.ledgers[rank].record_change(self.step + ahead, list(self.ledgers), self.group)

    def lose(self, rank: int) -> None:
        self.ledgers.pop(rank).close()

    def join(self) -> None:
        self.ledgers[self.known] = Ledger(self.run.path, LedgerHeader(1, self.known, 0, 0, ""))
        self.known += 1
        self.change()


def first(ranks: Ranks, count: int) -> list[int]:
    return list(ranks.ledgers)[:count]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 4)), max_size=STEPS))
def test_nothing_is_lost_or_repeated_whoever_goes_and_comes(
    events: list[tuple[int, int, int]],
) -> None:
    with TemporaryDirectory() as folder:
        run = FakeRun(Path(folder) / "run", PLAN)
        ranks = Ranks(run, 3)
        changes = 0
        for step in range(STEPS):
            event, rank_index, count = events[step] if step < len(events) else (9, 0, 0)
            if event < 4 and len(ranks.ledgers) > 1:
                ranks.compute(
                    first(ranks, count)
                )  # a step that is not done: some have written their share
                if (
                    event == 3
                ):  # a group that nobody trains with, as one more is lost, when some know of it
                    was_last = count >= len(
                        ranks.ledgers
                    )  # to have done the step that all have written down
                    ranks.lose(first(ranks, 9)[rank_index % len(ranks.ledgers)])
                    ranks.change(informed=first(ranks, count)[:-1], ahead=int(was_last))
                if len(ranks.ledgers) > 1:
                    ranks.lose(first(ranks, 9)[rank_index % len(ranks.ledgers)])
                ranks.change()
            elif event == 4:
                ranks.join()
                if count == 4:  # and gets the state from those that are lost then
                    for rank in first(ranks, len(ranks.ledgers) - 1):
                        ranks.lose(rank)
                    ranks.change()
            ranks.do_step()
        changes = ranks.group
        run.result(STEPS)
        result = audit(run.path)
        assert (result.lost, result.repeated, result.superseded, result.problems) == (0, 0, 0, [])
        assert result.changes <= changes


@pytest.mark.parametrize("informed", [[0], [1], [0, 1]])
def test_the_one_that_is_a_step_ahead_is_lost_before_it_gives_that_step(
    tmp_path: Path, informed: list[int]
) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    ranks = Ranks(run, 3)
    ranks.do_step()
    run.chains[1][1] = join_chains([ledger.chain for ledger in ranks.ledgers.values()])
    ranks.compute([0, 1, 2])
    run.chains[1][2] = join_chains(
        [ledger.chain for ledger in ranks.ledgers.values()]
    )  # of a step that is void
    run.snapshot(1, 1)
    ranks.lose(2)
    ranks.change(informed, ahead=1)
    ranks.lose(0)
    ranks.change()
    ranks.do_step()
    ranks.do_step()
    run.result(3)
    assert audit(run.path).problems == []
    run.snapshot(1, 2)
    assert not audit(run.path).ok


@pytest.mark.parametrize("joined", [False, True])
def test_one_that_has_joined_goes_on_alone_where_the_other_has_said_so(
    tmp_path: Path, joined: bool
) -> None:
    """joined: whether it has written the line of that group itself."""
    run = FakeRun(tmp_path / "run", PLAN)
    ranks = Ranks(run, 1)
    ranks.do_step()
    ranks.ledgers[1] = Ledger(run.path, LedgerHeader(1, 1, 0, 0, ""))
    ranks.change(informed=[0, 1] if joined else [1])
    ranks.lose(0)
    ranks.change()
    ranks.do_step()
    run.result(2)
    assert audit(run.path).ok == joined


def test_a_line_of_a_change_names_thousands_of_ranks(tmp_path: Path) -> None:
    ranks = tuple(range(1, 3000))
    ledger = Ledger(tmp_path, LedgerHeader(1, 1, 3000, 0, ""))
    ledger.record_change(0, list(ranks), 1)
    ledger.close()
    reader = RankLedgerReader(tmp_path, Attempt(1, 3000, 0, ""), 1)
    assert reader.early_change == ChangeLine(0, ranks, 1)


def test_the_history_says_who_was_lost_and_who_came(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    ranks = Ranks(run, 2)
    ranks.do_step()
    ranks.lose(1)
    ranks.group += 1
    ranks.ledgers[0].record_change(
        1, [0], ranks.group, ["rank 1 was killed by SIGKILL", "\x1b[31m"]
    )
    ranks.do_step()
    ranks.join()
    ranks.do_step()
    run.result(3)
    result = audit(run.path)
    assert result.problems == []
    assert result.as_json()["history"] == [
        {
            "attempt": 1,
            "step": 1,
            "lost": [1],
            "joined": [],
            "why": ["rank 1 was killed by SIGKILL", "\\x1b[31m"],
        },
        {"attempt": 1, "step": 2, "lost": [], "joined": [2], "why": []},
    ]
    sentences = [item.sentence for item in result.history]
    assert sentences[0].startswith("after step 1: rank 1 lost (rank 1 was killed by SIGKILL; ")
    assert sentences[1] == "after step 2: rank 2 joined"


def test_a_line_that_was_altered_after_a_loss_is_found(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    ranks = Ranks(run, 2)
    ranks.do_step()
    ranks.compute([0])
    ranks.lose(1)
    ranks.change()
    for _ in range(STEPS - 1):
        ranks.do_step()
    run.result(STEPS)
    assert audit(run.path).ok and audit(run.path).changes == 1
    run.edit(1, 0, lambda lines: lines.__setitem__(2, lines[2].replace('"count": 3', '"count": 2')))
    assert not audit(run.path).ok, "a line of a step that was not done is still a line"
    run.edit(
        1, 0, lambda lines: lines.__setitem__(3, lines[3].replace('"ranks": [0]', '"ranks": [1]'))
    )
    assert not audit(run.path).ok


@pytest.mark.parametrize("written", [None, b"", b'{"attempt": 1, "ra'])
@pytest.mark.parametrize("shares", [0, 2])
def test_a_rank_that_is_lost_before_it_writes_anything(
    tmp_path: Path, written: bytes | None, shares: int
) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    ranks = Ranks(run, 3)
    ranks.lose(1)
    file = run.file(1, 1)
    file.unlink() if written is None else file.write_bytes(written)
    ranks.compute(first(ranks, shares))
    ranks.change()
    ranks.join()
    ranks.do_step()
    ranks.do_step()
    run.result(2)
    result = audit(run.path)
    assert (result.lost, result.repeated, result.problems) == (0, 0, [])
    run.file(1, 2).unlink()  # one that counts
    assert audit(run.path).problems[0] == "attempt 1 rank 2: attempt-0001.rank-2.jsonl is missing"


@pytest.mark.parametrize("written", [None, b"", b'{"attempt": 1, "ra'])
def test_an_attempt_that_is_lost_before_all_have_begun(
    tmp_path: Path, written: bytes | None
) -> None:
    run = FakeRun(tmp_path / "run", PLAN)
    ranks = Ranks(run, 3)
    ranks.compute([0, 2])  # and wait for the one that is killed
    file = run.file(1, 1)
    file.unlink() if written is None else file.write_bytes(written)
    second = {rank: Ledger(run.path, LedgerHeader(2, rank, 3, 0, "")) for rank in range(3)}
    ranks.ledgers = second
    ranks.do_step()
    run.result(1)
    result = audit(run.path)
    assert (result.lost, result.repeated, result.problems) == (0, 0, [])
    assert result.attempts == 2
