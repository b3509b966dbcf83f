"""Each exercise fails as shipped, for the reason that is stated, and passes with its solution."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from wrong_answers import WRONG_ANSWERS

from stepladder.tools.learn import check
from stepladder.tools.learn.check import check_exercise
from stepladder.tools.learn.course import CHECK_LINE, Exercise, extract_check, load_course
from warm import Server

COURSE = load_course()
EXERCISES = {exercise.name: exercise for exercise in COURSE.exercises}
QUICK = ("save-by-local-rank",)
MOST_LINES = 90

every_exercise = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
run_exercises = pytest.mark.parametrize(
    "exercise",
    [
        pytest.param(e, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, e in EXERCISES.items()
    ],
)


def shipped(exercise: Exercise) -> Path:
    return COURSE.item_folder(exercise) / "exercise.py"


@pytest.fixture(scope="session")
def server() -> Server:
    """Forks Python as `learn check` starts it."""
    return Server(given={"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"})


@pytest.fixture
def warm_python(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(server.commands() / "python"))
    # What the server forks is not below the process that waits for it: that one only sleeps.
    monkeypatch.setattr(check, "HANG_TIMEOUT_S", None)


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_python")
@run_exercises
def test_it_fails_as_shipped_for_the_stated_reason(exercise: Exercise) -> None:
    verdict = check_exercise(COURSE, exercise, shipped(exercise), print)
    assert not verdict.passed, "it is solved: git checkout lessons/exercises"
    assert exercise.reason in verdict.text


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_python")
@run_exercises
def test_its_solution_passes(exercise: Exercise) -> None:
    verdict = check_exercise(COURSE, exercise, COURSE.solution_file(exercise), print)
    assert verdict.passed, verdict.text


# What a learner might try, beginning with the solution or with the file as shipped, and what the
# check must say.
TRIES = {
    "sum for mean": (
        "all-reduce",
        True,
        " / dist.get_world_size()",
        "",
        "not every process holds the mean",
    ),
    "all log": ("collective-on-one-rank", False, "if rank == 0:", "if True:", "rank 0 alone logs"),
    "no DDP": (
        "spawn",
        True,
        "DistributedDataParallel(torch",
        "(torch",
        "ended with different weights",
    ),
    "no sampler": ("spawn", True, "sampler=sampler", "shuffle=True", "did not share the samples"),
    "own count": (
        "padded-evaluation",
        False,
        "len(share)",
        "len(CORRECT) / num_ranks",
        "counted were [9",
    ),
    "drop_last": ("padded-evaluation", False, "shuffle=False", "drop_last=True", "counted were 9"),
    "all by rank": (
        "same-augmentation",
        False,
        "manual_seed(SEED",
        "manual_seed(SEED + rank",
        "the first weights",
    ),
    "too high a rate": ("learning-rate", True, "LR * num_ranks", "LR * num_ranks**2", "the loss"),
    "no group": (
        "torchrun",
        True,
        'dist.init_process_group("gloo")',
        "pass",
        "Default process group",
    ),
    "saved only": (
        "optimizer-left-out",
        True,
        'load_state_dict(snapshot["optimizer"])',
        "state_dict()",
        "other weights",
    ),
    "rank, not local": ("all-on-gpu-0", True, '["LOCAL_RANK"]', '["RANK"]', "node 1 has no GPU 2"),
    "rank 0 only": (
        "schedule",
        True,
        "    scheduler.step()",
        "    rank or scheduler.step()",
        "different weights",
    ),
    "nobody saves": ("save-by-local-rank", True, "rank == 0", "rank == 9", "0 processes wrote"),
    "one noise": (
        "own-generator",
        False,
        "generator=NOISE",
        "generator=NOISE.manual_seed(7)",
        "noise of its own",
    ),
    "another driver": ("hdf5-fork", False, ', driver="stdio"', "", "no row was wrong this time"),
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("attempt", TRIES.values(), ids=TRIES)
def test_a_plausible_mistake_is_found(
    attempt: tuple[str, bool, str, str, str], tmp_path: Path
) -> None:
    name, from_solution, old, new, says = attempt
    exercise = EXERCISES[name]
    text = (COURSE.solution_file(exercise) if from_solution else shipped(exercise)).read_text()
    assert old in text
    file = tmp_path / "exercise.py"
    file.write_text(text.replace(old, new))
    messages: list[str] = []
    verdict = check_exercise(COURSE, exercise, file, messages.append)
    assert not verdict.passed
    assert says in "\n".join([*messages, verdict.text])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("name", "function", "says"),
    [
        pytest.param(name, function, says, id=f"{name}-{number}")
        for name, answers in WRONG_ANSWERS.items()
        for number, (function, says) in enumerate(answers, start=1)
    ],
)
def test_a_typical_wrong_answer_is_rejected(
    name: str, function: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "exercise.py"
    file.write_text(replace_function(COURSE.solution_file(EXERCISES[name]).read_text(), function))
    messages: list[str] = []
    verdict = check_exercise(COURSE, EXERCISES[name], file, messages.append)
    assert not verdict.passed
    assert says in "\n".join([*messages, verdict.text])


def replace_function(text: str, function: str) -> str:
    """Return a file in which this function takes the place of that of its name."""
    (new,) = ast.parse(function).body
    assert isinstance(new, ast.FunctionDef)
    (old,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == new.name
    ]
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: old.lineno - 1], function, *lines[old.end_lineno :]])


def test_each_of_these_exercises_has_five_wrong_answers() -> None:
    assert {name for name, answers in WRONG_ANSWERS.items() if len(answers) < 5} == set()


def test_the_table_lists_what_is_there() -> None:
    lessons = COURSE.root / "lessons"
    names = sorted(EXERCISES)
    assert sorted(path.parent.name for path in lessons.glob("exercises/*/exercise.py")) == names
    assert sorted(path.parent.name for path in lessons.glob("exercises/*/README.md")) == names
    assert sorted(path.stem for path in lessons.glob("solutions/*.py")) == names
    assert {exercise.lesson for exercise in EXERCISES.values()} <= {
        lesson.number for lesson in COURSE.lessons
    }
    order = [exercise.lesson for exercise in COURSE.exercises]
    assert order == sorted(order)


@every_exercise
def test_only_what_stands_above_the_check_is_solved(exercise: Exercise) -> None:
    given, solved = shipped(exercise).read_text(), COURSE.solution_file(exercise).read_text()
    assert given.count(CHECK_LINE) == solved.count(CHECK_LINE) == 1
    assert extract_check(given) == extract_check(solved)
    assert given != solved
    docstring = given.split('"""')[1]
    assert docstring == solved.split('"""')[1]
    assert docstring.startswith(f"Exercise {exercise.name}: ")
    assert f"stepladder learn check {exercise.name}" in docstring


@every_exercise
def test_it_is_short_and_only_those_of_the_last_lessons_import_stepladder(
    exercise: Exercise,
) -> None:
    for file in (shipped(exercise), COURSE.solution_file(exercise)):
        text = file.read_text()
        assert len(text.splitlines()) <= MOST_LINES
        assert "import stepladder" not in text
        assert ("from stepladder" in text) == (exercise.lesson >= 19)


@every_exercise
def test_its_page_names_its_lesson(exercise: Exercise) -> None:
    (lesson,) = (lesson for lesson in COURSE.lessons if lesson.number == exercise.lesson)
    page = (COURSE.item_folder(exercise) / "README.md").read_text()
    assert page.startswith(f"# {exercise.title}\n")
    assert f"[lesson {lesson.number}](../../{lesson.folder}/README.md)" in page


@every_exercise
def test_its_hints_go_on(exercise: Exercise) -> None:
    assert len(exercise.hints) == len(set(exercise.hints)) == 3
    assert all(len(hint) > 20 for hint in exercise.hints)


def test_what_lessons_need_is_known() -> None:
    assert {need for lesson in COURSE.lessons for need in lesson.needs} <= {"slurm"}
