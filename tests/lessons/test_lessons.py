"""Every lesson comes to its claim by the command on its page, and what the pages show is what the
files have.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gloo import gloo_comes_last
from pages import REPOSITORY
from processes import run
from warm import PROGRAMS, SERVER

LESSONS = REPOSITORY / "lessons"
QUICK = ("04-data-parallel-by-hand",)
GUIDES_FLAGS = {"--total_epochs", "--save_every", "--batch_size"}
TRAIN_NOTHING = ("01-all-reduce", "12-all-reduce-nodes", "21-collectives")
KNOW_THE_LIBRARY = ("19-stepladder", "20-shard")
NODES = {  # what lessons on several nodes must say
    "12-all-reduce-nodes": "on every rank of 2 nodes",
    "13-multinode": "4 ranks on 2 nodes, 16 steps each, one writer",
    "16-evaluation": "of 360 test images, each counted once by one of 4 ranks on 2 nodes",
    "17-streaming": "each of 1437 rows was read once per epoch by one of 4 ranks on 2 nodes",
}


def load(name: str) -> ModuleType:
    """lessons/NAME.py, which is no part of a package."""
    sys.path.insert(0, str(LESSONS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(LESSONS))


MAKE = load("make")
LADDER: dict[str, dict[str, Any]] = MAKE.ladder()
FOLDERS = pytest.mark.parametrize("folder", LADDER)


def run_lesson(
    command: str, cwd: Path, *more: object, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A command of the ladder in `cwd`, which sees the lessons as the repository's root does."""
    if not (cwd / "lessons").exists():
        (cwd / "lessons").symlink_to(LESSONS)
    program, *args = shlex.split(command)
    launcher = (sys.executable, *PROGRAMS[program]) if program in PROGRAMS else (program,)
    path = f"{SERVER.commands()}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    env = {"PATH": path} | SERVER.ranks() | options.pop("env", {})
    return run(*args, *more, cwd=cwd, command=launcher, env=env, **options)


def claim_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    *_, line = (line for line in done.stdout.splitlines() if line.startswith("claim holds: "))
    return line


def without_slurm() -> list[Any]:
    return [
        pytest.param(lesson, id=folder, marks=[] if folder in QUICK else pytest.mark.slow)
        for folder, lesson in LADDER.items()
        if not lesson["needs"]
    ]


@pytest.mark.every_case
@pytest.mark.ranks
@pytest.mark.parametrize("lesson", without_slurm())
def test_the_claim_holds_and_the_page_shows_what_is_printed(
    lesson: dict[str, Any], tmp_path: Path
) -> None:
    """But for numbers, which are those of another machine."""
    done = run_lesson(lesson["command"], tmp_path)
    draw_picture_of(lesson["folder"], tmp_path)
    assert NODES.get(lesson["folder"], "") in claim_of(done)
    printed = without_numbers(done.stdout.replace(socket.gethostname(), "HOST"))
    lines = {without_numbers(line) for line in shown_on_page(lesson["folder"])} - {
        "#"
    }  # "..." is one, too
    assert not [line for line in lines if line not in printed], (
        "run: python lessons/make.py outputs N"
    )


def draw_picture_of(folder: str, where: Path) -> None:
    """From what the run left, where the lesson's page has one."""
    if find_spec("matplotlib") is None or folder not in (pictures := load("pictures")).PICTURES:
        return
    name, draw = pictures.PICTURES[folder]
    draw(where / "runs/lessons" / folder, where / name)
    labels = set(re.findall(r"<text[^>]*>([^<]+)</text>", (where / name).read_text()))
    assert labels >= {"rank 0", "rank 1"} or labels >= {"one device", "epoch"}
    assert set(re.findall(r"\]\((\w+\.svg)\)", (LESSONS / folder / "README.md").read_text())) == {
        name
    }


@pytest.mark.parametrize(
    ("file", "function"),
    [
        pytest.param("15-mnist/lesson.py", "make_data", marks=pytest.mark.slow),
        pytest.param("16-evaluation/lesson.py", "make_data", marks=pytest.mark.slow),
        ("17-streaming/create_mnist_h5.py", "load_images"),
    ],
)
def test_without_any_digits_it_says_what_to_install(
    file: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"error: no MNIST in .* HINT: pip install scikit-learn"):
        runpy.run_path(str(LESSONS / file))[function](tmp_path)


@pytest.mark.parametrize(("action", "package"), MAKE.NEEDED.items())
def test_make_says_which_package_it_needs(
    action: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["make.py", action, "file"])
    with pytest.raises(SystemExit) as ended:
        MAKE.main()
    assert ended.value.code == 2
    assert f"error: {action} needs {package}. HINT: pip install" in capsys.readouterr().err


@FOLDERS
def test_every_page_shows_what_its_lesson_prints(folder: str) -> None:
    assert shown_on_page(folder), f"run: python lessons/make.py outputs {LADDER[folder]['number']}"


def shown_on_page(folder: str) -> list[str]:
    page = (LESSONS / folder / "README.md").read_text(encoding="utf-8")
    (text,) = (now for _, kind, _, _, now, _ in MAKE.GENERATED.findall(page) if kind == "output")
    return text.splitlines()[1:-1]


def without_numbers(text: str) -> str:
    """Nor hashes, which are others on another processor."""
    return re.sub(r"\b(?=[a-f]*\d)[\da-f]{8,}\b|[\d.]+", "#", " ".join(text.split()))


WRONG = {  # a change to a lesson, and what its claim says then
    "one bucket": ("06-ddp", ", bucket_cap_mb=0.0002", "", "32 all_reduces in 32 steps"),
    "every node writes": (
        "13-multinode",
        "if rank == 0 and ((epoch",
        'if os.environ["LOCAL_RANK"] == "0" and ((epoch',
        r"written by ranks \[0, 2\]|snapshot.tmp",  # or one was in the other's way
    ),
    "every piece is sent": (
        "23-precision",
        "nullcontext() if is_last else model.no_sync()",
        "nullcontext()",
        "a piece was sent",
    ),
    "no Adam": (
        "22-memory",
        "twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=args.lr)",
        "twin_optimizer = torch.optim.SGD(twin.parameters(), lr=args.lr)",
        "unsharded",
    ),
    "a chunk is kept": (
        "17-streaming",
        "self.rows += (",
        "self.kept = images; self.rows += (",
        "256 rows were in memory",
    ),
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_claim_fails_where_it_does_not_hold(
    wrong: tuple[str, str, str, str], tmp_path: Path
) -> None:
    folder, old, new, says = wrong
    shutil.copytree(LESSONS, tmp_path / "lessons", ignore=shutil.ignore_patterns("__pycache__"))
    lesson = tmp_path / "lessons" / folder / "lesson.py"
    text = lesson.read_text(encoding="utf-8")
    assert text.count(old) == 1
    lesson.write_text(text.replace(old, new), encoding="utf-8")
    done = run_lesson(LADDER[folder]["command"], tmp_path, "--total_epochs", 1)
    assert done.returncode
    assert re.search(says, done.stderr)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_ends_well_while_gloo_still_works(tmp_path: Path) -> None:
    with gloo_comes_last():
        command = LADDER["04-data-parallel-by-hand"]["command"]
        claim_of(run_lesson(command, tmp_path, "--total_epochs", 1, "--save_every", 1))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["15-mnist", "16-evaluation", "17-streaming"])
def test_real_images(folder: str, tmp_path: Path, mnist_dir: Path) -> None:
    done = run_lesson(LADDER[folder]["command"], tmp_path, "--data_dir", mnist_dir)
    claim_of(done)
    accuracy = float(re.findall(r"([\d.]+)% of 10000 test images", done.stdout)[-1])
    assert accuracy > 95


@pytest.mark.ranks
@pytest.mark.slow
def test_real_films(tmp_path: Path, mnist_dir: Path) -> None:
    films = mnist_dir.parent / "movielens"
    claim = claim_of(run_lesson(LADDER["18-recommender"]["command"], tmp_path, "--data_dir", films))
    assert "610 users" in claim


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    """Lesson 10, by hand: a snapshot of an unfinished run is found, one of other settings is
    refused.
    """
    torchrun = "torchrun --standalone --nproc_per_node=1 lessons/10-torchrun-resume/lesson.py"
    done = run_lesson(f"{torchrun} 4 2 --folder run", tmp_path)
    assert "from the snapshot in run: epoch 2 is next" in done.stdout
    assert "to the bit" in claim_of(done)
    mark_unfinished(tmp_path / "run" / "snapshot.pt", next_epoch=3)
    refused = run_lesson(f"{torchrun} 6 2 --folder run", tmp_path)
    assert refused.returncode
    assert "error: run holds a run with {'total_epochs': 4" in refused.stderr
    assert "HINT: --folder run-2" in refused.stderr


def mark_unfinished(path: Path, next_epoch: int) -> None:
    import torch

    torch.save({**torch.load(path, weights_only=True), "next_epoch": next_epoch}, path)


def test_the_guide_s_line_is_arithmetic(tmp_path: Path) -> None:
    """2 nodes x 8 GPUs, 2048 samples, batches of 32, without a process besides this one."""
    lesson = (
        "python lessons/13-multinode/lesson.py --total_epochs 50 --save_every 10 --batch_size 32"
    )
    done = run_lesson(lesson, tmp_path)
    assert "node 1, local rank 3: [GPU11] Epoch 47 | Batchsize: 32 | Steps: 4\n" in done.stdout
    assert done.stdout.count("| Steps: 4\n") == 16
    assert "16 ranks x 4 steps x 32 samples" in claim_of(done)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "python lessons/02-one-device/lesson.py --save_every 0",
            "--save_every: 0 is not 1 or more",
        ),
        ("python lessons/02-one-device/lesson.py 50 10 3", "more than two numbers. HINT: 50 10"),
        (
            "python lessons/09-learning-rate/lesson.py --batch_size 30",
            "30 is not a multiple of --nproc 4",
        ),
        (
            "python lessons/10-torchrun-resume/lesson.py",
            "error: no RANK in the environment. HINT: torchrun",
        ),
        (
            "bash lessons/two_nodes.sh lessons/99.py",
            "lessons/99.py is not a file. HINT: bash lessons",
        ),
    ],
)
def test_bad_input_is_said_in_a_line(command: str, says: str, tmp_path: Path) -> None:
    done = run_lesson(command, tmp_path)
    assert done.returncode in (1, 2)
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_generated_parts_are_current() -> None:
    stale = [str(path) for path, text in MAKE.pages().items() if path.read_text() != text]
    assert not stale, "run: python lessons/make.py diffs"


@FOLDERS
def test_a_sentence_explains_every_change(folder: str) -> None:
    """Each change to the lesson before is on the page, below a sentence of its own."""
    page = (LESSONS / folder / "README.md").read_text(encoding="utf-8")
    explained = re.findall(r"[^>]\.\n\n<!-- generated: change (\w+) (\d+) -->\n", page)
    assert sorted((name, int(number)) for name, number in explained) == sorted(
        MAKE.changes(LADDER[folder])
    )
    assert re.search(r"<!-- generated: output -->\n```text\n.*\nclaim holds: ", page, re.DOTALL)


@pytest.mark.parametrize("script", sorted(LESSONS.glob("*/*.sbatch")), ids=lambda path: path.stem)
def test_batch_files_have_no_mistakes(script: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "lessons").mkdir(parents=True)  # their pages make it first
    (tmp_path / "lessons").symlink_to(LESSONS)
    assert run("submit", "--lint", script, cwd=tmp_path).stdout == "nothing found\n"


def test_functions_stay_the_same_often_enough_to_be_compared() -> None:
    """So that the test above cannot pass on lessons that share nothing."""
    same = {
        folder: len(MAKE.pieces_before(lesson).items() & MAKE.pieces(folder).items())
        for folder, lesson in LADDER.items()
    }
    assert sum(same.values()) > 80
    assert all(
        count > 0 for folder, count in same.items() if folder > "02" and folder not in TRAIN_NOTHING
    ), same


@FOLDERS
def test_the_first_line_is_the_command(folder: str) -> None:
    docstring = ast.get_docstring(ast.parse(MAKE.code(folder)))
    assert docstring and docstring.splitlines()[0] == LADDER[folder]["command"]


@FOLDERS
def test_the_guides_flags_are_there(folder: str) -> None:
    flags = set(re.findall(r'add_argument\(\s*"(--\w+)"', MAKE.code(folder)))
    assert flags >= (set() if folder in TRAIN_NOTHING else GUIDES_FLAGS)


@FOLDERS
def test_two_lessons_know_the_library(folder: str) -> None:
    knows = re.search(r"^(from|import) stepladder", MAKE.code(folder), re.MULTILINE)
    assert bool(knows) == (folder in KNOW_THE_LIBRARY)


def test_every_folder_is_a_lesson() -> None:
    folders = {path.parent.name for path in LESSONS.glob("[0-9]*/lesson.py")}
    assert folders == set(LADDER)
    assert [lesson["number"] for lesson in LADDER.values()] == list(range(1, len(LADDER) + 1))


def test_rows_of_the_lineage_have_their_lesson() -> None:
    lines = (REPOSITORY / "docs" / "lineage.md").read_text().splitlines()
    rows = {match[1]: line for line in lines if (match := re.match(r"\| (\w\d+) \|", line))}
    for folder, lesson in LADDER.items():
        for row in lesson["rows"]:
            assert f"(../lessons/{folder}/README.md)" in rows[row], (
                f"row {row} has no link to {folder}"
            )
    assert not [row for row, line in rows.items() if "lesson: not yet" in line]
