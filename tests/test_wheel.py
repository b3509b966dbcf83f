"""The wheel alone: built, installed into a fresh environment outside the checkout, and used there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import stepladder
from processes import SECONDS

REPOSITORY = Path(__file__).parent.parent
LINKED_BY_LESSONS = [
    "exactness.md", "glossary.md", "lab.md", "learn.md", "preemption.md", "shard.md", "speed.md", "teaching.md", "training.md",
    "your-own-job.md",
]  # fmt: skip
PACKAGED = [
    "py.typed", "tools/probe/startup/sitecustomize.py", "tools/pages/page.html", "slurm/job.sbatch",
    "recipes/digits.py",
]  # fmt: skip


def called(
    *command: object, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command as somebody types it who has no checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=inherited | (env or {}),
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )


def done(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    result = called(*command, cwd=cwd, env=env)
    assert result.returncode == 0, (
        f"{command} ended with {result.returncode}\n{result.stdout}{result.stderr}"
    )
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a fresh environment that has the wheel.

    Its other packages are those of this environment: torch is too large to be installed once more.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # A build in the checkout would leave files there.
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("src", "packages", "lessons", "docs"):
        shutil.copytree(
            REPOSITORY / name,
            source / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    sources = source, *(path.parent for path in source.glob("packages/*/pyproject.toml"))
    done(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, *sources, cwd=folder)
    wheels = sorted(folder.glob("*.whl"))
    names = [wheel.name.split("-")[0] for wheel in wheels]
    assert names == ["slurm_lab", "stepladder", "stepladder_exchange"]
    environment = folder / "environment"
    done(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    done(*pip, "--python", environment, "install", "--no-deps", "--no-index", *wheels, cwd=folder)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(source)
    return environment / "bin"


def files_of(package: Path) -> set[Path]:
    """What belongs to it: compiled files are made where it is used."""
    files = (
        path for path in package.rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )
    return {path.relative_to(package) for path in files}


def list_links(page: Path) -> list[str]:
    """The files that a page links to."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)


@pytest.mark.slow
def test_the_wheel_has_all_that_the_package_has(installed: Path, tmp_path: Path) -> None:
    code = "import stepladder; print(stepladder.__version__, *stepladder.__path__)"
    version, result = done(installed / "python", "-c", code, cwd=tmp_path).split()
    assert Path(result).is_relative_to(installed.parent) and version == stepladder.__version__
    package = files_of(REPOSITORY / "src" / "stepladder")
    course = {Path("lessons", path) for path in files_of(REPOSITORY / "lessons")}
    assert package >= {Path(name) for name in PACKAGED}
    pictures = {
        Path("docs/pictures", path.name) for path in (REPOSITORY / "docs/pictures").glob("*.svg")
    }
    examples = {
        Path("docs/examples", path.name) for path in (REPOSITORY / "docs/examples").glob("*.py")
    }
    linked = {Path("docs", name) for name in LINKED_BY_LESSONS}
    assert files_of(Path(result)) == package | course | pictures | examples | linked
    code = "import importlib.metadata as m; print(m.version('stepladder'))"
    assert done(installed / "python", "-c", code, cwd=tmp_path).strip() == version


@pytest.mark.slow
def test_the_wheel_trains_on_two_processes(installed: Path, tmp_path: Path) -> None:
    arguments = ["train", "digits", "--nproc", 2, "--epochs", 1, "--json"]
    result = json.loads(done(installed / "stepladder", *arguments, cwd=tmp_path).splitlines()[-1])
    assert result["metrics"]["test_accuracy"] > 0.5
    assert (tmp_path / "runs" / "digits" / "result.json").is_file()


@pytest.mark.slow
def test_the_wheel_verifies_a_recipe(installed: Path, tmp_path: Path) -> None:
    last = done(installed / "stepladder", "verify", "mlp", "--json", cwd=tmp_path).splitlines()[-1]
    assert json.loads(last)["equal"] is True


@pytest.mark.slow
def test_the_wheel_looks_at_the_machine(installed: Path, tmp_path: Path) -> None:
    result = called(installed / "stepladder", "doctor", "--json", cwd=tmp_path)
    assert result.returncode in (0, 1), result.stderr  # 1: something is wrong with this machine
    assert "findings" in json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_wheel_has_the_course(installed: Path, tmp_path: Path) -> None:
    """It is read in the package, and taken where `learn start` has laid it out."""
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    learn = installed / "stepladder", "learn"
    assert "1  Processes that add" in done(*learn, cwd=tmp_path, env=env)
    shown = done(*learn, "show", 1, cwd=tmp_path, env=env)
    assert shown.startswith("first:  stepladder learn start my-course\nlesson 1: ")
    shown = done(*learn, "show", "all-reduce", cwd=tmp_path, env=env)
    assert shown.startswith("first:  stepladder learn start my-course\npage: ")
    for name in (1, "all-reduce"):
        refused = called(*learn, "check", name, cwd=tmp_path, env=env)
        assert refused.returncode == 2 and "learn start my-course" in refused.stderr
    done(*learn, "start", "mine", cwd=tmp_path, env=env)
    pages = list((tmp_path / "mine").rglob("*.md"))
    links = [(page, link) for page in pages for link in list_links(page)]
    assert [link for page, link in links if not (page.parent / link).exists()] == []
    glossary = tmp_path / "mine" / "docs" / "glossary.md"
    assert glossary in {(page.parent / link).resolve() for page, link in links}
    own_job = tmp_path / "mine" / "docs" / "your-own-job.md"
    assert "cp -r docs/examples my-job" in own_job.read_text()
    assert (own_job.parent / "examples" / "my_job.py").is_file()
    assert "01-all-reduce: passed" in done(*learn, "check", 1, cwd=tmp_path, env=env)
    exercise = tmp_path / "mine" / "all-reduce" / "exercise.py"
    shutil.copy(tmp_path / "mine/lessons/solutions/all-reduce.py", exercise)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "all-reduce: passed" in done(*learn, "check", "all-reduce", cwd=elsewhere, env=env)
    done(*learn, "start", "mine", cwd=tmp_path, env=env)
    assert (
        "all-reduce" in exercise.read_text() and "/ dist.get_world_size()" in exercise.read_text()
    )
    slides = "mine/lessons/make.py", "slides", "slides.html"
    done(installed / "python", *slides, cwd=tmp_path, env=env)
    pages = (REPOSITORY / "lessons").glob("[0-9]*/README.md")
    pictures = sum(page.read_text().count(".svg)") for page in pages)
    shown = (tmp_path / "slides.html").read_text().count("<img ")
    assert shown == 2 * pictures > 0, "each is there large, and beside its code"
    packages = installed.parent.glob("lib/python*/site-packages/stepladder/lessons")
    assert not [path for folder in packages for path in folder.rglob("runs")]
