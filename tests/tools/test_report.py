"""The page and the view of a run: what they say is what the run's files say, and the page looks
after itself.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from processes import SECONDS, refused, run, train
from ranks import run_ranks
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.rank.progress import TIMING_KEYS
from stepladder.storage.run_dir import RunDir
from stepladder.tools.pages.figures import (
    Figure,
    choose_ticks,
    draw_heat_map,
    draw_lines,
    draw_spans,
    thin_points,
)
from stepladder.tools.pages.page import make_environment
from stepladder.tools.report.live import Follower, describe
from stepladder.tools.report.record import read_run
from stepladder.tools.report.series import RankTimes
from stepladder.train.comm import Comm
from stepladder.train.trainer import Trainer

CHROMIUM = shutil.which("chromium")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # a container's may be too small for it
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 2 processes that was stopped, resumed on 1, and has finished."""
    folder = tmp_path_factory.mktemp("seen")
    flags = "--samples", 256, "--global-batch", 32, "--epochs", 2
    train("mlp", *flags, "--nproc", 2, "--steps", 8, cwd=folder)
    train("mlp", *flags, cwd=folder)
    return folder / "runs/mlp"


@pytest.mark.ranks
def test_the_record_is_that_of_the_run(run_dir: Path) -> None:
    record = read_run(run_dir)
    assert [step for step, _ in record.metrics.losses.points] == list(range(1, 17))
    assert [
        (start.attempt, start.world_size, start.first, start.last) for start in record.starts
    ] == [
        (1, 2, 0, 8),
        (2, 1, 8, 16),
    ]
    assert [int(steps) for steps in record.times.get_cells([0, 1])[..., 0].sum(1)] == [16, 8]
    assert record.times.world_size == 1
    assert record.progress == "16 of 16 steps"


def train_where_rank_1_is_slow(comm: Comm, run_dir: Path, shard: str, sync: str) -> None:
    from stepladder.recipes import mlp

    job = mlp.build(mlp.Config(samples=256))

    def loss(model: Any, batch: Any) -> Any:
        end = time.thread_time() + 0.02 * comm.world.rank
        while time.thread_time() < end:
            pass
        return mlp.squared_error(model, batch)

    settings = Settings(
        run_dir, epochs=2, global_batch=32, microbatch=8, sync=sync, shard=shard, progress=False
    )
    Trainer(replace(job, loss=loss), settings, comm=comm).fit()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shard", "sync", "by_gloo"),
    [
        ("none", "exact", False),
        ("optimizer", "ddp", True),
        ("full", "exact", False),
        pytest.param("optimizer", "exact", False, marks=pytest.mark.slow),
        pytest.param("full", "ddp", False, marks=pytest.mark.slow),
        pytest.param("full", "exact", True, marks=pytest.mark.slow),
    ],
)
def test_a_rank_s_own_work_is_told_from_its_wait_for_others(
    shard: str, sync: str, by_gloo: bool, tmp_path: Path
) -> None:
    run_ranks(train_where_rank_1_is_slow, 2, tmp_path / "r", shard, sync, by_gloo=by_gloo)
    done = run("report", tmp_path / "r", "-o", tmp_path / "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    assert "finished: 16 of 16 steps, 1 start(s) on 2 process(es); samples lost 0" in text
    assert re.search(r"rank 1 takes \d+\.\d times as long as the others for its share", text), text
    drawn = re.findall(r"<svg[^>]*aria-label=\"([^\"]*)", text)
    assert drawn == [
        "training loss",
        "learning rate",
        "train_loss",
        "test_mse",
        "throughput",
        "time per step and rank",
        "starts",
    ]
    busy, waits = (
        read_run(tmp_path / "r").times.get_cells([0, 1]).sum(1)[:, 1:].reshape(2, -1)[:, [1, 2]].T
    )
    assert busy[1] > 2 * busy[0] and waits[0] > busy[0], (busy, waits)


@pytest.mark.ranks
def test_the_page_says_what_happened_and_needs_nothing_else(run_dir: Path, tmp_path: Path) -> None:
    done = run("report", run_dir, "-o", tmp_path / "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    for expected in (
        "finished: 16 of 16 steps, 2 start(s) on 2 &gt; 1 process(es); samples lost 0",
        "start 2",
    ):
        assert expected in text
    assert json.loads((run_dir / "result.json").read_text())["weights_sha256"] in text
    assert not re.search(r"<script|https?://|@import|url\(", text)
    HTMLParser().feed(text)
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)  # well formed


@pytest.mark.ranks
def test_one_look_says_where_the_run_is(run_dir: Path, tmp_path: Path) -> None:
    shown = run("watch", run_dir, "--once", cwd=tmp_path).stdout.splitlines()
    assert shown[0] == "mlp: 16 of 16 steps, finished, 1 process, 2 starts"
    assert shown[1].startswith("loss ")
    followed = run("watch", run_dir, cwd=tmp_path)  # no terminal: lines, and it ends with the run
    assert followed.returncode == 0 and followed.stdout.splitlines()[0] == shown[0]


@pytest.mark.ranks
def test_a_run_that_was_killed_is_said_not_to_run(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "result.json").unlink()
    assert describe(read_run(tmp_path))[0].startswith(
        "mlp: 16 of 16 steps, epoch 3 (not running), 1 process"
    )
    lock = RunDir(tmp_path, 0)
    assert "not running" not in describe(read_run(tmp_path))[0]
    lock.close()


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    for command in ("report", "watch"):
        refused(run(command, tmp_path, cwd=tmp_path), f"{tmp_path} is not a run directory")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", "", "config.json is damaged"),
        ("config.json", '{"definition": []}', "config.json is damaged"),
        ("result.json", '{"steps"', "result.json cannot be used: it is not JSON"),
    ],
)
def test_a_damaged_file_is_named(
    run_dir: Path, name: str, content: str, message: str, tmp_path: Path
) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_run(tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
@pytest.mark.parametrize(
    "text", ['{"step": 3, "st', "{}\n", '{"step": "x", "lr": [], "rank": {}}\n', "\0\n"]
)
def test_a_damaged_line_is_left_out_and_said(
    run_dir: Path, name: str, text: str, tmp_path: Path
) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    with (tmp_path / name).open("a") as file:
        file.write(text)
    for command in (
        ("report", tmp_path, "-o", tmp_path / "page.html"),
        ("watch", tmp_path, "--once"),
    ):
        done = run(*command, cwd=tmp_path)
        output = done.stdout + done.stderr
        assert (
            done.returncode == 0 and f"{tmp_path / name} is " in output and "left out" in output
        ), output


@pytest.mark.ranks
def test_a_run_that_goes_on_after_half_a_line_is_read_whole(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "result.json").unlink()
    for name in ("metrics.jsonl", "timing.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 99, "st')
    flags = "--samples", 256, "--global-batch", 32, "--epochs", 3
    train("mlp", *flags, "--run-dir", tmp_path, cwd=tmp_path)
    record = read_run(tmp_path)
    assert [step for step, _ in record.metrics.losses.points] == list(range(1, 25))
    assert record.times.get_cells([0])[..., 0].sum() == 24
    assert len(record.warnings) == 1 and "timing.jsonl" in record.warnings[0]


def test_a_look_reads_what_is_new_alone(tmp_path: Path) -> None:
    plan = {"num_samples": 8, "global_batch": 4, "microbatch": 2}
    config = {"definition": {"recipe": "x"}, "plan": plan, "config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {step}, "loss": {step}, "lr": 1}}\n' for step in (1, 2)))
    follower = Follower(tmp_path)
    assert follower.poll()[0][0].startswith("x: 2 steps")
    with metrics.open("r+b") as file:  # what was read is not read again
        file.write(b"x" * 10)
        file.seek(0, 2)
        file.write(b'{"step": 3, "loss": 3, "lr": 1}\n')
    lines, is_over = follower.poll()
    assert lines[0].startswith("x: 3 steps") and lines[1].startswith("loss 3") and not is_over
    assert not any("left out" in line for line in lines)
    (tmp_path / "new").write_text('{"step": 1, "loss": 1, "lr": 1}\n')
    (tmp_path / "new").replace(metrics)  # resumed, and cut
    assert follower.poll()[0][0].startswith("x: 1 steps")
    (tmp_path / "new").write_text(json.dumps(config | {"definition": {"recipe": "y"}}))
    (tmp_path / "new").replace(tmp_path / "config.json")  # begun anew
    assert follower.poll()[0][0].startswith("y: 1 steps")


@pytest.mark.ranks
def test_a_damaged_ledger_is_left_to_the_audit(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "ledger").iterdir():
        path.write_text("{\n")
    assert read_run(tmp_path).starts == []


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["no/such.html", "folder"])
def test_a_page_that_cannot_be_written_is_one_line(
    run_dir: Path, name: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    refused(run("report", run_dir, "-o", tmp_path / name, cwd=tmp_path), name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def window(*busy: float) -> list[list[float]]:
    """Return ten steps: each rank is busy for so many seconds, and waits for the slowest."""
    return [[0.0, 10 * own_s, 10 * (max(busy) - own_s), 0.0, 0.0] for own_s in busy]


@pytest.mark.parametrize(
    "windows, expected",
    [
        ([window(1, 1, 3)] * 5, [2]),
        ([window(1, 1, 1.1)] * 5, []),
        ([window(1, 1, 1)] * 4 + [window(1, 1, 9)], []),  # one slow moment
        ([window(1, 2)] * 3, [1]),
        ([window(1, 9)] * 3 + [window(1, 1, 1)] * 2, []),  # an earlier size
        ([window(5)] * 3, []),
        ([window(1, 1, 3)] * 5000, [2]),
        ([], []),
    ],
)
def test_stragglers_are_named_by_their_own_work(
    windows: list[list[list[float]]], expected: list[int]
) -> None:
    times = RankTimes(TIMING_KEYS)
    for number, rows in enumerate(windows, start=1):
        times.add(10 * number, 10, dict(enumerate(rows)), len(rows))
    assert [rank for rank, _ in times.find_stragglers()] == expected


def test_ticks_are_round_and_within() -> None:
    assert choose_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert choose_ticks(0.98, 0.9923) == [0.98, 0.985, 0.99]
    assert choose_ticks(3, 3) == [3]


def test_a_long_curve_is_thinned_to_means() -> None:
    points = thin_points([(float(i), float(i % 2)) for i in range(10_000)])
    assert len(points) == 400 and all(0.4 < y < 0.6 for _, y in points)


@pytest.mark.parametrize(
    "plot",
    [
        draw_lines("none", {"loss": []}, "step", "loss"),
        draw_lines("one", {"a <b>": [(1, 2)], "c": [(1, 3)]}, "step", "loss"),
        draw_heat_map("one cell", ["rank 0"], [1.0], np.array([[np.nan]]), "ms"),
        draw_spans("no step", [("start 1", 0.0, 0.0, "1 process")], "step"),
    ],
)
def test_degenerate_plots_are_drawn(plot: Figure) -> None:
    drawn = str(make_environment().get_template("parts.html").module.draw(plot))  # type: ignore[attr-defined]
    assert "nan" not in drawn and "inf" not in drawn
    ElementTree.fromstring(drawn.strip())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_fits_a_phone(run_dir: Path, tmp_path: Path) -> None:
    """A real browser, 390 pixels wide, does not scroll sideways."""
    page = tmp_path / "page.html"
    assert run("report", run_dir, "-o", page, cwd=tmp_path).returncode == 0
    widths = "document.documentElement.scrollWidth + ' of ' + innerWidth"
    probe = f"<script>document.title = {widths}</script>"
    frame = tmp_path / "frame.html"
    page.write_text(page.read_text().replace("</body>", f"{probe}</body>"))
    frame.write_text(
        '<iframe id="f" src="page.html" width="390" height="800"></iframe><script>onload = () => '
        "{ document.title = document.getElementById('f').contentDocument.title }</script>"
    )
    command = [
        str(CHROMIUM),
        *QUIET,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--allow-file-access-from-files",
    ]
    shown = subprocess.run(
        [*command, "--virtual-time-budget=3000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=SECONDS, check=True,
    ).stdout  # fmt: skip
    match = re.search(r"<title>(\d+) of (\d+)</title>", shown)
    assert match is not None, shown[:500]
    assert int(match[1]) <= int(match[2]) <= 390
