"""`stepladder profile` on real ranks: of a job, of an unmodified script, and where it cannot be."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from processes import JOBS, run
from profiles import SLEEP, STEPS, train_under_the_profiler
from ranks import run_ranks
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.recipes import mlp
from stepladder.tools.probe.attach import temporary_environment
from stepladder.tools.profiler.breakdown import (
    PARTS,
    align_clocks,
    make_rank_profiles,
    match_collectives,
)
from stepladder.tools.profiler.capture import MARK_PREFIX, Capture
from stepladder.tools.profiler.merged_trace import write_merged_trace
from stepladder.tools.profiler.profile import MERGED, RESULT, TENSORBOARD, record_profile
from stepladder.tools.profiler.trace import Trace
from stepladder.tools.profiler.workloads import QUIET_KINETO
from stepladder.train.comm import Comm
from stepladder.train.phases import WAITING_FOR_RANKS
from stepladder.train.trainer import Trainer

JSON = Path(__file__).parent.parent.parent / "docs" / "json.md"
WINDOW = ("--warmup", 2, "--steps", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two ranks, of which the second reads slowly."""
    found = tmp_path_factory.mktemp("traces")
    with temporary_environment(**QUIET_KINETO):
        run_ranks(train_under_the_profiler, 2, found)
    return found


@pytest.fixture
def traces(folder: Path) -> list[Trace]:
    return sorted(map(Trace, folder.glob("*.pt.trace.json")), key=lambda trace: trace.rank)


def complete(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


@pytest.mark.ranks
def test_a_real_trace_says_where_the_time_went(traces: list[Trace]) -> None:
    assert align_clocks(traces) == "one machine, one clock"
    quick, slow = make_rank_profiles(traces)
    for trace in traces:
        assert len(trace.queued_us) == STEPS and (trace.queued_us >= 0).all()
    for one in (quick, slow):
        assert one.steps == STEPS and one.peak_bytes > 50e6
        assert one.seconds == pytest.approx(sum(s or 0.0 for s in one.parts.values()))
        assert all(
            one.parts[name]
            for name in ("data", "forward", "backward", "communication", "optimizer")
        )
        assert one.early, "DDP begins before backward ends"
    assert (slow.parts["data"] or 0) >= 2 * SLEEP, "two samples, each slept for"
    assert (quick.parts["waiting"] or 0) > (slow.parts["waiting"] or 0)


@pytest.mark.ranks
def test_the_merged_trace_has_one_clock_and_no_names_twice(
    traces: list[Trace], tmp_path: Path
) -> None:
    write_merged_trace(traces, align_clocks(traces), tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {pid: name.split(" (")[0] for pid, name in names.items()} == {0: "rank 0", 1: "rank 1"}
    assert {e["pid"] for e in events} == names.keys()
    assert min(e["ts"] for e in events if e["name"].startswith("ProfilerStep")) == 0
    starts = [e["id"] for e in events if e.get("cat") == "fwdbwd" and e["ph"] == "s"]
    assert len(starts) == len(set(starts)) > 0
    pairs = [pair for pair in match_collectives(traces) if pair[0].name == "gloo:all_reduce"]
    assert len(pairs) == STEPS and all(
        max(c.begin for c in pair) < min(c.end for c in pair) for pair in pairs
    )


@pytest.mark.ranks
def test_a_profile_is_replaced_and_a_failure_leaves_it(folder: Path, tmp_path: Path) -> None:
    def leave_traces(scratch: Path) -> int:
        for file in folder.glob("*.pt.trace.json"):
            shutil.copy(file, scratch / file.name.replace("rank", f"rank{time.monotonic_ns()}"))
        return 0

    out = tmp_path / "p"
    for _ in range(2):
        assert not isinstance(record_profile("job", leave_traces, out, World()), int)
        assert len(list((out / TENSORBOARD).iterdir())) == 2
    before = (out / RESULT).read_text()
    assert record_profile("job", lambda _: 3, out, World()) == 3
    assert (out / RESULT).read_text() == before


@pytest.mark.parametrize("is_there", [False, True])
def test_ranks_that_cannot_meet_leave_no_folder(is_there: bool, tmp_path: Path) -> None:
    """Of another launcher: then their traces lie beside the profile."""

    def fail_to_connect(shared: Path) -> int:
        assert shared.is_dir()
        raise InputError("MASTER_PORT 29500 is taken", "MASTER_PORT=0")

    mine = tmp_path / "mine"
    if is_there:
        mine.mkdir()
    with pytest.raises(InputError):
        record_profile("job", fail_to_connect, mine / "profiles" / "p", World(rank=0, world_size=2))
    assert list(tmp_path.rglob("*")) == [mine] * is_there


@pytest.mark.slow
@pytest.mark.ranks
def test_tensorboard_s_plug_in_reads_the_traces(folder: Path, tmp_path: Path) -> None:
    code = """
import sys
from torch_tb_profiler.io.cache import Cache
from torch_tb_profiler.profiler.loader import RunLoader
if __name__ == "__main__":
    with Cache() as cache:
        run = RunLoader("run", sys.argv[1], cache).load()
    found = [(w, len(p.overview["steps"]["rows"])) for (w, _), p in run.profiles.items() if w != "All"]
    print(sorted(found))
"""
    (tmp_path / "load.py").write_text(code)
    done = run(folder, cwd=tmp_path, command=(sys.executable, "load.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[('rank-0', {STEPS}), ('rank-1', {STEPS})]\n"


@pytest.mark.ranks
@pytest.mark.parametrize("shard", ["none", "optimizer", "full"])
def test_a_job(tmp_path: Path, shard: str) -> None:
    flags = *WINDOW, "--samples", 512, "--shard", shard, "--out", "p", "--json"
    done = run("profile", "mlp", "--nproc", 2, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert lines_without_warnings(done.stderr) == [], "nothing of the profiler's own"
    found = json.loads(done.stdout.splitlines()[-1])
    page = JSON.read_text().split("\n## profile\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", page, re.MULTILINE) == list(found)
    assert found["steps"] == 2 and [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert sum(rank[part] for part in PARTS) == pytest.approx(rank["seconds_per_step"])
        assert rank["data"] > 0 < rank["optimizer"] and rank["communication"] > 0
    assert json.loads((tmp_path / "p" / RESULT).read_text()) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"], "nothing of the run is left"
    assert len(list((tmp_path / "p" / TENSORBOARD).glob("rank-?.*.pt.trace.json"))) == 2
    assert {e["pid"] for e in complete(tmp_path / "p" / MERGED) if e["cat"] == "cpu_op"} == {0, 1}


@pytest.mark.ranks
@pytest.mark.parametrize("by_gloo", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("shard", "expected"),
    [("none", (False, False)), ("optimizer", (False, True)), ("full", (True, False))],
)
def test_where_weights_are_gathered_is_communication(
    shard: str, expected: tuple[bool, bool], by_gloo: bool, tmp_path: Path
) -> None:
    """Before a block's forward pass, or after the optimizer's step; whatever moves the data."""
    run_ranks(capture_a_job, 2, tmp_path, shard, by_gloo=by_gloo)
    traces = sorted(map(Trace, tmp_path.glob("*.pt.trace.json")), key=lambda trace: trace.rank)
    align_clocks(traces)
    for trace, found in zip(traces, make_rank_profiles(traces), strict=True):
        last = trace.spans(
            e for e in trace.annotations if e["name"] == MARK_PREFIX + WAITING_FOR_RANKS.mark
        )[-1]
        parts = {
            name: spans if spans is not None else trace.steps[:0]
            for name, spans in trace.find_parts().items()
        }
        updated = last[0] > parts["optimizer"][-1, 1]
        begun = np.array([one.begin for one in trace.collectives])
        before = ((parts["forward"][:, :1] < begun) & (begun < parts["forward"][:, 1:])).any()
        after = updated and ((last[0] < begun) & (begun < last[1])).any()
        assert (before, after) == expected
        assert (found.parts["communication"] or 0) > 0


def capture_a_job(comm: Comm, folder: Path, shard: str) -> None:
    job = mlp.build(mlp.Config(samples=256))
    comm.phases.observer = Capture(folder, comm.world.rank, 2, 2)
    own = Settings(
        folder / "r",
        global_batch=32,
        microbatch=8,
        steps=4,
        shard=shard,
        sync="exact",
        progress=False,
    )
    Trainer(job, own, comm=comm).fit()


@pytest.mark.slow
@pytest.mark.ranks
def test_an_unmodified_script(tmp_path: Path) -> None:
    done = run(
        "profile",
        "--nproc",
        2,
        *WINDOW,
        JOBS / "tutorial.py",
        2,
        1,
        "--batch-size",
        128,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    title = "tutorial: ms per step, of the typical among 2 steps"
    assert title in " ".join(done.stdout.split())
    assert "unknown" not in done.stdout
    assert "Epoch 1" not in done.stdout, "it was ended after its fourth step of sixteen"
    assert len(list((tmp_path / "profiles" / "tutorial" / TENSORBOARD).iterdir())) == 2


SCRIPT = """
import sys, torch
p = torch.nn.Parameter(torch.zeros(2)); optimizer = torch.optim.SGD([p], lr=0.1)
for step in range(int(sys.argv[1])):
    p.sum().backward(); optimizer.step()
    if len(sys.argv) > 2 and step == 1: raise ValueError("trouble in step 2")
"""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "args, found",
    [
        ((0,), "script.py made no optimizer step"),
        (
            (5, "--nproc", 2),
            "made 5 optimizer steps, but --warmup 5 and --steps 30 need 35. HINT: --warmup 1 --steps 4",
        ),
    ],
)
def test_a_script_that_ends_too_early(args: tuple[object, ...], found: str, tmp_path: Path) -> None:
    refused_for("script.py", *args, found=found, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_that_raises_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("profile", "script.py", 9, "raise", cwd=tmp_path)
    assert done.returncode == 1 and "ValueError: trouble in step 2" in done.stderr, done.stderr
    assert 'script.py", line 6' in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


@pytest.mark.parametrize(
    "args, found",
    [
        (("nothing",), "recipe 'nothing' is unknown"),
        (("nothing.py",), "job file nothing.py does not exist"),
        (("mlp", "--steps", 0), "0 is not in the range"),
        (("mlp", "--nproc", 10**6), "--nproc 1000000 on a machine"),
        (("mlp", "--nproc", 0), "0 is not in the range"),
        (("mlp", "--warmup", 0), "0 is not in the range"),
        (("mlp", "again"), "unexpected argument 'again'"),
        (("mlp", "--out", "full"), "--out full is there already, and no profile"),
        (("mlp", "--out", "loop"), "--out loop: Too many levels of symbolic links"),
        (("mlp", "--out", "script.py/p"), "script.py is not a folder"),
        (("mlp", "--out", "/proc/p"), "--out /proc/p cannot be written"),
    ],
)
def test_bad_input_is_one_line(args: tuple[object, ...], found: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    refused_for(*args, found=found, cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "loop", "script.py"]


@pytest.mark.ranks
def test_more_processes_than_microbatches(tmp_path: Path) -> None:
    refused_for(
        "mlp",
        "--nproc",
        3,
        "--global-batch",
        2,
        found="3 processes for 2 microbatches",
        cwd=tmp_path,
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_job_whose_ranks_another_launcher_has_started(tmp_path: Path) -> None:
    """As on several machines, which then see one folder."""
    profile = "-m", "stepladder", "profile", "mlp", *WINDOW, "--out", "p", "--json"
    done = run("run", "--nproc", 2, *profile, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "p" / RESULT).read_text())
    assert done.stdout == f"[rank 0] {json.dumps(found)}\n"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def lines_without_warnings(text: str) -> list[str]:
    """But for torch's, such as of a name server that does not answer."""
    return [line for line in text.splitlines() if not line.startswith("[W")]


def refused_for(
    *args: object, found: str, cwd: Path, **more: Any
) -> subprocess.CompletedProcess[str]:
    """One line on stderr, after what a script printed; exit code 2."""
    (cwd / "script.py").write_text(SCRIPT)
    done = run("profile", *args, cwd=cwd, **more)
    lines = lines_without_warnings(done.stderr)
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ") and found in lines[0] and ". HINT: " in lines[0]
    return done
