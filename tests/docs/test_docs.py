"""The pages are true: links lead somewhere, blocks run or say why not, keys and rooms are those of
the code.
"""

from __future__ import annotations

import json
import re
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import stepladder
from pages import PAGES, REPOSITORY, blocks, documented_keys, run_blocks

SOURCE = REPOSITORY / "src" / "stepladder"
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"

PATH_IN_TEXT = re.compile(
    r"(?<![\w./-])(?:src|tests|docs|lessons|benchmarks|slurm|docker)/[\w./-]*\w"
)
# Pages that name files of the past, and of other repositories.
OTHER_PATHS = {"docs/log.md", "docs/log-archive.md", "docs/checked-scripts.md"}
# By test_your_own_job.py and test_readme.py
RUN_ELSEWHERE = {REPOSITORY / "docs" / "your-own-job.md", REPOSITORY / "README.md"}


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def pages_with(mark: str) -> list[Any]:
    """All but the README's, which test_readme.py runs."""
    return [
        pytest.param(page, id=name_of(page), marks=pytest.mark.slow)
        for page in PAGES
        if page not in RUN_ELSEWHERE and any(block.mark == mark for block in blocks(page))
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing, f"{page.name} links to {missing}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if name_of(page) not in OTHER_PATHS], ids=name_of
)
def test_paths_in_the_text_exist(page: Path) -> None:
    """Those that begin with a folder of the repository; placeholders have no such form."""
    found = PATH_IN_TEXT.findall(page.read_text())
    missing = [
        path
        for path in found
        if not (REPOSITORY / path).exists() and not (page.parent / path).exists()
    ]
    assert not missing, f"{page.name} names {missing}"


def rows_of_failures() -> dict[str, str]:
    """By kind: the last cell, which names the tests."""
    tables = (
        (REPOSITORY / "docs" / "failures.md")
        .read_text()
        .split("| kind | what happens | test |\n")[1:]
    )
    rows = [
        line.strip("| ").split(" | ")
        for table in tables
        for line in table.partition("\n\n")[0].splitlines()[1:]
    ]
    return {row[0]: row[-1] for row in rows}


@pytest.mark.parametrize("kind", rows_of_failures())
def test_each_kind_of_failure_names_a_test_that_is_there(kind: str) -> None:
    cell = rows_of_failures()[kind]
    named = re.findall(r"`([^`]+)::([^`]+)`", cell)
    assert named or cell == "not planted"
    for file, test in named:
        assert re.search(rf"^def {test}\(", (REPOSITORY / file).read_text(), re.MULTILINE), (
            f"{file}::{test}"
        )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("bash", "python", "diff", "text"), (
            f"{block} has language {block.language!r}"
        )
        assert block.mark or block.language in ("diff", "text"), (
            f"{block}: nothing above says if it is run"
        )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_that_is_copied_from_a_file_is_there(page: Path) -> None:
    for block in blocks(page):
        if block.mark.startswith("copied from "):
            file = REPOSITORY / block.mark.removeprefix("copied from ")
            assert block.text in file.read_text(), f"{block} is not in {file.name}"


SEARCHES = (
    "fault tolerance",
    "reproducibility",
    "bitwise",
    "silent data corruption",
    "gradient accumulation",
    "learning-rate schedule",
    "fine-tuning",
    "hyperparameter",
    "sweep",
    "job array",
    "FAQ",
    "quickstart",
    "mixed precision",
    "early stopping",
    "tensor parallel",
    "Kubernetes",
    "reinforcement learning",
)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_finds_a_page_of_the_menu(search: str) -> None:
    menu = re.findall(r"(docs/[\w/-]+\.md)", (REPOSITORY / "mkdocs.yml").read_text())
    term = search.lower().replace("-", " ")
    texts = [(REPOSITORY / page).read_text().lower().replace("-", " ") for page in menu]
    assert any(term in text for text in texts)


def test_the_citation_names_the_newest_release_and_the_package_itself_or_the_next_one() -> None:
    citation = (REPOSITORY / "CITATION.cff").read_text()
    headings = re.findall(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    releases = [heading for heading in headings if heading[0].isdigit()]
    assert f"\nversion: {releases[0]}\n" in citation
    is_released = headings[0] == releases[0]
    assert (stepladder.__version__ == releases[0]) == is_released
    assert stepladder.__version__.endswith(".dev0") != is_released
    assert (REPOSITORY / "LICENSE").read_text().startswith("MIT") and "\nlicense: MIT\n" in citation


def test_a_run_directory_holds_one_run_on_all_pages() -> None:
    """Else the next page's command, typed where the last one's was, is refused or finds its run
    finished.
    """
    defining = (
        "--sync",
        "--global-batch",
        "--microbatch",
        "--lr",
        "--epochs",
        "--steps",
        "--task",
        "--init-from",
    )
    shells = [
        block.text.replace("\\\n", " ")
        for page in PAGES
        for block in blocks(page)
        if block.language == "bash"
    ]
    runs: dict[str, set[tuple[str, ...]]] = {}
    for words in map(str.split, "".join(shells).splitlines()):
        if "--run-dir" in words and "train" in words:
            given = (f"{a} {b}" for a, b in pairwise(words) if a in ("train", *defining))
            runs.setdefault(words[words.index("--run-dir") + 1], set()).add(tuple(sorted(given)))
    assert len(runs) > 10
    assert not {
        folder: jobs for folder, jobs in runs.items() if len(jobs) > 1 and folder != "/shared/run"
    }


def test_pages_are_short() -> None:
    """Not counted: the log, the reference, diffs, and what is generated."""
    limits = {  # in words, which no wrapping of lines changes
        "README.md": 900,
        # Each is several pages in one, so that a reader need not follow links in the middle of a job.
        "docs/your-data.md": 2850,
        "docs/architecture.md": 2800,
        "docs/debugging.md": 2700,
        "docs/slurm.md": 2600,
        "docs/exactness.md": 2600,
        "docs/failures.md": 2400,
        "docs/diff.md": 2200,
        "benchmarks/README.md": 2200,
        "docs/shard.md": 2100,
        "docs/speed.md": 2050,
        "docs/check.md": 2050,
        "docs/exchange.md": 1950,
        "docs/json.md": 2750,  # a table per command
        "CHANGELOG.md": 9500,  # a line per behaviour, and nobody reads it whole
    }
    for page in PAGES:
        if page.stem not in ("log", "log-archive") and page.parent.name != "reference":
            written = re.sub(
                r"<!-- generated.*?<!-- end -->|```diff.*?```",
                "",
                page.read_text(),
                flags=re.DOTALL,
            )
            assert len(written.split()) <= limits.get(name_of(page), 1900), page


def test_the_log_has_decisions_and_the_archive_is_not_searched() -> None:
    log, archive = (REPOSITORY / "docs" / f"{name}.md" for name in ("log", "log-archive"))
    assert len(log.read_text().split()) <= 6000
    assert archive.read_text().startswith("---\nsearch:\n  exclude: true\n---\n")


@pytest.mark.every_case
@pytest.mark.ranks
@pytest.mark.parametrize("page", pages_with("run"))
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    run_blocks(page, "run", tmp_path)


@pytest.mark.every_case
@pytest.mark.ranks
@pytest.mark.parametrize("page", pages_with("run with MNIST"))
def test_blocks_run_with_mnist(page: Path, tmp_path: Path, mnist_dir: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mnist").symlink_to(mnist_dir)
    run_blocks(page, "run with MNIST", tmp_path)


def read_menu() -> dict[str, list[str]]:
    """Return the pages of each group of the site's menu."""
    menu = (REPOSITORY / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    groups = re.split(r"^  - (.+):$", menu, flags=re.MULTILINE)[1:]
    return {
        name: re.findall(r": ([\w/-]+\.md)$", entries, re.MULTILINE)
        for name, entries in zip(groups[::2], groups[1::2], strict=True)
    }


def test_the_menu_has_every_page_of_docs_but_those_that_are_no_task() -> None:
    shown = {Path(page).stem for pages in read_menu().values() for page in pages}
    pages = {page.stem for page in (REPOSITORY / "docs").glob("*.md")}
    assert pages - shown == {"language-model", "lineage", "log-archive"}


def test_the_menu_has_few_pages_for_users_in_its_groups() -> None:
    groups = read_menu()
    user_groups = ["Start", "Convert", "Cluster", "Debug", "Speed and memory"]
    assert list(groups) == [*user_groups, "Learn", "Reference", "Internals"]
    assert sum(len(groups[name]) for name in user_groups) <= 22


def test_make_and_ci_have_the_readme_s_targets() -> None:
    """`make demo` and `make test` are run by .ci/run, not by themselves."""
    asked = set(re.findall(r"^make ([\w-]+)", (REPOSITORY / "README.md").read_text(), re.MULTILINE))
    assert asked == {"demo", "test"}
    assert asked <= set(re.findall(r"[\w-]+", (REPOSITORY / ".ci" / "run").read_text()))
    assert asked <= set(
        re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    )


def test_the_architecture_page_shows_every_package_and_no_other() -> None:
    rooms = {
        path.name + "/" * path.is_dir() for path in SOURCE.iterdir() if path.suffix in ("", ".py")
    }
    rooms -= {"__init__.py", "__main__.py", "__pycache__/"}
    section = ARCHITECTURE.read_text().split("## Packages and layers")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    shown = {name for line in table for name in re.findall(r"`([\w/.]+)`", line.split("|")[1])}
    assert shown == rooms


CHANGES = (
    "a logger",
    "a launcher or a cluster whose variables are read",
    "a rule of `check`",
    "a relation of `check`",
    "a kind of job that `--sync exact` must hold or refuse",
    "a rung of `convert`",
    "a cause of `parity`",
    "a rule of `doctor` or of `submit --lint`",
    "a collective that memory carries",
    "a sharding variant",
    "a data source",
    "a cluster",
    "an error message",
    "a metric",
    "a flag of `train`",
    "a lesson",
    "a benchmark",
)


def test_the_architecture_page_names_the_files_of_each_change() -> None:
    section = ARCHITECTURE.read_text().split("## Where do I change ...?")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| a")]
    assert [name.strip() for name, _ in rows] == list(CHANGES)
    for name, files in rows:
        paths = [text for text in re.findall(r"`([^`]+)`", files) if "/" in text]
        assert len(paths) >= 2, name
        assert [path for path in paths if not (REPOSITORY / path).exists()] == [], name


@pytest.mark.parametrize("name", ["commands.md", "errors.md", "check-rules.md", "python.md"])
def test_the_reference_is_what_the_code_says(name: str) -> None:
    """And so it has every flag and every public name. After a change: python
    docs/reference/regenerate.py
    """
    folder = REPOSITORY / "docs" / "reference"
    made = runpy.run_path(str(folder / "regenerate.py"))["pages"]()
    assert made[name] == (folder / name).read_text()


def test_the_page_of_the_python_package_has_every_public_name() -> None:
    page = (REPOSITORY / "docs" / "reference" / "python.md").read_text()
    names = re.findall(r"^<!-- made from stepladder\.(\w+) -->$", page, re.MULTILINE)
    assert sorted(names) == sorted(set(stepladder.__all__) - {"__version__"})


def last_object(stdout: str) -> dict[str, Any]:
    return json.loads(stdout.strip().splitlines()[-1])


def test_keys_of_train_and_audit_are_those_of_the_page(stepladder: Any) -> None:
    trained = stepladder("train", "mlp", "--steps", 2, "--json")
    assert last_object(trained.stdout).keys() == documented_keys("train"), trained.stderr
    found = last_object(stepladder("audit", "runs/mlp", "--json").stdout)
    assert found.keys() == documented_keys("audit")
    assert found["epochs"][0].keys() == {"epoch", "lost", "repeated", "never_seen"}


def test_keys_of_data_are_those_of_the_page(stepladder: Any, mnist_dir: Path) -> None:
    got = stepladder("data", "get", "mnist", "--from", mnist_dir, "--json")
    assert last_object(got.stdout).keys() == documented_keys("data get"), got.stderr
    keys = last_object(stepladder("data", "info", "mnist", "--json").stdout).keys()
    ratings = {"rows", "users", "items"}
    sharded = last_object(stepladder("data", "shard", "data/mnist", "--out", "s", "--json").stdout)
    assert last_object(stepladder("data", "info", "s", "--json").stdout) == sharded
    assert keys | ratings | sharded.keys() == documented_keys("data info")
