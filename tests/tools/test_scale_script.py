"""`scale` times unmodified scripts, names the losses that tests plant, and ends scripts early."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from processes import JOBS, refused, run, started, wait_until
from stepladder.core.errors import InputError
from stepladder.launcher.script import Script
from stepladder.tools.probe.ranks import step_count_path
from stepladder.tools.probe.step_clock import COLUMNS
from stepladder.tools.scaling.efficiency import STEP_PARTS, SizeResult
from stepladder.tools.scaling.measure import TimedScript
from stepladder.tools.scaling.scaling_report import (
    SCRIPT_PARTS,
    Scaling,
    make_tables,
    render_scaling_page,
)
from stepladder.tools.scaling.script_timer import times_path

pytestmark = pytest.mark.ranks

SHORT = ("--nproc", "1,2", "--rounds", 1, "--steps", 8, "--warmup", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        "data",
        *(
            pytest.param(p, marks=pytest.mark.slow)
            for p in ("compute", "communication", "replicated")
        ),
    ],
)
def test_what_was_planted_is_named(part: str, tmp_path: Path) -> None:
    """On two processes, by a script whose flag --count is not one of scale's. A busy machine adds
    what it likes to the parts where ranks wait, for a core or for each other."""
    args = JOBS / "planted.py", part, "--count", 10**6, *SHORT, "--html", "page.html"
    done = run("scale", *args, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()  # the script's own output is not shown
    result = json.loads(line)
    lost = result["sizes"][1]["lost"]
    assert set(lost) == set(STEP_PARTS)
    assert lost[part] > 0.04, lost
    assert all(lost[name] < 0.04 for name in ("data", "compute", "replicated") if name != part), (
        lost
    )
    assert result["outside"] and result["weak"] and result["sizes"][0]["samples_per_second"] is None
    page = (tmp_path / "page.html").read_text()
    assert SCRIPT_PARTS[part][0] in page and "samples per s" not in page and "nan" not in page
    assert {path.name for path in tmp_path.iterdir()} == {"page.html"}


def times_of(folder: Path, ranks: int, together: bool = True) -> None:
    """As ranks leave them."""
    for rank in range(ranks):
        with times_path(folder, rank).open("wb") as opened:
            np.savez(
                opened,
                times=np.full((8, len(COLUMNS)), 0.5),
                first_at=5.0,
                optimizers=1,
                together=together,
            )


def test_a_script_s_batch_stays_per_process_or_in_all(tmp_path: Path) -> None:
    times_of(tmp_path, 2)
    script = Script("train.py")
    weak, strong = (
        TimedScript(script, 8, 2, weak, 1).read(2, tmp_path, 1.0) for weak in (True, False)
    )
    assert (weak.times.shape, weak.seconds, weak.launch) == ((2, 8, 6), 0.5, 4.0)
    assert (weak.batch, strong.batch) == (2, 1)


def test_a_rank_that_was_not_measured_is_no_result(tmp_path: Path) -> None:
    times_of(tmp_path, 2)
    step_count_path(tmp_path, 2).write_text("7")
    with pytest.raises(
        InputError, match=r"train.py made 7 optimizer steps on 3 processes, of 10 needed"
    ):
        TimedScript(Script("train.py"), 8, 2, True, 1).read(3, tmp_path, 1.0)


def test_processes_that_never_meet_are_no_speed_up(tmp_path: Path) -> None:
    times_of(tmp_path, 2, together=False)
    with pytest.raises(
        InputError, match=r"train.py opened no process group: each of its 2 processes trained alone"
    ):
        TimedScript(Script("train.py"), 8, 2, True, 1).read(2, tmp_path, 1.0)


def test_what_a_gpu_hides_is_null_a_dash_and_one_colour(tmp_path: Path) -> None:
    hidden = dict.fromkeys(STEP_PARTS, math.nan) | {"data": 0.01}
    sizes = [
        SizeResult(1, 1, [0.10], hidden, 1.0),
        SizeResult(2, 2, [0.16], hidden | {"data": 0.03}, 1.0),
    ]
    scaling = Scaling("train", True, sizes, is_script=True)
    assert scaling.as_json()["sizes"][1]["lost"] == dict.fromkeys(STEP_PARTS) | {
        "data": pytest.approx(0.02)
    }
    assert "Of each step's time, lost to: not told apart 25%, data 12%. " in scaling.verdicts()[0]
    page = render_scaling_page(scaling)
    assert "not told apart: 130 ms" in page and "nan" not in page
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(*make_tables(scaling, 80))
    cells = [line.split("│")[1:4] for line in console.export_text().splitlines() if "lost" in line]
    assert [cell[2].strip() for cell in cells] == ["12%", *"------"]


@pytest.mark.slow
def test_optimizers_that_step_in_turn_are_counted(tmp_path: Path) -> None:
    done = run("scale", JOBS / "planted.py", "two", "--count", 10**6, *SHORT, cwd=tmp_path)
    assert "2 optimizers step in turn: a step here is one of theirs." in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("args", [(JOBS / "tutorial.py", 10**6, 1), ("mlp", "--nproc", 2)])
def test_ctrl_c_ends_it_and_its_ranks(
    args: tuple[object, ...], tmp_path: Path, short_folder: Path
) -> None:
    """A script shows that it trains by its first checkpoint, a job by its run directory."""
    temporary = {"TMPDIR": str(short_folder)}
    with started("scale", *args, "--steps", 10**6, cwd=tmp_path, env=temporary) as scale:
        wait_until(lambda: has_begun(tmp_path) or has_begun(short_folder))
        scale.record_family()
        scale.signal_group(signal.SIGINT)
        assert scale.end() == 130
        assert scale.err.read_text().endswith("stopped\n")


def has_begun(folder: Path) -> bool:
    try:
        return any(folder.glob("snapshot.pt")) or any(folder.rglob("run/timing.jsonl"))
    except FileNotFoundError:  # a temporary folder went while it was looked through
        return False


@pytest.mark.slow
def test_a_script_that_makes_no_step_or_too_few(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('hello')")
    done = run("scale", "script.py", *SHORT, cwd=tmp_path)
    refused(done, "script.py made no step of a torch optimizer on 1 process")
    done = run("scale", JOBS / "tutorial.py", 1, 1, "--batch-size", 512, *SHORT, cwd=tmp_path)
    refused(
        done,
        "tutorial.py made 4 optimizer steps on 1 process, of 10 needed (--warmup 2, --steps 8)",
    )


def test_a_script_that_fails_shows_why(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; sys.exit('no data here')")
    done = run("scale", "script.py", *SHORT, cwd=tmp_path)
    assert done.returncode == 2
    assert "no data here" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "error: script failed on 1 process, see above. HINT: "
    )


@pytest.mark.parametrize(
    "args, problem",
    [
        (("script.py", "--nproc", "two"), "--nproc two is not a list of numbers of processes"),
        (("script.py", "--nproc", "1,2,1"), "--nproc 1,2,1 names 1 twice"),
        (("script.py", "--nodes", "1,0"), "--nodes 1,0 is not a list of numbers of nodes"),
        (
            ("script.py", "--nodes", "1,2", "--nproc", "1,2"),
            "--nproc 1,2 with --nodes: only one of them",
        ),
        (("script.py", "--time", "5"), "--time without --nodes"),
        (("script.py", "--html", "no/page.html"), "no/page.html cannot be written"),
        (("nowhere.py",), "nowhere.py does not exist"),
        (("mlp", "word"), "unexpected argument 'word'"),
        (
            ("mlp", "--nodes", "1,2"),
            "(sinfo is not found). HINT: go to a login node of the cluster, or practise",
        ),
    ],
)
def test_bad_input_is_one_line(args: tuple[object, ...], problem: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch")
    done = run("scale", *args, cwd=tmp_path, env={"PATH": str(Path(sys.executable).parent)})
    refused(done, problem)
    assert not list(tmp_path.glob(".scale-*"))


@pytest.mark.parametrize("counts", [(1, 2), (1, 2, 4, 8, 16, 32, 64)])
def test_the_table_is_whole_in_80_columns(counts: tuple[int, ...]) -> None:
    parts = dict.fromkeys(STEP_PARTS, 0.123456)
    sizes = [SizeResult(n, n, [1.23456, 1.5], parts, 100.0) for n in counts]
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(*make_tables(Scaling("train", True, sizes, is_script=True), 80))
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert text.count("1235 to 1500") == len(counts) and text.count("100.0") == len(counts)
    assert re.findall(r"[┃ ](\d+) (?=┃)", text) == [str(count) for count in counts]
