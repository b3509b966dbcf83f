"""`make gpu` where there is no GPU: it says so, rehearses, and skips by name what is missing."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from processes import run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SCRIPT = (sys.executable, str(ROOT / "benchmarks" / "gpu.py"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    return gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_ends_with_one_line_and_the_rehearsal_to_type(tmp_path: Path) -> None:
    done = run(cwd=tmp_path, command=SCRIPT)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"error: torch .* sees no CUDA GPU here\. HINT: .*make gpu DEVICE=cpu PART=step .*", line
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rehearsal_measures_and_writes_nothing(tmp_path: Path) -> None:
    before = sorted(RESULTS.iterdir())
    done = run("--device", "cpu", "--part", "step", cwd=tmp_path, command=SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "\n## step\n" in done.stdout
    assert re.search(r"\| stepladder Trainer, default configuration \| -?\d+\.\d ", done.stdout)
    assert sorted(RESULTS.iterdir()) == before and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_data_that_is_not_there_is_skipped_by_name(tmp_path: Path) -> None:
    """From a copy of the tree, beside which there is no data."""
    tree = tmp_path / "tree"
    for name in ("benchmarks", "src"):
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    shutil.copy(ROOT / "pyproject.toml", tree)
    command = (sys.executable, str(tree / "benchmarks" / "gpu.py"))
    done = run("--device", "cpu", "--part", "recommender", cwd=tmp_path, command=command)
    assert done.returncode == 0, done.stderr
    assert "Skipped: no leave-one-out split of MovieLens 1M." in done.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_the_language_model_rehearses_on_any_text(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text(
        "It was the best of times, it was the worst of times. " * 200
    )
    done = run(
        "--device", "cpu", "--part", "language", "--shakespeare", ".", cwd=tmp_path, command=SCRIPT
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"- (PASS|FAIL): validation loss \d\.\d{4} \(bar: at most 1\.47\)", done.stdout
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_the_roofline_rehearses_on_what_is_there(tmp_path: Path, gpu: ModuleType) -> None:
    done = run("--device", "cpu", "--part", "roofline", cwd=tmp_path, command=SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "\n### The roofline\n" in done.stdout
    assert re.search(r"\| mlp \| stepladder \| -?\d+\.\d \|", done.stdout)


def test_a_product_and_a_sum_need_what_they_read_write_and_multiply(gpu: ModuleType) -> None:
    from roofline import ByHand, Task, needs_of

    from stepladder import Job

    def build() -> Job:
        model = torch.nn.Linear(8, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        return Job(
            model, optimizer, lambda model, batch: (model(batch[0]).sum(), 1), (torch.ones(16, 8),)
        )

    task = Task("product", build, 16, (1, 2))
    needs = needs_of(task)
    assert needs.operations == 2 * (2 * 16 * 8 * 4), (
        "forward, and the gradient of the weights: inputs want none"
    )
    product = 4 * (16 * 8 + 8 * 4 + 16 * 4)
    weights = 4 * 8 * 4
    assert needs.bytes >= 2 * product + 3 * weights and needs.calls >= 4
    assert ByHand(task, "cpu").run(3) == 3


def test_lessons_that_start_two_nodes_but_need_one_run_on_one(gpu: ModuleType) -> None:
    import gpu_parts

    from stepladder.tools.learn.course import load_course

    commands = {lesson.folder: lesson.command for lesson in load_course().lessons}
    of_two_nodes = {folder for folder, command in commands.items() if "two_nodes.sh" in command}
    changed = {
        folder
        for folder, command in commands.items()
        if gpu_parts.on_one_node(folder, command) != command
    }
    assert of_two_nodes - changed == {"12-all-reduce-nodes", "13-multinode"}
    assert all(
        gpu_parts.on_one_node(folder, commands[folder]).startswith("torchrun ")
        for folder in changed
    )


def test_a_part_that_takes_too_long_is_ended_and_fails(gpu: ModuleType) -> None:
    part = next(part for part in gpu.PARTS if part.name == "step")
    code, text = gpu.section(part, gpu.Machine("cpu", None, None), 1.0)
    assert code == 1
    assert text.startswith("## step\n") and "FAIL" in text and "no end within 1 s" in text


def test_a_part_on_its_own_keeps_the_sections_of_the_others(
    gpu: ModuleType, tmp_path: Path
) -> None:
    sections = {"tests": "## tests\n\nAll passed.", "step": "## step\n\n| a | b |\n| --- | ---: |"}
    report = tmp_path / "gpu_card.md"
    assert gpu.sections_of(report) == {}
    report.write_text("\n\n".join(["# On a GPU\n\n- Date: today", *sections.values()]) + "\n")
    assert gpu.sections_of(report) == sections


def test_what_stepladder_needs_and_this_python_lacks_is_named(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu.not_installed() == []
    monkeypatch.setattr(
        gpu.importlib.util, "find_spec", lambda name: None if name == "click" else name
    )
    assert gpu.not_installed() == ["click"]
    assert "lacks click. HINT: pip install click" in gpu.what_is_wrong("cpu")
