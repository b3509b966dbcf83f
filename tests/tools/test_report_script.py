"""A script's run under `run --run-dir`: its page and view say what its ranks did, restarts
included.
"""

from __future__ import annotations

import fcntl
import json
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from browsers import check_readable, needs_browser
from processes import JOBS, refused, run, started, wait_until
from stepladder.rank.progress import STEP_KEYS
from stepladder.tools.probe.step_clock import StepClock
from stepladder.tools.report.launches import LAUNCHES_FILE, STEPS_FOLDER, read_launches
from stepladder.tools.report.live import describe_script
from stepladder.tools.report.script_record import read_script_run
from stepladder.tools.report.step_recorder import StepRecorder

SLOW = JOBS / "slow_rank.py"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes: one was killed, and both were restarted and finished."""
    folder = tmp_path_factory.mktemp("seen")
    flags = "--nproc", 2, "--max-restarts", 1, "--run-dir", "its"
    done = run("run", *flags, SLOW, "killed", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "its"


@pytest.mark.slow
@pytest.mark.ranks
def test_the_record_is_that_of_the_ranks(run_dir: Path) -> None:
    record = read_script_run(run_dir)
    assert record.state == "finished"
    assert [start.world_size for start in record.starts] == [2, 2]
    assert 1 <= record.starts[0].steps <= 20 and record.starts[1].steps == 40
    counted, compute = (
        record.times.get_cells([0, 1])[..., [0, 1 + STEP_KEYS.index("compute")]].sum(1).T
    )
    # The time of a start's first step is not recorded.
    max_steps = record.starts[0].steps + record.starts[1].steps - 2
    # The killed start counts up to the step that both ranks have reached.
    assert counted[0] == counted[1] and 39 <= counted[0] <= max_steps
    assert record.times.last_steps[-1] == record.steps
    # The time in the queue for a core counts for both ranks.
    assert compute[1] > 39 * 0.06 and compute[1] > compute[0]
    assert [rank for rank, _ in record.times.find_stragglers()] == [1]
    logs = {path.name for path in (run_dir / "log").iterdir()}
    assert logs == {f"attempt-{attempt}.rank-{rank}.log" for attempt in (0, 1) for rank in (0, 1)}


@pytest.mark.ranks
def test_the_page_says_what_happened(run_dir: Path, tmp_path: Path) -> None:
    done = run("report", run_dir, "-o", tmp_path / "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    for expected in (
        "slow_rank.py in ",
        "finished: ",
        "2 starts on 2 processes",
        "rank 1 takes ",
        "--run-dir its",
    ):
        assert expected in text
    assert not re.search(r"<script|https?://|@import|url\(", text) and "nan" not in text
    HTMLParser().feed(text)
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)  # well formed


@pytest.mark.slow
@pytest.mark.ranks
@needs_browser
def test_its_page_is_readable_in_a_browser(run_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("report", run_dir, "-o", page, cwd=tmp_path).returncode == 0
    check_readable(page, tmp_path)


@pytest.mark.ranks
def test_one_look_says_where_it_is(run_dir: Path, tmp_path: Path) -> None:
    for flags in ((), ("--once",)):
        shown = run("watch", run_dir, *flags, cwd=tmp_path).stdout.splitlines()
        assert re.fullmatch(
            r"slow_rank\.py: \d+ optimizer steps, finished, 2 processes, 2 starts", shown[0]
        )
        assert "steps per second" in shown[1] and shown[2].startswith("rank 1 takes ")


@pytest.mark.ranks
def test_a_run_is_running_until_its_launcher_has_gone(tmp_path: Path) -> None:
    script = JOBS / "script.py"
    with started("run", "--run-dir", "its", script, "hold", "held", cwd=tmp_path) as launcher:
        wait_until((tmp_path / "held.0").exists)
        assert describe_script(read_script_run(tmp_path / "its"))[0].startswith(
            "script.py: 0 optimizer steps, running"
        )
        launcher.record_family()
        launcher.process.kill()
        wait_until(lambda: read_script_run(tmp_path / "its").state != "running")
    assert (
        read_script_run(tmp_path / "its").state
        == "not running: its launcher ended without a record"
    )
    assert run("report", "its", cwd=tmp_path).returncode == 0
    assert "No step of a torch optimizer was made." in (tmp_path / "report.html").read_text()
    again = run("run", "--run-dir", "its", script, "exit", 0, 3, cwd=tmp_path)
    assert again.returncode == 1
    assert "its has earlier launches: this one is added to them" in again.stderr
    record = read_script_run(tmp_path / "its")
    assert (record.state, len(record.launches)) == ("ended with exit code 1", 2)


def test_a_place_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "job").mkdir()
    (tmp_path / "job/config.json").write_text("{}")
    arguments = JOBS / "script.py", "about"
    refused(
        run("run", "--run-dir", "file/its", *arguments, cwd=tmp_path),
        "run directory file/its cannot be written",
    )
    refused(
        run("run", "--run-dir", "job", *arguments, cwd=tmp_path), "is the run directory of a job"
    )


@pytest.mark.parametrize("launches", ["", "{}\n", "word\n", '{"launch": "a", "code": 0}\n'])
def test_a_damaged_record_is_one_line(launches: str, tmp_path: Path) -> None:
    (tmp_path / LAUNCHES_FILE).write_text(launches)
    refused(run("report", tmp_path, cwd=tmp_path), f"{tmp_path} is damaged")


# -- what ranks leave ------------------------------------------------------------------------------


def head(start: str, size: int, time: float) -> dict[str, object]:
    return {
        "start": start,
        "world_size": size,
        "time": time,
        "host": "a",
        "gpu": False,
        "torch": "2",
    }


def step(last_step: int, steps: int, time: float, compute: float) -> dict[str, object]:
    return {
        "step": last_step,
        "steps": steps,
        "time": time,
        "data": 0.0,
        "compute": compute,
        "wait": 0.0,
        "optimizer": 0.0,
    }


def write_rank_file(run_dir: Path, rank: int, *lines: dict[str, object], torn: str = "") -> None:
    launch = {
        "launch": "a",
        "script": "x.py",
        "command": "c",
        "host": "a",
        "python": "3",
        "begun": 1.0,
    }
    (run_dir / LAUNCHES_FILE).write_text(f"{json.dumps(launch)}\n")
    (run_dir / STEPS_FOLDER).mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(line)}\n" for line in lines) + torn
    (run_dir / STEPS_FOLDER / f"rank-{rank}.jsonl").write_text(text)


def test_ranks_that_wrote_at_other_steps_are_compared_over_the_same(tmp_path: Path) -> None:
    write_rank_file(tmp_path, 0, head("x", 2, 1.0), step(11, 10, 2.0, 1.0), step(21, 10, 3.0, 1.0))
    write_rank_file(
        tmp_path,
        1,
        head("x", 2, 1.1),
        step(6, 5, 2.0, 1.0),
        step(16, 10, 3.0, 2.0),
        torn='{"step": 3',
    )
    times = read_script_run(tmp_path).times
    assert times.last_steps == [11]  # rank 1 has not come to step 21
    cells = times.get_cells([0, 1])
    assert cells[:, 0, 0].tolist() == [10, 10]
    assert cells[:, 0, 1 + STEP_KEYS.index("compute")].tolist() == [1.0, 2.0]


def test_a_rank_that_left_nothing_here_is_named(tmp_path: Path) -> None:
    write_rank_file(
        tmp_path,
        0,
        head("x", 3, 1.0),
        step(11, 10, 2.0, 1.0),
        head("x", 2, 50.0),
        step(6, 5, 51.0, 1.0),
    )
    write_rank_file(
        tmp_path, 1, head("x", 3, 1.0), head("x", 2, 50.2), step(6, 5, 51.0, 3.0)
    )  # killed in its first step
    record = read_script_run(tmp_path)
    first, second = record.starts
    assert (first.missing, second.missing) == ([2], [])
    assert record.times.last_steps == [11 + 6] and record.times.get_cells([1])[..., 1:].sum() == 3.0


def test_a_full_disk_ends_the_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The real method would change this process for all later tests.
    monkeypatch.setattr(StepClock, "watch_data_loader", lambda _: None)
    recorder = StepRecorder(str(tmp_path))
    with Path("/dev/full").open("w") as full:
        recorder.descriptor = full.fileno()
        recorder.write({"step": 1})
    assert recorder.descriptor == -1
    recorder.write({"step": 2})


def test_a_script_that_makes_no_steps_is_said_since_when(tmp_path: Path) -> None:
    write_rank_file(tmp_path, 0, head("x", 1, 1e9), step(11, 10, 1e9 + 9, 1.0))
    with (tmp_path / LAUNCHES_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as its launcher does
        since = datetime.fromtimestamp(1e9 + 9).strftime("%H:%M:%S")
        assert describe_script(read_script_run(tmp_path))[0] == (
            f"x.py: 11 optimizer steps, running, no step since {since}, 1 process, 1 start"
        )


def test_two_nodes_are_one_launch_s_end(tmp_path: Path) -> None:
    begins = [
        {
            "launch": key,
            "script": "x.py",
            "command": "c",
            "host": key,
            "python": "3",
            "begun": begun,
        }
        for key, begun in (("a", 1.0), ("b", 2.0), ("c", 8.0))
    ]
    ends = [
        {"launch": key, "ended": ended, "code": code}
        for key, ended, code in (("a", 5.0, 1), ("b", 4.0, 0))
    ]
    (tmp_path / STEPS_FOLDER).mkdir()
    for written, state in (
        (begins[:2] + ends, "ended with exit code 1"),
        (begins + ends, "not running: its launcher ended without a record"),
        ([*begins, *ends, {"launch": "c", "ended": 9.0, "code": 0}], "finished"),
    ):
        (tmp_path / LAUNCHES_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in written))
        assert read_script_run(tmp_path).state == state
    assert [launch.code for launch in read_launches(tmp_path)[0]] == [1, 0, 0]
