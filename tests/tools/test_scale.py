"""`scale` names the losses that tests have planted, and all forms of its output agree."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from processes import refused, run
from stepladder.tools.probe.step_clock import RunQueue
from stepladder.tools.scaling.efficiency import (
    MAX_PREDICTED_PROCESSES,
    STEP_PARTS,
    ScalingLaw,
    SizeResult,
    compute_parts,
    estimate_useful_range,
    fit_law,
)
from stepladder.tools.scaling.measure import Round, summarize_rounds
from stepladder.tools.scaling.scaling_report import Scaling, describe_size, render_scaling_page

STEPS = 40


def times(
    data: float, work: list[list[float]], all_reduce: float, optimizer: float, queued: float = 0.0
) -> np.ndarray:
    """Return the times of ranks that compute work[rank][step % len] seconds and all-reduce.

    The shape is (ranks, steps, columns).
    """
    compute = np.array([[row[step % len(row)] for step in range(STEPS)] for row in work])
    wait = compute.max(0) - compute + all_reduce
    table = np.stack(
        [np.full_like(compute, data), compute, wait, np.full_like(compute, optimizer)], -1
    )
    total = table.sum(-1, keepdims=True)
    queue = np.full((len(work), STEPS, 1), queued)
    return np.concatenate([total, table, queue], -1)


@pytest.mark.parametrize(
    "planted, expected",
    [
        (times(1, [[4], [4]], 0, 2), {"data": 1, "compute": 4, "replicated": 2}),
        (times(0, [[4], [4]], 3, 0), {"compute": 4, "communication": 3}),
        (times(0, [[4], [6]], 0, 0), {"compute": 5, "imbalance": 1}),
        (times(0, [[4, 6], [6, 4]], 0, 0), {"compute": 5, "waiting": 1}),
        (times(0, [[2], [2], [8]], 1, 0), {"compute": 4, "imbalance": 4, "communication": 1}),
        (times(0, [[4]], 0, 0), {"compute": 4}),
        (
            times(1, [[4], [4]], 0, 2, queued=3),
            {"data": 1, "compute": 1, "cores": 3, "replicated": 2},
        ),
        (times(0, [[4], [4]], 3, 0, queued=5), {"compute": 0, "cores": 4, "communication": 3}),
    ],
)
def test_a_steps_parts_are_what_was_planted(
    planted: np.ndarray, expected: dict[str, float]
) -> None:
    parts = compute_parts(planted)
    assert parts == pytest.approx({name: expected.get(name, 0.0) for name in STEP_PARTS})
    assert sum(parts.values()) == pytest.approx(planted[:, :, 0].mean())


def test_a_kernel_that_does_not_tell_the_queue_takes_nothing_from_the_rest() -> None:
    parts = compute_parts(times(1, [[4], [4]], 3, 2, queued=math.nan))
    assert math.isnan(parts["cores"])
    assert (parts["data"], parts["compute"], parts["communication"], parts["replicated"]) == (
        1,
        4,
        3,
        2,
    )
    assert math.isnan(RunQueue(Path("nowhere")).seconds())


def test_one_pause_of_the_machine_is_left_out() -> None:
    paused = times(0, [[4], [4]], 0, 0)
    paused[:, 7, 0] += 1000
    paused[1, 7, 3] += 1000
    assert compute_parts(paused)["compute"] == pytest.approx(4)
    assert compute_parts(paused)["communication"] == pytest.approx(0)


def size(nproc: int, seconds: float, batch: int = 64, **parts: float) -> SizeResult:
    return SizeResult(
        nproc, batch, [seconds] * 3, {name: parts.get(name, 0.0) for name in STEP_PARTS}, 1.0
    )


ONE = size(1, 8, compute=8)


def test_speed_up_and_loss_with_a_fixed_batch() -> None:
    two = size(2, 5, compute=4, communication=1)
    assert (two.speedup(ONE), two.efficiency(ONE)) == (1.6, 0.8)
    assert two.lost_seconds(ONE) == {**dict.fromkeys(STEP_PARTS, 0.0), "communication": 1.0}
    assert describe_size(two, ONE).startswith(
        "2 processes: 1.60 times as fast as 1, efficiency 80%. Of each step's time, lost to:"
        " communication 20%."
    )


def test_speed_up_and_loss_with_a_batch_that_grows() -> None:
    two = size(2, 10, batch=128, compute=8, imbalance=2)
    assert (two.speedup(ONE), two.efficiency(ONE)) == (1.6, 0.8)
    assert two.lost_seconds(ONE)["imbalance"] == 2 and two.lost_seconds(ONE)["compute"] == 0


def test_a_perfect_size_has_nothing_to_blame() -> None:
    assert (
        describe_size(size(4, 2, compute=2), ONE)
        == "4 processes: 4.00 times as fast as 1, efficiency 100%."
    )


@pytest.mark.parametrize(
    "law",
    [ScalingLaw(0.0, 0.0), ScalingLaw(0.1, 0.0), ScalingLaw(0.0, 0.02), ScalingLaw(0.05, 0.01)],
)
def test_the_law_that_made_the_times_is_found(law: ScalingLaw) -> None:
    sizes = [1, 2, 4, 8]
    result = fit_law(sizes, [law.speedup(n) for n in sizes])
    assert (result.contention, result.coherency) == pytest.approx(
        (law.contention, law.coherency), abs=1e-9
    )


def test_the_useful_number_of_processes() -> None:
    assert ScalingLaw(0.1, 0.0).find_useful_size() == 11  # 1 + 0.1 (N - 1) = 2
    assert ScalingLaw(0.0, 0.0).find_useful_size() == MAX_PREDICTED_PROCESSES
    noisy = [
        SizeResult(n, 64, [8 / n * f for f in (1 + 0.1 * (n - 1), 1 + 0.2 * (n - 1))], {}, 1.0)
        for n in (1, 2, 4)
    ]
    middle, low, high = estimate_useful_range(noisy)
    assert 5 <= low <= middle <= high <= 11 and low < high


def test_what_cannot_be_relied_on_is_said() -> None:
    busy = replace(ONE, parts=ONE.parts | {"compute": 4.0, "cores": 4.0})
    sizes = [busy, size(2, 4, compute=4), size(4, 2, compute=2)]
    text = " ".join(Scaling("job", False, sizes).verdicts())
    assert "on 1 process, for 50% of a step's time no core was free" in text
    assert "no prediction for more of them" in text
    two = [ONE, size(2, 5, compute=4, communication=1)]
    quiet = " ".join(
        Scaling("job", False, [*two, size(4, 3.25, compute=2, communication=1.25)]).verdicts()
    )
    assert "busy" not in quiet and "below one half beyond 5 processes." in quiet


def test_two_numbers_of_processes_have_no_law() -> None:
    scaling = Scaling("job", False, [ONE, size(2, 5, compute=4, communication=1)])
    page = render_scaling_page(scaling)
    assert "law" not in " ".join(scaling.verdicts()) + page
    assert "communication" in page and "imbalance" not in page  # of which nothing was lost
    assert ">range<" not in page  # of one round
    assert scaling.as_json()["fit"] is None


def test_faster_than_ideal_is_no_negative_cost() -> None:
    assert fit_law([1, 2, 4], [1, 2.2, 4.6]) == ScalingLaw(0.0, 0.0)


@pytest.mark.parametrize("seconds", [(5, 9, 1), (4, 6, 9, 1)])
def test_parts_are_the_median_round_s_and_add_up_to_its_time(seconds: tuple[int, ...]) -> None:
    """So that what is lost adds up to what the efficiency lacks."""
    size = summarize_rounds(
        [Round(times(1, [[s - 1.0], [s - 1.5]], 0.25, 0), 64, 1.0 + s) for s in seconds]
    )
    assert sum(size.parts.values()) == pytest.approx(size.seconds) == pytest.approx(5.25)
    assert size.launch == 2
    assert sum(size.lost_shares(ONE).values()) == pytest.approx(1 - size.efficiency(ONE))


def test_the_page_of_one_size_is_whole() -> None:
    text = render_scaling_page(Scaling("job", False, [ONE]))
    assert "Where the efficiency went" not in text and "nan" not in text


def test_what_is_not_ours_is_escaped_on_a_page() -> None:
    text = render_scaling_page(Scaling("<script>&", False, [ONE]))
    assert "&lt;script&gt;&amp;" in text and "<script" not in text


@pytest.mark.ranks
def test_on_real_processes_all_outputs_agree(tmp_path: Path) -> None:
    flags = "--nproc", "2,1", "--rounds", 2, "--steps", 8, "--warmup", 2, "--samples", 512
    done = run("scale", "mlp", *flags, "--csv", "t.csv", "--html", "t.html", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [s["nproc"] for s in result["sizes"]] == [1, 2]
    for size in result["sizes"]:
        assert set(size["lost"]) == set(STEP_PARTS) and len(size["rounds"]) == 2
    assert result["sizes"][0]["speedup"] == result["sizes"][0]["efficiency"] == 1
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert [float(row["seconds_per_step"]) for row in rows] == [
        s["seconds_per_step"] for s in result["sizes"]
    ]
    text = (tmp_path / "t.html").read_text()
    assert f"efficiency {result['sizes'][1]['efficiency']:.0%}" in text
    assert not re.search(r"<script|https?://", text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.html"]
    page = (
        (Path(__file__).parent.parent.parent / "docs" / "json.md")
        .read_text()
        .split("\n## scale\n")[1]
    )
    assert re.findall(r"^\| `(\w+)`", page.split("\n## ")[0], re.MULTILINE) == list(result)


SCHEDULED = """
from dataclasses import dataclass
import torch
from stepladder import Job

@dataclass
class Config:
    epochs: int = 5
    global_batch: int = 8

def build(config):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=config.epochs * 4)
    return Job(model, optimizer, lambda model, x: (model(x).sum(), len(x)), torch.ones(32, 4),
               schedule=schedule)
"""


@pytest.mark.ranks
def test_a_job_is_not_trained_past_the_end_of_its_schedule(tmp_path: Path) -> None:
    """OneCycleLR raised: "Tried to step 21 times"."""
    (tmp_path / "my_job.py").write_text(SCHEDULED)
    once = "scale", "my_job.py", "--nproc", 1, "--rounds", 1
    done = run(*once, "--steps", 60, "--warmup", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ms per step, in 18 steps, where the job's schedule ends" in done.stderr
    refused(
        run(*once, "--steps", 60, "--warmup", 16, cwd=tmp_path),
        "the job's schedule ends after 20 steps",
    )


@pytest.mark.ranks
def test_a_job_that_fails_is_shown_with_the_command_that_trains_it(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "my_job.py").write_text(
        SCHEDULED.replace("model(x).sum()", "model(x[:, :3]).sum()")
    )
    flags = "--nproc", 1, "--rounds", 1, "--sync", "exact", "--microbatch", 4
    done = run("scale", "jobs/my_job.py", *flags, cwd=tmp_path)
    command = "stepladder train jobs/my_job.py --microbatch 4 --sync exact --nproc 1"
    assert done.returncode == 2 and done.stderr.endswith(f"HINT: {command}\n"), done.stderr


@pytest.mark.parametrize(
    "flags, problem",
    [
        (("--nproc", "1,x"), "--nproc 1,x is not a list"),
        (("--html", "."), ". cannot be written: it is a folder"),
        (("--nproc", "1,1000000"), "--nproc 1000000 on a machine"),
        (("--nproc", "9"), "9 processes for 8 microbatches"),
        (("--steps", 1), "1 is not in the range"),
        (
            ("--html", "no/such/page.html", "--nproc", "1", "--rounds", 1, "--steps", 5),
            "no/such/page.html",
        ),
    ],
)
def test_bad_input_is_one_line(flags: tuple[object, ...], problem: str, tmp_path: Path) -> None:
    done = run("scale", "mlp", *flags, "--global-batch", 32, "--json", cwd=tmp_path)
    refused(done, problem)
