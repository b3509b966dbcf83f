"""torch's flight recorder: real recordings of two ranks, which gloo leaves too when it is asked."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from processes import JOBS, run, wait_until
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.flight_recorder import (
    DUMP_PREFIX_VARIABLE,
    find_dumps,
    infer_progress,
    make_dump_variable,
    read_dump,
)
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import RankStatus
from stepladder.launcher.local.observed_ranks import ObservedRanks
from stepladder.rank.progress import COLLECTIVE, NUM_SLOTS, PHASE, STARTING
from stepladder_exchange.flight_record import find_flight_record


def record(folder: Path) -> Path:
    """Two ranks' dumps beside the file that is returned."""
    file = folder / "progress"
    ranks = [
        subprocess.Popen([sys.executable, JOBS / "flight.py", str(rank), folder / "store", file])
        for rank in range(2)
    ]
    try:
        wait_until(
            lambda: all(file.with_name(f"{file.name}.flight-{rank}").exists() for rank in range(2))
        )
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return file


def explain_dumps(file: Path, form: str = "flight") -> Explanation:
    dumps = {rank: read_dump(file.with_name(f"{file.name}.{form}-{rank}")) for rank in range(2)}
    return explain_hang(
        [
            RankStatus(rank, 100 + rank, progress=progress)
            for rank, progress in infer_progress(dumps).items()
        ]
    )


COLLECTIVES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
for step in range(3):
    dist.all_reduce(x)
if dist.get_rank() == 0:
    dist.all_reduce(x)
dist.barrier()
"""


@pytest.mark.ranks
def test_a_group_of_ours_writes_a_dump_where_torch_s_variables_ask_for_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COLLECTIVES)
    asked = {"TORCH_FR_BUFFER_SIZE": "3", DUMP_PREFIX_VARIABLE: str(tmp_path / "dump")}
    assert run("run", "--nproc", 2, "train.py", cwd=tmp_path, env=asked).returncode == 1
    assert [len(read_dump(tmp_path / f"dump{rank}")["entries"]) for rank in range(2)] == [3, 3]
    explained = run("explain", "dump0", cwd=tmp_path).stdout
    assert "rank 1 calls barrier (<module>(), " in explained and "collective 4" in explained
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump0", "dump1", "train.py"]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_dump_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COLLECTIVES)
    asked = {"TORCH_FR_BUFFER_SIZE": "3", DUMP_PREFIX_VARIABLE: str(tmp_path / "none" / "dump")}
    done = run("run", "--nproc", 2, "train.py", cwd=tmp_path, env=asked)
    assert done.returncode == 1 and "none/dump0 cannot be written: No such file" in done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_a_real_recording_tells_who_is_missing(tmp_path: Path) -> None:
    file = record(tmp_path)
    expected = "rank 1 (pid 101) has not reached all_reduce 3"
    assert expected in explain_dumps(file).sentence
    assert expected in explain_dumps(file, "json").sentence
    ranks = ObservedRanks([0, 1], file)
    ranks.set_process(0, 100)
    ranks.set_process(1, 101)
    assert ranks.has_dumps
    assert expected in explain_hang(ranks.inspect([])).sentence


def entry(number: int, state: str, group: str = "0", **more: Any) -> dict[str, Any]:
    return {
        "frames": [{"name": "train", "filename": "/home/me/train.py", "line": 88}],
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[2, 5]],
        "output_sizes": [[2, 5]],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        **more,
    }


def test_the_group_that_hangs_is_the_one_that_counts() -> None:
    """As NCCL leaves it: one group is well, in the other rank 1 is one behind."""
    well = [entry(n, "completed", "1") for n in range(1, 9)]
    first = {"entries": [*well, entry(1, "completed"), entry(2, "started")]}
    second = {"entries": [*well, entry(1, "completed")]}
    explanation = explain_hang(
        [RankStatus(r, r, progress=p) for r, p in infer_progress({0: first, 1: second}).items()]
    )
    assert explanation.sentence.startswith("rank 1 (pid 1) has not reached all_reduce 2")
    assert infer_progress({0: {"entries": []}}) == {}


def test_collectives_that_do_not_fit_are_told_apart() -> None:
    def explain(**more: Any) -> str:
        dumps = {
            0: {"entries": [entry(1, "started")]},
            1: {"entries": [entry(1, "started", **more)]},
        }
        return explain_hang(
            [RankStatus(r, r, progress=p) for r, p in infer_progress(dumps).items()]
        ).sentence

    assert "rank 1 (pid 1) passes 6 numbers to all_reduce 1 (train(), train.py:88)" in explain(
        input_sizes=[[2, 3]]
    )
    assert "rank 1 (pid 1) calls broadcast (train(), train.py:88) where" in explain(
        profiling_name="nccl:broadcast"
    )
    assert "all ranks wait in all_reduce 1" in explain()


def test_all_to_all_and_messages_are_not_compared_by_size() -> None:
    uneven = [
        entry(1, "started", profiling_name="nccl:all_to_all", input_sizes=[[size]])
        for size in (3, 4)
    ]
    sent = entry(7, "started", is_p2p=True)
    dumps = {
        rank: {"entries": [collective, sent] if rank else [collective]}
        for rank, collective in enumerate(uneven)
    }
    assert [progress.num_collectives for progress in infer_progress(dumps).values()] == [1, 1]
    assert (
        explain_hang([RankStatus(r, r, progress=p) for r, p in infer_progress(dumps).items()]).rank
        is None
    )


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"no pickle", json.dumps([1]).encode(), pickle.dumps(Path("x"))]
)
def test_what_is_no_dump_is_refused_and_nothing_in_it_is_run(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "dump").write_bytes(data)
    with pytest.raises(ValueError, match="dump is not a dump of a flight recorder"):
        read_dump(tmp_path / "dump")


def test_a_damaged_dump_does_not_hide_what_else_is_known(tmp_path: Path) -> None:
    ranks = ObservedRanks([0, 1], tmp_path / "progress")
    (tmp_path / "progress.flight-1").write_bytes(b"half")
    assert ranks.has_dumps
    assert "all ranks" in explain_hang(ranks.inspect([])).sentence
    slots = bytearray(ranks.progress_file.read_bytes())
    memoryview(slots).cast("q")[PHASE] = STARTING
    memoryview(slots).cast("q")[NUM_SLOTS + COLLECTIVE] = 1
    ranks.progress_file.write_bytes(slots)
    assert explain_hang(ranks.inspect([])).rank == 0


def test_where_dumps_go_is_the_user_s_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_dump_variable(tmp_path / "progress") == {
        DUMP_PREFIX_VARIABLE: f"{tmp_path}/progress.flight-"
    }
    monkeypatch.setenv(DUMP_PREFIX_VARIABLE, str(tmp_path / "mine_"))
    assert make_dump_variable(tmp_path / "progress") == {}
    (tmp_path / "mine_1").touch()
    assert find_dumps(tmp_path / "progress", [0, 1]) == {1: tmp_path / "mine_1"}


@pytest.mark.parametrize("size", ["", "0", "-5", "many"])
def test_without_a_number_of_entries_nothing_is_recorded(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DUMP_PREFIX_VARIABLE, "dump")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", size)
    assert find_flight_record.__wrapped__() is None
