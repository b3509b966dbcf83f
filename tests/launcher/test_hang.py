"""Why nothing moves: planted hangs of real ranks, and each rule on what ranks may show."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import stepladder
import stepladder_exchange
from processes import JOBS, Started, refused, run, started, wait_until
from stepladder.launcher.diagnose.explanation import format_rank
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import (
    COLLECTIVE_FILES,
    STORE_FILE,
    STORE_FUNCTION,
    ProcessState,
    RankStatus,
)
from stepladder.rank.progress import COMPUTING, READING, STARTING, WAITING, CallSite, RankProgress
from stepladder.rank.stacks import Frame

FORMING_FILE = f"{Path(stepladder.__file__).parent}/rank/torch_fixes_groups.py"
PLANTED = {
    "alone": r"rank 0 .* has not reached all_reduce \d+ of step 3: it is in all_reduce, "
    r"called by hang\(\), "
    r"hangs.py:\d+; the others wait\n  usual cause: a collective that only some ranks call",
    "data": r"rank 1 .*: it is waiting for its data loader, whose worker \(pid \d+\) is in "
    r"__getitem__\(\), "
    r"hangs.py:\d+ `time.sleep\(1000\)`; the others wait\n  usual cause: a data loader that "
    r"does not deliver(.|\n)*worker \d+: idle, waits for the next index",
    "lock": r"rank 1 .* of step 3: it is in deadlock\(\), hangs.py:\d+ `with second:`; the "
    r"others wait\n"
    r"  usual cause: a deadlock(.|\n)*another thread: lock_in_other_order\(\), hangs.py:\d+ `with first:`",
    "sleep": r"rank 1 .* of step 3: it is in validate\(\), hangs.py:\d+ .*; the others wait\n"
    r"  usual cause: work that only this rank does",
    "stop": r"rank 1 .* is stopped \(SIGSTOP\) in step 3, .*; the others wait for it\n  usual "
    r"cause: Ctrl-Z",
    "build": r"rank 1 .* has not reached all_gather 1: it is in build\(\), hangs.py:\d+ .*; "
    r"the others wait\n",
}


def start_hang(kind: str, folder: Path) -> AbstractContextManager[Started]:
    flags = "--nproc", 2, "--explain-after", 1.5, "--num-workers", int(kind == "data")
    return started("train", JOBS / "hangs.py", *flags, cwd=folder, env={"HANG": f"{kind} 3"})


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind",
    [
        "alone",
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in ("data", "lock", "sleep", "stop", "build")
        ),
    ],
)
def test_a_planted_hang_is_named(kind: str, tmp_path: Path) -> None:
    with start_hang(kind, tmp_path) as running:
        wait_until(lambda: re.search(PLANTED[kind], running.err.read_text()), running.err.read_text)


@pytest.mark.ranks
def test_tensors_of_different_shapes_are_named_though_gloo_ends_the_ranks(tmp_path: Path) -> None:
    done = run(
        "train",
        JOBS / "hangs.py",
        "--nproc",
        2,
        "--timeout",
        20,
        cwd=tmp_path,
        env={"HANG": "shapes 3"},
    )
    assert done.returncode == 1
    assert "not restarted: the code is wrong" in done.stderr
    assert "restarting" not in done.stderr
    named = (
        r"rank 1 .* passes 7 numbers to broadcast \d+.*, rank 0 .* passes 6. Usual cause: "
        r"tensors of different"
    )
    assert re.search(named, done.stderr), done.stderr


@pytest.mark.ranks
def test_a_model_that_differs_by_rank_is_refused_by_the_name_of_its_weight(tmp_path: Path) -> None:
    done = run("train", JOBS / "hangs.py", "--nproc", 2, cwd=tmp_path, env={"HANG": "model 3"})
    refused(
        done,
        "rank 1 has built another model than rank 0: weight of shape [1, 7], torch.float32, where",
    )
    assert not (tmp_path / "runs").exists()


def test_a_time_to_wait_that_is_none_is_refused(tmp_path: Path) -> None:
    refused(
        run("train", "mlp", "--explain-after", 0, cwd=tmp_path),
        "'--explain-after': 0.0 is not in the range x>=0.001",
    )


# -- the rules, on ranks that are made up ----------------------------------------------------------

REDUCE = CallSite("finish", "/p/sync.py", 120, "all_reduce")
BROADCAST = CallSite("end", "/p/run.py", 30, "broadcast")
INSIDE = Frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 3252)


def make_progress(
    count: int, waiting: int = 0, phase: int = WAITING, size: int = 10, site: CallSite = REDUCE
) -> RankProgress:
    return RankProgress(
        40,
        phase,
        5,
        count,
        waiting,
        tuple((n, (site, size)) for n in range(max(1, count - 3), count + 1)),
    )


def user_frame(function: str, line: int) -> Frame:
    return Frame(function, "/home/me/train.py", line)


def test_the_files_that_collectives_wait_in_are_there() -> None:
    own_files = [file for file in (*COLLECTIVE_FILES, STORE_FILE) if file.startswith("stepladder")]
    sources = [
        Path(package.__file__ or "").parents[1] for package in (stepladder, stepladder_exchange)
    ]
    missing = [file for file in own_files if not any((s / file).exists() for s in sources)]
    assert own_files and missing == []
    assert f"def {STORE_FUNCTION}(" in (sources[0] / STORE_FILE).read_text()


def test_the_rank_that_has_not_come_is_named() -> None:
    late = RankStatus(
        3, 103, progress=make_progress(811, phase=COMPUTING), threads=[[user_frame("validate", 88)]]
    )
    ranks = [*(RankStatus(n, 100 + n, progress=make_progress(812, 812)) for n in range(3)), late]
    explanation = explain_hang(ranks)
    assert explanation.rank == 3
    assert explanation.sentence == (
        "rank 3 (pid 103) has not reached all_reduce 812 of step 40: it is in validate(), "
        "train.py:88;"
        " the others wait"
    )
    assert "work that only this rank does" in explanation.cause
    text = explanation.format_report("nothing has moved", 60)
    assert text.splitlines()[0] == f"stepladder: nothing has moved for 60 s: {explanation.sentence}"
    assert (
        "[rank 3] pid 103, step 40, forward and backward, 811 collectives begun\n    "
        "validate(), train.py:88" in text
    )


def test_several_late_ranks_are_counted_up() -> None:
    late = [
        RankStatus(n, 100 + n, progress=make_progress(811), threads=[[user_frame("loss", n)]])
        for n in range(1, 6)
    ]
    explanation = explain_hang([RankStatus(0, 100, progress=make_progress(812, 812)), *late])
    assert explanation.sentence.startswith("ranks 1, 2, 3, ... have not reached all_reduce 812")
    assert "rank 2 is in loss(), train.py:2" in explanation.sentence


def test_ranks_in_different_collectives_are_told_apart() -> None:
    ranks = [
        RankStatus(0, 100, progress=make_progress(812, 812)),
        RankStatus(1, 101, progress=make_progress(812, 812, site=BROADCAST)),
    ]
    explanation = explain_hang(ranks)
    assert (
        "rank 1 (pid 101) calls broadcast (end(), run.py:30) where rank 0 (pid 100) calls "
        "all_reduce" in explanation.sentence
    )
    assert "ranks that take different branches" in explanation.cause


def test_different_sizes_are_told_unless_they_may_differ() -> None:
    ranks = [
        RankStatus(0, 100, progress=make_progress(812, 812)),
        RankStatus(1, 101, progress=make_progress(812, 812, size=20)),
    ]
    assert "rank 1 (pid 101) passes 20 numbers to all_reduce 8" in explain_hang(ranks).sentence
    assert "different shapes" in explain_hang(ranks).cause
    free = [RankStatus(n, 100, progress=make_progress(812, 812, size=-n)) for n in range(2)]
    assert "passes" not in explain_hang(free).sentence


def test_a_script_s_own_collectives_are_seen_in_the_stacks() -> None:
    """Nothing in the words: the ranks of an unmodified script."""
    waiting = RankStatus(0, 100, threads=[[INSIDE, user_frame("train", 30)]])
    busy = RankStatus(1, 101, threads=[[user_frame("validate", 88), user_frame("train", 40)]])
    explanation = explain_hang([waiting, busy])
    assert explanation.sentence == (
        "rank 1 (pid 101): it is in validate(), train.py:88; the others wait in all_reduce,"
        " called by train(), train.py:30"
    )
    second = RankStatus(1, 101, threads=[[INSIDE, user_frame("validate", 88)]])
    explanation = explain_hang([waiting, second])
    assert (
        "rank 1 (pid 101) waits in all_reduce, called by validate(), train.py:88, while rank 0"
        in explanation.sentence
    )
    assert "ranks that take different branches" in explanation.cause


def test_groups_in_another_order_are_told_by_their_members_before_who_waits_for_them() -> None:
    """All of them are formed by one line."""
    waiting = RankStatus(0, 100, threads=[[INSIDE, user_frame("train", 30)]])
    forming = [
        RankStatus(
            rank,
            100 + rank,
            threads=[
                [
                    Frame("_helper", "/site-packages/torch/distributed/distributed_c10d.py", 1),
                    Frame(f"new_group {rank} of ranks 1, 2", FORMING_FILE, 3),
                    Frame("new_group", "/site-packages/torch/distributed/distributed_c10d.py", 2),
                    user_frame("form", 40),
                ]
            ],
        )
        for rank in (1, 2)
    ]
    explanation = explain_hang([waiting, *forming])
    assert explanation.sentence == (
        "rank 2 (pid 102) waits in new_group 2 of ranks 1, 2, called by form(), train.py:40, while"
        " rank 1 (pid 101) waits in new_group 1 of ranks 1, 2, called by form(), train.py:40"
    )
    assert "another order" in explanation.cause
    explanation = explain_hang([waiting, forming[0]])
    assert "rank 1 (pid 101) waits in new_group 1 of ranks 1, 2" in explanation.sentence
    assert "different branches" in explanation.cause


def test_a_script_s_backward_counts_as_waiting_where_others_are_elsewhere() -> None:
    backward = Frame("_engine_run_backward", "/x/site-packages/torch/autograd/graph.py", 979)
    waiting = RankStatus(0, 100, threads=[[backward, user_frame("train", 30)]])
    explanation = explain_hang(
        [waiting, RankStatus(1, 101, threads=[[user_frame("validate", 88)]])]
    )
    assert explanation.rank == 1
    assert explanation.sentence.endswith(
        "validate(), train.py:88; the others wait in backward, called by train(), train.py:30"
    )
    assert "all ranks wait in backward" in explain_hang([waiting, waiting]).sentence


def test_ranks_that_are_busy_in_different_places_are_all_named() -> None:
    ranks = [
        RankStatus(n, 100 + n, progress=make_progress(5), threads=[[user_frame("loss", n)]])
        for n in range(2)
    ]
    explanation = explain_hang(ranks)
    assert (
        explanation.sentence
        == "no rank waits for another: rank 0 is in loss(), train.py:0; rank 1 is in loss(), "
        "train.py:1"
    )


IN_A_SCRIPT = {
    "alone": r"rank 0 .* was aborted in all_reduce, called by log_loss\(\), "
    r"hangs_script.py:\d+, while rank 1 .*"
    r" was in backward, called by main\(\), .*Usual cause: ranks that take different branches",
    "shapes": r"rank \d .* was aborted in all_reduce, called by hang\(\), "
    r"hangs_script.py:\d+, where rank \d .*"
    r" was too. Usual cause: tensors of different shapes",
    "data": r"rank 1 .*: it is waiting for its data loader, whose worker .* is in __getitem__\(\)"
    r"(.|\n)*worker \d+: idle, waits for the next index",
    "lock": r"rank 1 .*: it is in deadlock\(\), hangs_script.py:\d+ `lock.acquire\(\)`; the "
    r"others wait",
    "sleep": r"rank 1 .*: it is in validate\(\), hangs_script.py:\d+ .*; the others wait in "
    r"backward",
    # where, py-spy alone can tell
    "stop": r"rank 1 .* is stopped \(SIGSTOP\).*; the others wait for it",
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "alone")) for kind in IN_A_SCRIPT],
)
def test_a_script_that_knows_nothing_of_us_is_explained_too(kind: str, tmp_path: Path) -> None:
    """Two of them gloo ends by itself, with an abort that names no line."""
    script = JOBS / "hangs_script.py"
    env = {"HANG": f"{kind} 3"}
    exchange = "gloo" if kind in ("alone", "shapes") else "memory"
    with started(
        *("run", "--nproc", 2, "--explain-after", 4, "--exchange", exchange, script),
        cwd=tmp_path,
        env=env,
    ) as running:
        wait_until(
            lambda: re.search(IN_A_SCRIPT[kind], running.err.read_text()), running.err.read_text
        )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_that_hangs_is_ended_where_that_was_asked_for(tmp_path: Path) -> None:
    flags = "run", "--nproc", 2, "--end-after", 8, JOBS / "hangs_script.py"
    done = run(*flags, cwd=tmp_path, env={"HANG": "sleep 3"})
    assert done.returncode == 1
    assert (
        len(
            re.findall(
                r"nothing has moved for \d+ s: rank 1 .*: it is in validate\(\)", done.stderr
            )
        )
        == 1
    )
    assert re.search(r"^stepladder: rank 1 .*: it is in validate\(\)", done.stderr, re.MULTILINE), (
        done.stderr
    )
    assert re.search(
        r"^stepladder: ended after [89] s without progress \(--end-after 8\)$",
        done.stderr,
        re.MULTILINE,
    ), done.stderr
    reason = "--end-after 8 with --explain-after 9: nothing would be explained"
    refused(
        run(*flags[:3], "--explain-after", 9, *flags[3:], cwd=tmp_path), reason, "--explain-after 4"
    )


def test_an_aborted_rank_is_compared_with_the_one_that_lost_it() -> None:
    crashed = RankStatus(
        0, 100, ProcessState.ABORTED, threads=[[INSIDE, user_frame("log_loss", 30)]]
    )
    survivor = RankStatus(1, 101, ProcessState.ENDED, threads=[[INSIDE, user_frame("train", 64)]])
    explanation = explain_hang([crashed, survivor])
    assert explanation.rank == 0
    assert explanation.sentence == (
        "rank 0 (pid 100) was aborted in all_reduce, called by log_loss(), train.py:30, while "
        "rank 1 (pid 101) was"
        " in all_reduce, called by train(), train.py:64"
    )
    assert "ranks that take different branches" in explanation.cause
    alone = explain_hang([crashed, RankStatus(1, 101, ProcessState.ENDED)])
    assert "ranks that take different branches" in alone.cause and "different shapes" in alone.cause


def test_a_rank_that_was_aborted_elsewhere_is_named() -> None:
    crashed = RankStatus(
        1,
        101,
        ProcessState.ABORTED,
        make_progress(811, phase=COMPUTING),
        threads=[[user_frame("loss", 30)]],
    )
    explanation = explain_hang(
        [RankStatus(0, 100, ProcessState.ENDED, make_progress(812, 812)), crashed]
    )
    assert (
        explanation.rank == 1
        and "a crash" not in explanation.sentence
        and "an abort in compiled code" in explanation.cause
    )
    assert not explanation.is_abort


def test_all_in_one_collective_points_to_the_other_nodes_or_the_network() -> None:
    ranks = [RankStatus(n, 100 + n, progress=make_progress(812, 812)) for n in range(2)]
    explanation = explain_hang(ranks, has_all_ranks=False)
    assert explanation.rank is None
    assert (
        explanation.sentence
        == "all ranks of this node wait in all_reduce 812 of step 40 (finish(), sync.py:120)"
    )
    assert "another node" in explanation.cause
    assert "doctor --comm" in explain_hang(ranks).cause


def test_a_rank_that_the_others_have_only_passed_is_not_blamed() -> None:
    """A broadcast's root is done before the others; they all wait, and nobody is missing."""
    ranks = [
        RankStatus(0, 100, progress=make_progress(812, 812)),
        RankStatus(1, 101, progress=make_progress(811, 811)),
    ]
    assert explain_hang(ranks).rank is None


@pytest.mark.parametrize(
    ("phase", "stack", "cause"),
    [
        (READING, [user_frame("read", 5)], "a data loader that does not deliver"),
        (
            COMPUTING,
            [Frame("acquire", "/usr/lib/python3.11/threading.py", 300), user_frame("f", 5)],
            "a deadlock",
        ),
        (
            COMPUTING,
            [
                Frame("wait", "/usr/lib/python3.11/threading.py", 320),
                Frame("get", "/usr/lib/python3.11/queue.py", 171),
                user_frame("f", 5),
            ],
            "a queue that nobody fills",
        ),
        (
            COMPUTING,
            [
                Frame("wait", "/usr/lib/python3.11/threading.py", 320),
                Frame("put", "/usr/lib/python3.11/queue.py", 140),
                user_frame("f", 5),
            ],
            "a full queue that nobody empties",
        ),
        (COMPUTING, [INSIDE, user_frame("f", 5)], "a collective that only some ranks call"),
        (STARTING, [user_frame("build", 5)], "a download"),
    ],
)
def test_the_cause_follows_from_where_the_rank_is(
    phase: int, stack: list[Frame], cause: str
) -> None:
    late = RankStatus(1, 101, progress=RankProgress(phase=phase), threads=[stack])
    assert cause in explain_hang([RankStatus(0, 100, progress=make_progress(1, 1)), late]).cause


def test_a_stopped_rank_says_how_to_go_on() -> None:
    late = RankStatus(1, 101, ProcessState.STOPPED, make_progress(811))
    explanation = explain_hang([RankStatus(0, 100, progress=make_progress(812, 812)), late])
    assert explanation.sentence == (
        "rank 1 (pid 101) is stopped (SIGSTOP) in step 40, after all_reduce 811 (finish(), "
        "sync.py:120);"
        " the others wait for it"
    )
    assert "kill -CONT 101" in explanation.cause


def test_calls_inside_of_a_collective_are_one_line_below_the_users_own() -> None:
    package = Path(stepladder.__file__).parent
    exchange = Path(stepladder_exchange.__file__).parent
    stack = [
        Frame("wait_while_equal", f"{exchange}/futex.py", 45),
        Frame("wait", f"{exchange}/wait.py", 171),
        Frame("barrier", "/usr/lib/site-packages/torch/distributed/distributed_c10d.py", 5349),
        Frame("train", "/home/ada/train.py", 7),
        Frame("run_here", f"{package}/launcher/absent.py", 163),
    ]
    assert format_rank(RankStatus(1, 12, threads=[stack])) == [
        "  [rank 1] pid 12",
        "    barrier(), distributed_c10d.py:5349",
        "    train(), train.py:7",
        "    run_here(), absent.py:163",
        "    2 calls of Stepladder, down to wait_while_equal(), futex.py:45",
    ]
    own = [stack[0], stack[1], stack[-1]]
    assert len(format_rank(RankStatus(1, 12, threads=[own]))) == 4, "nothing of the user's"
