"""Slides and notebooks of the lessons' own files."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from browsers import check_readable, needs_browser, open_tab
from notebooks import connect_by_files
from pages import LESSONS
from processes import refused
from warm import SERVER

RUN_NOTEBOOKS = (1, 2, 4, 20)  # a lesson's own test runs its file


def make(*args: object) -> str:
    """Return what it has printed."""
    command = [sys.executable, LESSONS / "make.py", *args]
    return subprocess.run(
        list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.mark.parametrize(("action", "path"), [("slides", "/proc/x.html"), ("notebooks", "/proc/x")])
def test_a_path_that_cannot_be_written_is_one_line(action: str, path: str) -> None:
    if action == "slides":
        pytest.importorskip("markdown")
    command = [sys.executable, str(LESSONS / "make.py"), action, path]
    done = subprocess.run(command, capture_output=True, text=True)
    refused(done, f"error: {path}", "cannot be written: No such file or directory", "HINT: ")


@pytest.mark.parametrize(("action", "name"), [("slides", "mine.html"), ("notebooks", "")])
def test_a_file_of_the_users_is_not_replaced(action: str, name: str, tmp_path: Path) -> None:
    if action == "slides":
        pytest.importorskip("markdown")
        mine = tmp_path / name
    else:
        assert "written: " in make(action, tmp_path)
        mine = min(tmp_path.glob("*.ipynb"))
        assert "written: " in make(action, tmp_path), "those that nobody has changed are no others"
    mine.write_text("mine")
    command = [sys.executable, str(LESSONS / "make.py"), action, str(tmp_path / name)]
    refused(subprocess.run(command, capture_output=True, text=True), f"{mine} is there already")
    assert mine.read_text() == "mine"


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("markdown")
    path = tmp_path_factory.mktemp("slides") / "slides.html"
    assert make("slides", path) == f"written: {path}\n"
    return path


def test_each_lesson_has_slides_with_its_claim(slides: Path) -> None:
    text = slides.read_text()
    folders = sorted(path.parent for path in LESSONS.glob("[0-9]*/lesson.py"))
    numbers = [int(number) for number in re.findall(r'<section id="lesson-(\d+)"', text)]
    assert numbers == list(range(1, len(folders) + 1))
    assert text.count("claim holds: ") >= len(folders)
    shown = html.unescape(text)
    for folder in folders:
        printed = re.search(r"```text\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
        missing = [line for line in printed[1].splitlines() if line not in shown]
        assert not missing, f"{folder.name}: no line of the output is left out"
    assert text.count('src="data:image/svg+xml;base64,') >= 12
    assert re.findall(r'href="(?!#|https://)[^"]*"', text) == [], "nothing leads out of the file"
    assert "<!--" not in text and "generated:" not in text


def test_slides_of_one_lesson(tmp_path: Path) -> None:
    pytest.importorskip("markdown")
    make("slides", tmp_path / "4.html", 4)
    text = (tmp_path / "4.html").read_text()
    assert re.findall(r'id="lesson-(\d+)"', text) == ["4"]
    assert "<nav>" not in text, "no contents of one lesson"
    command = [sys.executable, LESSONS / "make.py", "slides", tmp_path / "x.html", "99"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    refused(done, "error: 99 is no number of a lesson", "HINT: a number from 1 to 24")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.slow
@needs_browser
def test_slides_are_readable_in_a_browser(slides: Path, tmp_path: Path) -> None:
    check_readable(slides, tmp_path)
    with open_tab(slides.as_uri(), tmp_path) as tab:
        for size in ((1280, 720), (1920, 1080)):  # of projectors
            tab.set_size(*size)
            sections = "[...document.querySelectorAll('section')]"
            tall = tab.evaluate(
                f"{sections}.filter(part => part.offsetHeight > innerHeight).map(part => part.innerText)"
            )
            assert tall == [], size
            letters = "part => parseFloat(getComputedStyle(part).fontSize)"
            texts = "[...document.querySelectorAll('p, section > ul > li, pre, code, td')]"
            smallest = min(tab.evaluate(f"{texts}.map({letters})"))
            assert smallest >= 24 * size[1] / 540, "24 points, where a slide is 540 points high"


@pytest.mark.slow
@pytest.mark.ranks
def test_the_notebooks_run_and_reach_the_claim(tmp_path: Path, short_folder: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    written = make("notebooks", tmp_path)
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    # What a cell starts is forked from a process that has imported torch.
    warm = f"import sys\nsys.executable = {str(SERVER.commands() / 'python')!r}\n"
    (startup / "warm.py").write_text(warm)
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    paths = sorted(tmp_path.glob("*.ipynb"))
    numbers = [int(path.stem[:2]) for path in paths]
    assert numbers == [*range(1, 10), *range(19, 24)]
    files = sorted(set(tmp_path.iterdir()) - {tmp_path / "ipython"})
    assert set(written.splitlines()) == {f"written: {path}" for path in files}
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", notebook.cells[0].source)
        assert all((tmp_path / picture).is_file() for picture in pictures)
        assert len(pictures) == (LESSONS / path.stem / "README.md").read_text().count(".svg)")
        assert "claim holds: " in notebook.cells[3].outputs[0].text, "the output is shown unrun"
        if int(path.stem[:2]) not in RUN_NOTEBOOKS:
            continue
        resources = {"metadata": {"path": str(tmp_path)}}
        client = nbclient.NotebookClient(
            notebook, config=connect_by_files(short_folder), timeout=300, resources=resources
        )
        client.execute(env=env)
        printed = "".join(
            output.get("text", "")
            for cell in notebook.cells
            if cell.cell_type == "code"
            for output in cell.outputs
        )
        assert "claim holds: " in printed, path.name


def test_a_flag_is_no_name_of_a_handout(tmp_path: Path) -> None:
    make = Path(__file__).parents[2] / "lessons/make.py"
    command = [sys.executable, make, "slides", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
