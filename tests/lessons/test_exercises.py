"""Each exercise fails as shipped, for the reason that is stated, and passes with its solution."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepladder.tools.learn import check
from stepladder.tools.learn.check import check_exercise
from stepladder.tools.learn.course import CHECK_LINE, Exercise, extract_check, load_course
from warm import Server

COURSE = load_course()
EXERCISES = {exercise.name: exercise for exercise in COURSE.exercises}
QUICK = ("save-by-local-rank",)
MOST_LINES = 90
ANSWERS_OF_EACH = 2  # wrong ones that are checked each time; `make corpus` checks all of them
WRONG_ANSWERS: dict[str, list[dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("wrong_answers.toml").read_text()
)

every_exercise = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
run_exercises = pytest.mark.parametrize(
    "exercise",
    [
        pytest.param(e, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, e in EXERCISES.items()
    ],
)


def shipped(exercise: Exercise) -> Path:
    return COURSE.get_item_folder(exercise) / "exercise.py"


@pytest.fixture(scope="session")
def server() -> Server:
    """Forks Python as `learn check` starts it."""
    return Server(given={"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"})


@pytest.fixture
def warm_python(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(server.commands() / "python"))
    # What the server forks is not below the process that waits for it: that one only sleeps.
    monkeypatch.setattr(check, "HANG_TIMEOUT_S", None)


@pytest.mark.slow
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
    verdict = check_exercise(COURSE, exercise, COURSE.get_solution_file(exercise), print)
    assert verdict.passed, verdict.text


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        pytest.param(
            name,
            answer,
            id=f"{name}-{number}",
            marks=pytest.mark.corpus if number > ANSWERS_OF_EACH else (),
        )
        for name, answers in WRONG_ANSWERS.items()
        for number, answer in enumerate(answers, start=1)
    ],
)
def test_a_typical_wrong_answer_is_rejected(
    name: str, answer: dict[str, Any], tmp_path: Path
) -> None:
    exercise = EXERCISES[name]
    file = tmp_path / "exercise.py"
    file.write_text(answer_wrongly(exercise, answer))
    messages: list[str] = []
    verdict = check_exercise(COURSE, exercise, file, messages.append)
    assert not verdict.passed
    assert answer["says"] in "\n".join([*messages, verdict.text])


def answer_wrongly(exercise: Exercise, answer: dict[str, Any]) -> str:
    """Return the learner's file with a wrong answer of the table."""
    is_shipped = answer.get("shipped", False)
    path = shipped(exercise) if is_shipped else COURSE.get_solution_file(exercise)
    text = path.read_text()
    if "old" in answer:
        assert answer["old"] in text
        return text.replace(answer["old"], answer["new"], 1)
    return replace_definition(text, answer["answer"])


def replace_definition(text: str, definition: str) -> str:
    """Return a file in which these lines take the place of what they define first."""
    name = get_name(ast.parse(definition).body[0])
    (old,) = [node for node in ast.parse(text).body if get_name(node) == name]
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: old.lineno - 1], definition, *lines[old.end_lineno :]])


def get_name(node: ast.stmt) -> str | None:
    return node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else None


def test_each_exercise_has_five_wrong_answers() -> None:
    assert [name for name in EXERCISES if len(WRONG_ANSWERS.get(name, ())) < 5] == []


@every_exercise
def test_the_wrong_answers_change_its_solution(exercise: Exercise) -> None:
    solution = COURSE.get_solution_file(exercise).read_text()
    texts = [answer_wrongly(exercise, answer) for answer in WRONG_ANSWERS[exercise.name]]
    assert solution not in texts
    assert len(set(texts)) == len(texts)
    assert {extract_check(text) for text in texts} == {extract_check(solution)}


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
    given = shipped(exercise).read_text()
    solved = COURSE.get_solution_file(exercise).read_text()
    assert given.count(CHECK_LINE) == solved.count(CHECK_LINE) == 1
    assert extract_check(given) == extract_check(solved)
    assert given != solved
    docstring = given.split('"""')[1]
    assert docstring == solved.split('"""')[1]
    assert docstring.startswith(f"Exercise {exercise.name}: ")
    assert f"stepladder learn check {exercise.name}" in docstring


@every_exercise
def test_it_is_short_and_only_those_of_lesson_19_import_stepladder(exercise: Exercise) -> None:
    for file in (shipped(exercise), COURSE.get_solution_file(exercise)):
        text = file.read_text()
        assert len(text.splitlines()) <= MOST_LINES
        assert "import stepladder" not in text
        assert ("from stepladder" in text) == (exercise.lesson == 19)


@every_exercise
def test_its_page_names_its_lesson(exercise: Exercise) -> None:
    (lesson,) = (lesson for lesson in COURSE.lessons if lesson.number == exercise.lesson)
    page = (COURSE.get_item_folder(exercise) / "README.md").read_text()
    assert page.startswith(f"# {exercise.title}\n")
    assert f"[lesson {lesson.number}](../../{lesson.folder}/README.md)" in page


@every_exercise
def test_its_hints_go_on(exercise: Exercise) -> None:
    assert len(exercise.hints) == len(set(exercise.hints)) == 3
    assert all(len(hint) > 20 for hint in exercise.hints)


def test_what_lessons_need_is_known() -> None:
    assert {need for lesson in COURSE.lessons for need in lesson.needs} <= {"slurm"}
