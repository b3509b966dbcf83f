"""The page and the view of a run: what they say is what the run's files say, and the page looks
after itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from browsers import check_readable, check_tables_fit, needs_browser, open_tab
from processes import refused, run, train
from ranks import run_ranks
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.rank.progress import TIMING_KEYS
from stepladder.storage.run_dir import RunDir
from stepladder.storage.start_records import describe_command, read_start_records
from stepladder.tools.pages.figures import (
    PLOT_BOTTOM,
    TOP,
    Figure,
    choose_ticks,
    draw_heat_map,
    draw_spans,
)
from stepladder.tools.pages.line_chart import ChartEvent, draw_lines
from stepladder.tools.pages.page import make_environment
from stepladder.tools.report.live import Follower, describe
from stepladder.tools.report.record import RunStart, read_run
from stepladder.tools.report.report import describe_end, format_duration
from stepladder.tools.report.series import RankTimes
from stepladder.train.comm import Comm
from stepladder.train.trainer import Trainer


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
    ] == [(1, 2, 0, 8), (2, 1, 8, 16)]
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


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shard", "sync", "by_gloo"),
    [
        ("none", "exact", False),
        pytest.param("optimizer", "ddp", True, marks=pytest.mark.slow),
        pytest.param("full", "exact", False, marks=pytest.mark.slow),
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
    assert "finished: 16 of 16 steps, 1 start on 2 processes; samples lost 0" in text
    assert re.search(r"rank 1 takes \d+\.\d times as long as the other for its share", text), text
    drawn = re.findall(r'role="img" aria-label="([^"]*)', text)
    assert drawn == ["loss", "test_mse", "throughput", "time per step and rank", "starts"]
    assert re.search(r"<p>learning rate: [\d.]+ from step 1 to 16\.</p>", text), "a constant"
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
        "finished: 16 of 16 steps, 2 starts on 2, then 1 process; samples lost 0",
        "<title>start 1 stopped after step 8; start 2 continues after step 8, 1 process</title>",
        "Every sample of each step was trained exactly once (2 attempts, 0 steps rolled back",
        "prefers-color-scheme: dark",
    ):
        assert expected in text
    summary = dict(re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', text))
    assert summary["host"] == socket.gethostname() and summary["git commit"].startswith("none")
    assert summary["last command"].endswith(" --epochs 2 --json")
    assert summary["command"].endswith(" --epochs 2 --nproc 2 --steps 8 --json")
    begun = datetime.strptime(summary["begun"], "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC)
    assert abs(begun.timestamp() - (run_dir / "config.json").stat().st_mtime) < 60
    assert float(summary["duration"].removesuffix(" s")) > 0
    best = json.loads((run_dir / "result.json").read_text())["best"]
    assert summary["best test_mse"] == f"{best['value']:.6g}, after step {best['step']}"
    assert float(summary["last test_mse"]) > 0
    assert len(re.findall('class="note"', text.split("<figure>")[1])) == 16
    assert json.loads((run_dir / "result.json").read_text())["weights_sha256"][:12] in text
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
    os.utime(tmp_path / "metrics.jsonl")
    running = "mlp: 16 of 16 steps, epoch 3"
    assert describe(read_run(tmp_path))[0].startswith(f"{running}, 1 process")
    os.utime(tmp_path / "metrics.jsonl", (1e9, 1e9))
    since = datetime.fromtimestamp(1e9).strftime("%H:%M:%S")
    assert describe(read_run(tmp_path))[0].startswith(f"{running}, no step since {since}, 1 pro")
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


def test_labels_of_one_step_lie_one_below_the_other() -> None:
    events = [ChartEvent(5, label, label) for label in ("1 lost", "1 joined")]
    curves = {"loss": [(step, step % 3) for step in range(100)]}
    events.append(ChartEvent(90, "2 lost", "2 lost"))
    plot = draw_lines("loss", curves, "step", "loss", (), events)
    drawn = str(make_environment().get_template("parts.html").module.draw(plot))  # type: ignore[attr-defined]
    elements = list(ElementTree.fromstring(drawn.strip()).iter())
    labels = {
        element.text: float(element.attrib["y"])
        for element in elements
        if element.tag == "text" and element.text in {event.label for event in events}
    }
    assert labels["1 lost"] == labels["2 lost"] != labels["1 joined"]
    [curve] = [element.attrib["points"] for element in elements if element.tag == "polyline"]
    highest = min(float(point.split(",")[1]) for point in curve.split())
    assert max(labels.values()) < highest, "a label covers the curve"


def test_many_labels_leave_half_of_the_plot_to_the_curve() -> None:
    events = [ChartEvent(5, f"start {number}", "") for number in range(40)]
    plot = draw_lines("loss", {"loss": [(0, 0), (9, 1)]}, "step", "loss", (), events)
    [curve] = [mark.attributes["points"] for mark in plot.marks if mark.tag == "polyline"]
    assert curve.endswith(f",{(TOP + PLOT_BOTTOM) / 2:.1f}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.ranks
def test_a_page_compares_runs(run_dir: Path, tmp_path: Path) -> None:
    flags = "--samples", 256, "--global-batch", 32, "--epochs", 2
    train("mlp", *flags, "--lr", 0.03, "--run-dir", "other", cwd=tmp_path)
    runs = run_dir, tmp_path / "other", run_dir
    done = run("report", *runs, "-o", tmp_path / "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r'<p class="verdict( bad)?">', text) == [" bad", ""]
    answer = run("diff", run_dir, tmp_path / "other", cwd=tmp_path).stdout.splitlines()[-1]
    assert re.match(r"the records differ from step \d+ on \(", answer) and answer in text
    assert "losses within 1e-05 in 16 common steps" in text
    row = re.search(r"<td>lr</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", text)
    assert row is not None and row[2] == "0.03" and row[3] == "=" and row[1] != row[2]
    assert re.findall(r'role="img" aria-label="(.*?)"', text) == [
        "training loss",
        "test_mse",
        "learning rate",
    ]
    assert text.split("</figure>")[0].count("<polyline") == 2 * 3  # in the plot and the legend


def test_what_has_no_curves_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "launches.jsonl").touch()
    refused(run("report", tmp_path, tmp_path, cwd=tmp_path), "is the run of a script")
    refused(run("report", *[tmp_path] * 9, cwd=tmp_path), "9 runs, but a page compares at most 8")


@pytest.mark.parametrize(
    "argv, command",
    [
        (["/opt/venv/bin/stepladder", "train", "x"], "stepladder train x"),
        (["/src/stepladder/__main__.py", "train", "a b"], "stepladder train 'a b'"),
        (["train.py", "--hf-token", "hf_x1"], "python train.py --hf-token '***'"),
    ],
)
def test_the_command_is_that_which_was_typed(argv: list[str], command: str) -> None:
    assert describe_command(argv) == command


def test_a_start_that_was_killed_is_told_from_one_that_failed(tmp_path: Path) -> None:
    lines = [
        {"attempt": 1, "begun": 10.0, "host": "a", "command": "c"},
        {"attempt": 2, "begun": 20.0, "host": "b", "command": "c"},
        {"attempt": 2, "ended": 25.0, "failed": True},
        {"attempt": 3, "begun": "yesterday", "host": "b", "command": "c"},
    ]
    path = tmp_path / "starts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"attempt": 4, "beg')
    records = read_start_records(tmp_path)
    assert sorted(records) == [1, 2]
    starts = [RunStart(1, 4, 0, 9), RunStart(2, 3, 6, 12), RunStart(3, 3, 12, 20)]
    assert describe_end(starts[0], starts[1], records) == "start 1 was killed after step 9"
    assert describe_end(starts[1], starts[2], records) == "start 2 was interrupted after step 12"
    assert describe_end(starts[1], starts[2], {}) == "start 2 stopped after step 12"


def test_durations_are_in_two_units() -> None:
    assert [format_duration(s) for s in (0.04, 59.9, 61, 7500)] == [
        "0.0 s",
        "59.9 s",
        "1 min 1 s",
        "2 h 5 min",
    ]


def test_a_value_that_was_not_measured_again_has_its_step() -> None:
    figure = draw_lines(
        "loss", {"training": [(1, 2.0), (2, 1.5), (3, 1.0)], "test": [(1, 3.0)]}, "step", ""
    )
    assert [row[2] for row in figure.values[1:]] == ["3", "3 (of 1)", "3 (of 1)"]


@pytest.mark.slow
@pytest.mark.ranks
@needs_browser
def test_the_values_of_a_chart_are_read_without_a_pointer(run_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("report", run_dir, "-o", page, cwd=tmp_path).returncode == 0
    last_loss = next(
        line["loss"] for line in reversed(read_lines(run_dir / "metrics.jsonl")) if "lr" in line
    )
    with open_tab(page.as_uri(), tmp_path) as tab:
        while tab.evaluate("document.activeElement.innerText") != "The values of loss":
            tab.press("Tab")
            assert tab.evaluate("document.activeElement !== document.body"), "the page has ended"
        rows = "document.querySelector('details table').innerText"
        is_seen = "document.querySelector('details table').checkVisibility()"
        assert not tab.evaluate(is_seen)
        tab.press("Enter", "\r")
        assert tab.evaluate(is_seen)
        *_, last_row = tab.evaluate(rows).strip().splitlines()
        assert last_row.split()[1] == f"{last_loss:.3g}"


@pytest.mark.slow
@pytest.mark.ranks
@needs_browser
def test_the_pages_are_readable_in_a_browser(run_dir: Path, tmp_path: Path) -> None:
    """At 1280 and 390 pixels, light and dark: nothing is cut, overlaps, overflows or is faint."""
    for runs in ([run_dir], [run_dir, run_dir, run_dir]):
        page = tmp_path / "page.html"
        assert run("report", *runs, "-o", page, cwd=tmp_path).returncode == 0
        check_readable(page, tmp_path)
        check_tables_fit(page, tmp_path)
    flags = "--nproc", "1,2", "--rounds", 1, "--steps", 8, "--samples", 512
    assert run("scale", "mlp", *flags, "--html", "scale.html", cwd=tmp_path).returncode == 0
    check_readable(tmp_path / "scale.html", tmp_path)


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    "body, problem",
    [
        ('<p style="white-space: nowrap">' + "word " * 300 + "</p>", "the page is"),
        ('<p style="color: #aaa; background: #fff">faint</p>', "too little contrast"),
        ('<svg viewBox="0 0 40 40"><text x="30" y="20">too long</text></svg>', "cut in"),
    ],
)
def test_the_browser_finds_what_is_wrong(body: str, problem: str, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(f"<!doctype html><title></title><body>{body}</body>")
    with pytest.raises(AssertionError, match=problem):
        check_readable(page, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ("report", "RUN"),
        ("report", "RUN", "-o", "train.py"),
        ("report", "RUN", "RUN", "-o", "train.py"),
        ("learn", "class", "class.html", "-o", "train.py"),
        ("scale", "digits", "--html", "train.py"),
        ("scale", "digits", "--csv", "train.py"),
        ("doctor", "--save", "train.py"),
    ],
)
def test_no_output_replaces_a_file_of_the_users(
    command: tuple[str, ...], run_dir: Path, tmp_path: Path
) -> None:
    for name in ("report.html", "train.py"):
        (tmp_path / name).write_text("import torch\n")
    arguments = [run_dir if argument == "RUN" else argument for argument in command]
    done = run(*arguments, cwd=tmp_path)
    refused(done, "is there already, and is no earlier output of stepladder")
    for name in ("report.html", "train.py"):
        assert (tmp_path / name).read_text() == "import torch\n"


def test_report_replaces_its_earlier_page(run_dir: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = run("report", run_dir, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "written: report.html\n"), done.stderr


def test_report_does_not_wait_for_a_fifo(run_dir: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.html")
    refused(run("report", run_dir, cwd=tmp_path), "report.html is there already")
