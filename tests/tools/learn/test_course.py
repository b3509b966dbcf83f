"""The course as its two tables list it, and the learner's progress."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import stepladder
from courses import write_course
from stepladder.core import folders
from stepladder.core.errors import InputError
from stepladder.tools.learn.course import Course, CourseProgress, load_course, load_progress


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    monkeypatch.chdir(write_course(tmp_path / "checkout"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return load_course()


def test_a_folder_below_is_in_the_checkout_too(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(course.get_item_folder(course.lessons[0]))
    assert load_course() == course


def test_lessons_come_with_their_exercises(course: Course) -> None:
    assert [item.key for item in course] == ["01-first", "add", "02-second", "stop"]


@pytest.mark.parametrize(
    ("name", "key"),
    [("1", "01-first"), ("01", "01-first"), ("02-second", "02-second"), ("add", "add")],
)
def test_names_that_are_found(course: Course, name: str, key: str) -> None:
    assert course.find_item(name).key == key


@pytest.mark.parametrize(("name", "hint"), [("3", "learn$"), ("ad", "show add"), ("²", "learn$")])
def test_names_that_are_not(course: Course, name: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"'{name}' is neither a lesson.*HINT: .*{hint}"):
        course.find_item(name)


def test_a_lesson_is_no_exercise(course: Course) -> None:
    with pytest.raises(InputError, match="its exercises: add"):
        course.find_exercise("1")


def test_a_damaged_table_is_named(course: Course) -> None:
    ladder = course.root / "lessons" / "ladder.toml"
    ladder.write_text("[[lesson]\n")
    with pytest.raises(InputError, match=r"ladder.toml is damaged.*HINT: git checkout"):
        load_course()


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 10_000, "lesson = 5", "lesson = [5]", "[[lesson]]", "\xff"]
)
def test_a_table_of_another_shape_is_named(course: Course, text: str) -> None:
    (course.root / "lessons" / "ladder.toml").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"ladder.toml is damaged.*HINT: git checkout"):
        load_course()


def test_progress_is_what_was_saved(course: Course, tmp_path: Path) -> None:
    progress = load_progress()
    assert progress.passed == set()
    progress.passed.add("add")
    progress.hints["stop"] = 1
    progress.folder = tmp_path / "mine"
    progress.save()
    assert load_progress() == progress
    assert [path.name for path in progress.file.parent.iterdir()] == ["learn.json"]


def test_progress_is_in_the_home_without_xdg(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_progress().file == tmp_path / ".local" / "state" / "stepladder" / "learn.json"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[]",
            "[" * 10_000,
            json.dumps({"schema": 2}),
            '{"passed": [[]]}',
            '{"hints": {"add": "x"}}',
        ),
        *('{"folder": 5}', '{"hints": {"add": NaN}}', f'{{"passed": {"9" * 5000}}}'),
    ],
)
def test_a_damaged_progress_file_is_named(course: Course, text: str) -> None:
    load_progress().save()
    file = load_progress().file
    file.write_text(text)
    with pytest.raises(InputError, match=r"learn.json cannot be used.*HINT: rm "):
        load_progress()


def test_progress_that_cannot_be_written(
    course: Course, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot be written.*HINT: XDG_STATE_HOME"):
        CourseProgress().save()


def test_exercises_are_edited_in_place_until_they_are_copied(
    course: Course, tmp_path: Path
) -> None:
    add = course.find_exercise("add")
    progress = load_progress()
    copies = tmp_path / "copies"
    shipped = course.get_item_folder(add) / "exercise.py"
    assert progress.exercise_file(course, add) == shipped
    assert progress.copy_exercises(course, copies) == (2, 0)
    copy = load_progress().exercise_file(course, add)
    assert copy == copies / "add" / "exercise.py"
    assert copy.read_bytes() == shipped.read_bytes()
    assert sorted(path.name for path in copies.iterdir()) == ["add", "stop"], "and no solution"


def test_what_was_edited_is_kept(course: Course, tmp_path: Path) -> None:
    progress = load_progress()
    copies = tmp_path / "copies"
    progress.copy_exercises(course, copies)
    edited = copies / "add" / "exercise.py"
    removed = copies / "stop" / "exercise.py"
    edited.write_text("mine")
    removed.unlink()
    with pytest.raises(
        InputError, match=r"stop/exercise.py does not exist. HINT: stepladder learn start"
    ):
        progress.exercise_file(course, course.find_exercise("stop"))
    assert progress.copy_exercises(course, copies) == (1, 1)
    assert edited.read_text() == "mine"


def test_a_folder_that_cannot_be_written(course: Course, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file cannot be written: Not a directory"):
        load_progress().copy_exercises(course, tmp_path / "file")
    assert not load_progress().file.exists(), "nothing is made where the input is refused"


def test_a_file_in_the_place_of_an_exercise_is_named(course: Course, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "add").touch()
    with pytest.raises(InputError, match=r"mine/add cannot be written: Not a directory"):
        load_progress().lay_out(course, mine)
    assert [path.name for path in mine.iterdir()] == ["add"]


def test_a_folder_of_somebody_else_is_not_mixed_with_the_lessons(
    course: Course, tmp_path: Path
) -> None:
    (tmp_path / "mine" / "lessons").mkdir(parents=True)
    with pytest.raises(InputError, match=r"mine/lessons is not of this course. HINT: name another"):
        load_progress().lay_out(course, tmp_path / "mine")
    assert [*(tmp_path / "mine").rglob("*")] == [tmp_path / "mine" / "lessons"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission(course: Course, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(InputError, match=r"closed cannot be written: Permission denied"):
        load_progress().copy_exercises(course, closed / "x")
    assert not load_progress().file.exists()


def test_the_page_of_an_exercise_links_the_file_that_is_checked(
    course: Course, tmp_path: Path
) -> None:
    progress = load_progress()
    progress.lay_out(course, tmp_path / "mine")
    progress.copy_exercises(course, tmp_path / "mine")
    for exercise in course.exercises:
        page = tmp_path / "mine" / "lessons" / "exercises" / exercise.name / "README.md"
        [link] = re.findall(r"\[exercise.py\]\(([^)]+)\)", page.read_text())
        assert (page.parent / link).resolve() == progress.exercise_file(course, exercise)


def test_the_checkout_that_runs_is_trusted_as_its_code_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a umask of 002 a group may write it, as whoever cloned it has it."""
    root = Path(stepladder.__file__).parents[2]
    monkeypatch.chdir(root / "lessons" / "exercises")
    monkeypatch.setattr(
        folders, "validate_ownership", lambda path: pytest.fail(f"{path} is asked for")
    )
    assert load_course().root == root
