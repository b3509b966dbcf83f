"""Where a step's time goes, on traces written by hand: each microsecond in the part that it belongs
to.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from profiles import arrow, event, note, rank_profile, trace, trace_of_steps
from stepladder.tools.profiler.advice import Profile, advise, describe_disturbance
from stepladder.tools.profiler.breakdown import (
    PARTS,
    Operator,
    align_clocks,
    choose_typical_steps,
    find_crowded_host,
    find_disturbed_steps,
    find_top_operators,
    make_rank_profiles,
    match_collectives,
    measure_steps,
)
from stepladder.tools.profiler.tables import make_operator_table, make_rank_tables
from stepladder.tools.profiler.trace import Timeline, Trace, make_spans

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def micros(found: Trace, *others: Trace) -> dict[str, float | None]:
    """Microseconds of the first trace's parts."""
    (first, *_) = make_rank_profiles([found, *others])
    return {name: None if s is None else pytest.approx(s * 1e6) for name, s in first.parts.items()}


def script(folder: Path, rank: int = 0, begins: float = 55, **about: object) -> Trace:
    """data 0-10, forward 20-40, backward 40-70 with a collective from `begins` to 80, optimizer
    85-95.
    """
    return trace(
        folder,
        note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10),
        arrow(20),
        event("aten::mm", 20, 30),
        event("aten::add", 24, 26),
        arrow(32),
        event("aten::relu", 32, 38),
        event(BACKWARD, 40, 70),
        event("aten::mm", 45, 60),
        event("c10d::allreduce_", 54, 55),
        note("gloo:all_reduce", begins, 80, tid=2),
        note("Optimizer.step#SGD.step", 85, 95),
        rank=rank,
        **about,
    )


def test_spans_on_a_timeline() -> None:
    some = make_spans([(0, 4), (2, 6), (8, 9)])
    other = make_spans([(5, 10)])
    line = Timeline(some, other)
    assert line.length(line.covered_by(some)) == 7
    assert line.length(line.covered_by(some) & line.covered_by(other)) == 2
    assert line.length(line.covered_by(make_spans([]))) == 0


def test_a_script_s_parts_follow_from_what_torch_notes(tmp_path: Path) -> None:
    found = script(tmp_path)
    assert micros(found) == {
        "data": 10, "forward": 20, "backward": 20, "communication": 20, "waiting": 0, "optimizer": 10, "other": 20
    }  # fmt: skip
    (profile,) = make_rank_profiles([found])
    assert (
        profile.seconds * 1e6
        == pytest.approx(100)
        == sum((s or 0) * 1e6 for s in profile.parts.values())
    )
    assert profile.overlapped * 1e6 == pytest.approx(6), "54 to 60, while aten::mm runs"
    assert profile.python * 1e6 == pytest.approx(100 - 10 - 16 - 30 - 10), (
        "no data, operators, backward, waiting"
    )
    assert profile.early


def test_waiting_is_until_the_last_rank_comes(tmp_path: Path) -> None:
    early = script(tmp_path)
    late = script(tmp_path, rank=1, begins=75)
    align_clocks([early, late])
    parts = micros(early, late)
    assert (parts["waiting"], parts["communication"]) == (15, 5)  # 60 to 75, 75 to 80
    assert micros(late, early)["waiting"] == 0


def test_what_the_trace_does_not_tell_is_unknown(tmp_path: Path) -> None:
    found = micros(
        trace(tmp_path, event("aten::mm", 0, 30), note("Optimizer.step#SGD.step", 85, 95))
    )
    assert {name for name in PARTS if found[name] is None} == {"data", "forward", "backward"}
    assert (found["optimizer"], found["other"]) == (10, 90)


def test_a_job_s_parts_are_marked(tmp_path: Path) -> None:
    marks = [
        note(f"stepladder:{name}", 20 * n, 20 * n + 15)
        for n, name in enumerate(("data", "forward", "backward"))
    ]
    found = micros(
        trace(tmp_path, *marks, note("stepladder:optimizer", 60, 61), event(BACKWARD, 0, 90))
    )
    assert [found[name] for name in ("data", "forward", "backward", "optimizer", "other")] == [
        15,
        15,
        15,
        1,
        54,
    ]


def test_accumulated_passes_and_checkpointing(tmp_path: Path) -> None:
    """Forward twice, backward twice; what checkpointing computes anew within backward is backward."""
    found = trace(
        tmp_path,
        arrow(0),
        event("aten::mm", 0, 8),
        event(BACKWARD, 10, 30),
        arrow(15),
        arrow(40),
        event("aten::mm", 40, 48),
        event(BACKWARD, 50, 60),
        event(BACKWARD, 65, 70),
        note("Optimizer.step#SGD.step", 80, 90),
    )
    parts = micros(found)
    assert (parts["forward"], parts["backward"], parts["optimizer"]) == (20, 40, 10)


def test_an_optimizer_s_closure(tmp_path: Path) -> None:
    """As Lightning trains: forward, zero_grad and backward within the optimizer's step."""
    found = trace(
        tmp_path,
        note("Optimizer.step#SGD.step", 10, 90),
        arrow(20),
        event("aten::mm", 20, 30),
        note("Optimizer.zero_grad#SGD.zero_grad", 35, 36),
        event(BACKWARD, 40, 70),
    )
    parts = micros(found)
    assert (parts["forward"], parts["backward"], parts["optimizer"], parts["other"]) == (
        20,
        30,
        30,
        20,
    )


def test_a_gpu_s_time_counts_by_who_started_it(tmp_path: Path) -> None:
    """As Kineto writes a GPU's trace: kernels on streams, tied to their launches by a correlation."""
    found = trace(
        tmp_path,
        note("stepladder:data", 0, 5),
        note("stepladder:forward", 5, 10),
        note("stepladder:backward", 10, 15),
        event("cudaLaunchKernel", 6, 7, "cuda_runtime", correlation=1),
        event("cudaLaunchKernel", 11, 12, "cuda_runtime", correlation=2),
        event("gemm", 8, 30, "kernel", tid=7, correlation=1),
        event("gemm", 30, 60, "kernel", tid=7, correlation=2),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 80, "kernel", tid=20, correlation=3),
    )
    assert micros(found) == {
        "data": 5, "forward": 22, "backward": 30, "communication": 20, "waiting": 0, "optimizer": 0, "other": 23
    }  # fmt: skip
    (profile,) = make_rank_profiles([found])
    assert profile.on_gpu and profile.overlapped * 1e6 == pytest.approx(10)
    assert [
        (one.name, round(one.seconds * 1e6), one.calls) for one in find_top_operators([found])
    ] == [("gemm", 52, 2)]


def test_operators_count_what_is_their_own(tmp_path: Path) -> None:
    found = {one.name: round(one.seconds * 1e6) for one in find_top_operators([script(tmp_path)])}
    assert found == {
        "aten::mm": 22,
        "aten::add": 2,
        "aten::relu": 6,
        BACKWARD: 15,
        "c10d::allreduce_": 1,
    }


def test_another_machine_s_clock_is_moved_to_where_collectives_end_together(tmp_path: Path) -> None:
    here = script(tmp_path)
    there = script(tmp_path, rank=1, begins=60, host="there", base=3_000_000)
    assert (
        align_clocks([here, there])
        == "there: moved by -3.000 ms, the median over the ends of 1 collectives"
    )
    assert there.shift == 0 and there.steps.tolist() == here.steps.tolist()


def test_clocks_without_a_common_collective_stay(tmp_path: Path) -> None:
    alone = trace(tmp_path, rank=1, host="there", base=3_000_000)
    assert (
        align_clocks([script(tmp_path), alone])
        == "there: its own clock, because no collective was found to compare"
    )
    assert alone.shift == 3000


def test_collectives_of_other_names_are_not_compared(tmp_path: Path) -> None:
    other = trace(tmp_path, note("gloo:broadcast", 55, 80, tid=2), rank=1)
    assert match_collectives([script(tmp_path), other]) == []
    assert np.array_equal(script(tmp_path).steps, other.steps)


def test_a_hiccup_of_one_rank_changes_nothing(tmp_path: Path) -> None:
    """Of 30 steps of 420 us, rank 1 is held up by 20 ms in one and by 3 ms in five others."""
    held_up_us = {4: 20_000.0} | dict.fromkeys((9, 12, 17, 22, 28), 3_000.0)
    enters = [300.0 + held_up_us.get(step, 0.0) for step in range(30)]
    ends = [enter + 100 for enter in enters]
    disturbed = [
        trace_of_steps(tmp_path, 0, [300.0] * 30, ends),
        trace_of_steps(tmp_path, 1, enters, ends),
    ]
    (tmp_path / "quiet").mkdir()
    quiet = [
        trace_of_steps(tmp_path / "quiet", rank, [300.0] * 30, [400.0] * 30) for rank in (0, 1)
    ]
    assert len(choose_typical_steps(disturbed)) == 16
    assert measure_steps(disturbed)[choose_typical_steps(disturbed)].max() == pytest.approx(420)
    profiles = [Profile(make_rank_profiles(traces), []) for traces in (disturbed, quiet)]
    rules = [[item.rule for item in advise(profile)] for profile in profiles]
    assert rules == [["python", "slow_communication"]] * 2
    assert [rank.parts["waiting"] for rank in profiles[0].ranks] == [0, 0]
    assert profiles[0].ranks[0].seconds == pytest.approx(420e-6)


def disturb(folder: Path, num_disturbed: int) -> list[Trace]:
    """Traces of 30 steps of 420 us, of which rank 1 waits 3 ms for a core in so many."""
    folder.mkdir(exist_ok=True)
    queued_us = [3_000.0] * num_disturbed + [0.0] * (30 - num_disturbed)
    enters = [300 + queued for queued in queued_us]
    ends = [enter + 100 for enter in enters]
    queued_s = [queued / 1e6 for queued in queued_us]
    return [
        trace_of_steps(folder, 0, [300.0] * 30, ends, [0.0] * 30),
        trace_of_steps(folder, 1, enters, ends, queued_s),
    ]


@pytest.mark.parametrize("num_held_up", [3, 20, 24])
def test_steps_in_which_another_program_has_the_core_do_not_count(
    num_held_up: int, tmp_path: Path
) -> None:
    """Also where most of the steps are such. The step after them does not count either."""
    traces = disturb(tmp_path, num_held_up)
    assert find_disturbed_steps(traces).sum() == num_held_up + 1
    profile = Profile(make_rank_profiles(traces), [], disturbed_steps=num_held_up + 1)
    assert [item.rule for item in advise(profile)] == ["python", "slow_communication"]
    assert profile.ranks[0].seconds == pytest.approx(420e-6)
    assert describe_disturbance(profile) == (
        f"Other programs used the cores: in or just before {num_held_up + 1} of 30 steps a rank was"
        " ready to compute and had no core; those steps do not count above."
    )


def test_a_disturbance_that_cannot_be_left_out_is_told(tmp_path: Path) -> None:
    traces = disturb(tmp_path, 28)
    profile = Profile(make_rank_profiles(traces), [], disturbed_steps=28)
    assert profile.ranks[0].parts["waiting"] == pytest.approx(3000e-6)
    assert [item.rule for item in advise(profile)] == ["python"], "the wait is explained"
    assert "leave out what that explains" in (describe_disturbance(profile) or "")
    few = Profile(profile.ranks, [], disturbed_steps=2)
    assert describe_disturbance(few) is None


def test_ranks_that_crowd_their_cores_are_no_other_program(tmp_path: Path) -> None:
    traces = disturb(tmp_path, 20)
    for one in traces:
        one.metadata["threads"] = 2
    crowded = find_crowded_host(traces)
    assert crowded == "2 ranks with 4 threads share 2 cores"
    profile = Profile(make_rank_profiles(traces), [], disturbed_steps=20, crowded=crowded)
    assert profile.ranks[0].seconds == pytest.approx(3420e-6)
    assert (describe_disturbance(profile) or "").startswith(
        f"{crowded}: in or just before 20 of 30 "
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 12, 64])
def test_the_tables_are_whole_in_80_columns(num_ranks: int) -> None:
    """Each number is there in full, and no heading falls into pieces."""
    ranks = [rank_profile(number, data=0.25, waiting=number / 1e4) for number in range(num_ranks)]
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
    profile = Profile(ranks, [Operator(name, 0.123456, 4)])
    console = Console(record=True, width=80, file=io.StringIO())
    for table in [*make_rank_tables(profile, "job", 80), make_operator_table(profile)]:
        console.print(table)
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    headings = re.findall(r"rank \d+|least|median|most", text)
    if num_ranks <= 12:
        assert headings == [f"rank {number}" for number in range(num_ranks)]
    else:
        assert headings == ["least", "median", "most", "rank 0", "rank 1", "rank 2"]
    assert text.count(" 250 ") == len(headings)
    folded = [line.split("│")[1].strip() for line in text.splitlines() if line.count("│") == 5]
    assert "123.456" in text and name[:70].replace(" ", "") in "".join(folded).replace(" ", "")
