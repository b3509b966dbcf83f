"""docs/your-own-job.md, for real: the diff is small and true, and the converted script trains the
same curve.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gloo import gloo_comes_last
from pages import EXAMPLES, REPOSITORY, blocks, run_blocks
from processes import refused, run

PAGE = REPOSITORY / "docs" / "your-own-job.md"
MOST_CHANGED_LINES = 15
RELATIVE = 1e-5
# Of 360 test images, about three standard deviations: the two scripts shuffle the training set
# differently.
ACCURACY_TOLERANCE = 0.03

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(900),
]  # one fixture runs every block of the page


def difference() -> list[str]:
    plain, job = ((EXAMPLES / name).read_text().splitlines() for name in ("plain.py", "my_job.py"))
    return list(difflib.unified_diff(plain, job, "plain.py", "my_job.py", n=2, lineterm=""))


def losses(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def largest_difference(ones: list[float], others: list[float]) -> float:
    return max(abs(one - other) / one for one, other in zip(ones, others, strict=True))


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / name / "result.json").read_text())


def run_script(name: str, *args: str, folder: Path) -> str:
    done = run(EXAMPLES / name, *args, cwd=folder, command=(sys.executable,))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every block of the page was run."""
    folder = tmp_path_factory.mktemp("your_own_job")
    run_blocks(PAGE, "run", folder)
    return folder


@pytest.fixture(scope="module")
def plain_output(folder: Path) -> str:
    return run_script("plain.py", "losses.txt", folder=folder)


def test_the_diff_on_the_page_is_that_of_the_files() -> None:
    shown = next(block for block in blocks(PAGE) if block.language == "diff")
    assert shown.text.splitlines() == difference(), "the page should show:\n" + "\n".join(
        difference()
    )


def test_the_diff_is_small() -> None:
    changed = [line for line in difference()[2:] if line[0] in "+-"]
    assert 0 < len(changed) <= MOST_CHANGED_LINES


def test_the_plain_script_knows_nothing_of_stepladder() -> None:
    assert "stepladder" not in (EXAMPLES / "plain.py").read_text()


@pytest.mark.slow
def test_the_old_loop_still_runs_in_the_converted_script(folder: Path, plain_output: str) -> None:
    assert run_script("my_job.py", "losses_of_my_job.txt", folder=folder) == plain_output
    assert (folder / "losses_of_my_job.txt").read_text() == (folder / "losses.txt").read_text()


@pytest.mark.slow
def test_the_converted_script_trains(folder: Path) -> None:
    curve = losses(folder / "runs" / "one")
    assert len(curve) == 10 * 23
    assert sum(curve[-23:]) < 0.1 * sum(curve[:23])


@pytest.mark.slow
@pytest.mark.parametrize("other", ["two", "torchrun"])
def test_the_curve_is_the_same_on_two_processes(folder: Path, other: str) -> None:
    assert result(folder, other)["world_size"] == 2
    assert (
        largest_difference(losses(folder / "runs" / "one"), losses(folder / "runs" / other))
        < RELATIVE
    )


@pytest.mark.slow
def test_the_accuracy_is_that_of_the_plain_script(folder: Path, plain_output: str) -> None:
    plain = float(re.findall(r"accuracy ([\d.]+)", plain_output)[-1])
    assert plain > 0.93
    for name in ("one", "two", "torchrun"):
        assert result(folder, name)["metrics"]["accuracy"] == pytest.approx(
            plain, abs=ACCURACY_TOLERANCE
        )


@pytest.mark.slow
def test_the_own_loop_gives_the_same_losses_alone_and_under_torchrun(folder: Path) -> None:
    alone = result(folder, "alone")["losses"]
    two = result(folder, "own_loop")["losses"]
    assert len(alone) == 10 * 23
    assert largest_difference(alone, two) < RELATIVE


@pytest.mark.slow
def test_the_own_loop_ends_well_while_gloo_still_works(tmp_path: Path) -> None:
    for name in ("plain.py", "own_loop.py"):
        (tmp_path / name).symlink_to(EXAMPLES / name)
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    with gloo_comes_last():
        done = run("own_loop.py", cwd=tmp_path, command=torchrun)
    assert done.returncode == 0, done.stderr


EVALUATE = """
import json
from pathlib import Path
from plain import Config, load_data, make_model, num_correct
from stepladder import Snapshots

test_data, model = load_data()[1], make_model(Config())
for name in ("alone", "own_loop"):
    Snapshots(Path("runs", name, "snapshots")).latest().restore_model(model)
    whole = int(num_correct(model, test_data[:])) / len(test_data)
    assert whole == json.loads(Path("runs", name, "result.json").read_text())["accuracy"]
"""


@pytest.mark.slow
def test_the_own_loop_evaluates_exactly(folder: Path) -> None:
    """Its accuracy is that of its last weights on the whole test set in one pass."""
    done = run(EVALUATE, cwd=folder, command=(sys.executable, "-c"))
    assert done.returncode == 0, done.stderr


def test_a_job_may_refuse_its_input_in_one_line(tmp_path: Path) -> None:
    job = EXAMPLES / "finetune_job.py"
    done = run("train", job, "--weights", "nosuch.safetensors", cwd=tmp_path)
    refused(done, "--weights nosuch.safetensors is no file", "stepladder export RUN_DIR")
