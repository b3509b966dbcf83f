"""Each rule has a profile that makes it fire, and one just beside it that does not."""

from __future__ import annotations

import inspect
import re

import pytest

from profiles import profile, rank_profile
from stepladder.tools.profiler import advice
from stepladder.tools.profiler.advice import MAX_ADVICE, Profile, advise, find_all_advice

GPU = {"on_gpu": True}
CASES = {
    "slow_data": (profile(rank_profile(data=0.3)), profile(rank_profile(data=0.1))),
    "late_rank": (
        profile(rank_profile(0, waiting=0.4), rank_profile(1, backward=0.9)),
        profile(rank_profile(0, waiting=0.4), rank_profile(1, waiting=0.4)),
    ),
    "uneven_ranks": (
        profile(rank_profile(0, waiting=0.3), rank_profile(1, waiting=0.2)),
        profile(rank_profile(0, waiting=0.4), rank_profile(1, waiting=0.0)),
    ),
    "slow_communication": (
        profile(rank_profile(communication=0.3)),
        profile(rank_profile(communication=0.1)),
    ),
    "python": (profile(rank_profile(python=0.5)), profile(rank_profile(python=0.5, on_gpu=True))),
    "idle_gpu": (profile(rank_profile(other=0.5, on_gpu=True)), profile(rank_profile(other=0.5))),
    "slow_optimizer": (profile(rank_profile(optimizer=0.3)), profile(rank_profile(optimizer=0.1))),
    "many_copies": (
        profile(aten__copy_=0.1, aten__clone=0.1),
        profile(aten__mm=0.5, aten__copy_=0.1),
    ),
}


def fired(one: Profile) -> list[str]:
    return [advice.rule for advice in find_all_advice(one)]


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_where_it_should_alone(rule: str) -> None:
    fires, beside = CASES[rule]
    assert fired(fires) == [rule]
    assert rule not in fired(beside)


def test_every_rule_has_its_case() -> None:
    """And so has one that is added to the source."""
    rules = re.findall(r'Advice\(\s*"(\w+)"', inspect.getsource(advice))
    assert sorted(rules) == sorted([*CASES, "nothing"])


def test_the_late_rank_and_its_part_are_named() -> None:
    (advice,) = advise(CASES["late_rank"][0])
    assert advice.text.startswith(
        "Rank 1 comes last, and the wait for it takes 40% of a step: backward takes 900 ms longer"
    )


def test_a_late_rank_whose_parts_are_not_longer_is_held_up() -> None:
    held_up = profile(rank_profile(0, waiting=0.4), rank_profile(1, communication=0.4))
    (advice,) = [one for one in advise(held_up) if one.rule == "late_rank"]
    assert "no part of it is longer, so it is held up by what else runs on its cores" in advice.text


@pytest.mark.parametrize(
    ("held_up", "rules"),
    [(0.0, ["late_rank", "slow_communication"]), (0.25, ["late_rank"]), (0.5, ["nothing"])],
)
def test_what_other_programs_explain_of_waits_and_communication_is_left_out(
    held_up: float, rules: list[str]
) -> None:
    ranks = [rank_profile(0, waiting=0.45, held_up=held_up, communication=0.2)]
    ranks.append(rank_profile(1, backward=0.65, held_up=held_up, communication=0.2))
    assert [item.rule for item in advise(profile(*ranks))] == rules


def test_what_to_do_about_communication_depends_on_when_it_begins() -> None:
    (after,) = advise(profile(rank_profile(communication=0.3)))
    (early,) = advise(profile(rank_profile(communication=0.3, early=True, overlapped=0.1)))
    assert "--sync ddp" in after.text
    assert "--sync ddp" not in early.text and "(25% of all is hidden behind backward)" in early.text


def test_the_largest_come_first_and_no_more_than_can_be_done() -> None:
    bad = rank_profile(data=0.2, optimizer=0.25, communication=0.3, python=0.35)
    assert [advice.rule for advice in advise(profile(bad))] == [
        "python",
        "slow_communication",
        "slow_optimizer",
    ]
    assert len(advise(profile(bad))) == MAX_ADVICE


def test_where_nothing_is_wrong_it_says_what_the_time_is_spent_on() -> None:
    (advice,) = advise(profile(aten__mm=0.6))
    assert advice.rule == "nothing" and "100% of a step, most of it in aten::mm" in advice.text
