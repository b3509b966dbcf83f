"""What mkdocs (make site) is told in mkdocs.yml by `hooks`: which files of the repository are
pages.

The Markdown files stay where they are and are read as they are. Folders and source files that they
link to become pages too, so that every link works on the site as it does in a checkout."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"
LANDING = REPOSITORY / "docs" / "index.md"
PICTURES = (".svg", ".png")
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
# A paragraph that is a link to the front page: on the site, the part that begins with its text.
INCLUDED = re.compile(r"^\[([^\]\n]+)\]\(\.\./README\.md[^)\n]*\)$", re.MULTILINE)
# A pipe in the code of a table's row, which Markdown on a repository's page needs escaped; Python's
# Markdown would show the backslash.
ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
LONG = re.compile(r"(?<=[>\s])[^<>\s\"]{24,}(?=[<\s])")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FENCE = "`" * 8
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".sh": "bash",
    ".sbatch": "bash",
    ".yml": "yaml",
    ".json": "json",
}
# Pages that are a part of another page now: the old name, and the page and heading.
MOVED = {
    "accumulation": "training/#gradient-accumulation",
    "containers": "slurm/#build-an-image",
    "data": "your-data/#shards-data-that-does-not-fit-in-memory",
    "early-stopping": "training/#early-stopping-and-the-best-snapshot",
    "fine-tuning": "use/#fine-tune-a-trained-model",
    "first-job": "cluster/#6-one-gpu",
    "from-accelerate": "from/#from-accelerate",
    "from-ddp": "from/#from-distributeddataparallel",
    "from-lightning": "from/#from-lightning",
    "from-trainer": "from/#from-hugging-faces-trainer",
    "launchers": "nodes/#mpirun-grid-engine-skypilot-runpod",
    "loggers": "report/#loggers-tensorboard-weights-and-biases-mlflow",
    "network": "debugging/#network-variables-nccl-gloo-infiniband",
    "own-cluster": "nodes/#another-batch-system-than-slurm",
    "own-logger": "report/#a-logger-of-your-own",
    "parity": "diff/#compare-one-process-with-several",
    "porting": "your-own-job/#porting-table",
    "precision": "training/#mixed-precision",
    "reproducibility": "exactness/",
    "see": "speed/",
    "sites": "slurm/#what-differs-from-site-to-site",
    "surroundings": "failures/#machines-with-limits",
    "sweep": "training/#a-hyperparameter-sweep",
}
REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}">
<title>This page has moved</title>
<h1>This page has moved</h1>
<article><a href="{0}">{0}</a></article>
</html>
"""
NOT_SHOWN = ("__pycache__", ".egg-info", ".pyc", ".ruff_cache")


def markdown_files() -> list[Path]:
    """All that are pages, in reading order."""
    lessons = REPOSITORY / "lessons"
    return [
        *sorted((REPOSITORY / "docs").glob("*.md")),
        *sorted((REPOSITORY / "docs" / "reference").glob("*.md")),
        lessons / "README.md",
        *sorted(lessons.glob("[0-9]*/README.md")),
        *sorted(lessons.glob("exercises/*/README.md")),
        REPOSITORY / "benchmarks" / "README.md",
        *sorted((REPOSITORY / "packages").glob("*/README.md")),
        REPOSITORY / "CONTRIBUTING.md",
        REPOSITORY / "CHANGELOG.md",
    ]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the lessons and the exercises to the menu of mkdocs.yml."""
    lessons = [
        {f"{lesson['number']}. {lesson['title']}": f"lessons/{lesson['folder']}/README.md"}
        for lesson in listed("ladder.toml", "lesson")
    ]
    exercises = [
        {exercise["title"]: f"lessons/exercises/{exercise['name']}/README.md"}
        for exercise in listed("exercises.toml", "exercise")
    ]
    assert config.nav is not None
    [course] = [group["Learn"] for group in config.nav if "Learn" in group]
    course += [{"Lessons": lessons}, {"Exercises": exercises}]
    return config


def listed(file: str, table: str) -> list[dict[str, Any]]:
    """Lessons or exercises, in reading order."""
    return tomllib.loads((REPOSITORY / "lessons" / file).read_text(encoding="utf-8"))[table]


def place(path: Path) -> str:
    if path in (README, LANDING):
        return "index.md"
    return path.relative_to(REPOSITORY).as_posix()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the repository's pages, and what they link to."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    shown = {}
    pages = [path for path in markdown_files() if path.is_file()]
    looks = [REPOSITORY / "docs" / name for name in ("site.css", "site.js")]
    for path in [*looks, *pages]:
        shown[place(path)] = File.generated(config, place(path), abs_src_path=str(path))
    for path in [*pages, README]:  # pages include parts of the README
        for target in targets(path.read_text(encoding="utf-8"), path.parent):
            show(target, shown, config)
    summary = File.generated(config, "llms.txt", content=llms_text(config))
    for file in (*shown.values(), *redirects(config), summary):
        files.append(file)
    return files


def llms_text(config: MkDocsConfig) -> str:
    """Return the menu as the text file that language models look for: llmstxt.org."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    assert config.nav is not None
    for group in config.nav:
        [(title, pages)] = group.items()
        if isinstance(pages, list):
            lines += ["", f"## {title}", ""]
            entries = [entry for page in pages for entry in page.items()]
            lines += [
                f"- [{name}]({address(path)})"
                for name, path in entries
                if isinstance(path, str) and path != "index.md"
            ]
    return "\n".join(lines) + "\n"


def address(path: str) -> str:
    """Return where on the site the page of a Markdown file is."""
    return path.removesuffix("README.md") if path.endswith("README.md") else f"{path[:-3]}/"


def redirects(config: MkDocsConfig) -> list[File]:
    """Return a page at each old address that leads to the new one."""
    return [
        File.generated(config, f"docs/{old}/index.html", content=REDIRECT.format(f"../{new}"))
        for old, new in MOVED.items()
    ]


def targets(text: str, folder: Path) -> list[Path]:
    """What a page in `folder` links to in the repository."""
    links = [link for link in LINK.findall(FENCED.sub("", text)) if "://" not in link]
    return [
        path for link in links if (path := (folder / link).resolve()).is_relative_to(REPOSITORY)
    ]


def page_of(path: Path) -> str:
    """Where on the site a file or folder of the repository is a page, or a picture."""
    if path.is_dir():
        path = path / ("README.md" if (path / "README.md") in markdown_files() else "index.md")
        return place(path)
    return place(path) if path.suffix in (".md", *PICTURES) else f"{place(path)}.md"


def show(path: Path, shown: dict[str, File], config: MkDocsConfig) -> None:
    """Add the page of a linked file, or of a folder: its names. Missing ones are left to mkdocs to
    report.
    """
    name = page_of(path)
    if name in shown or not path.exists() or path in [*markdown_files(), README]:
        return
    if path.suffix in (".md", *PICTURES):
        shown[name] = File.generated(config, name, abs_src_path=str(path))
        return
    body = listing(path) if path.is_dir() else code(path)
    header = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\n---\n\n# {place(path)}\n\n"
    shown[name] = File.generated(config, name, content=header + body)


def listing(path: Path) -> str:
    names = [
        f"{p.name}{'/' * p.is_dir()}"
        for p in sorted(path.iterdir())
        if not p.name.endswith(NOT_SHOWN)
    ]
    return f"{FENCE}text\n" + "\n".join(names) + f"\n{FENCE}\n"


def code(path: Path) -> str:
    language = LANGUAGES.get(path.suffix, "text")
    return f"{FENCE}{language}\n{path.read_text(encoding='utf-8')}\n{FENCE}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to folders and source files lead to their pages; parts of the front page are there."""
    if page.file.abs_src_path is None:
        return markdown
    path = Path(page.file.abs_src_path)
    if path == LANDING:
        page.meta["hide"] = ["navigation", "toc"]
    if not path.is_relative_to(REPOSITORY / "docs"):
        page.meta["search"] = {"boost": 0.5}  # a lesson's title may be the very term
    depth = "../" * page.file.src_uri.count("/")
    # Text and names of parts in turn, as re.split gives them.
    texts = INCLUDED.split(markdown)
    texts[::2] = [relink(text, path.parent, depth) for text in texts[::2]]
    texts[1::2] = [relink(find_part(name), REPOSITORY, depth) for name in texts[1::2]]
    return ROW.sub(unescape_pipes, "".join(texts))


def unescape_pipes(row: re.Match[str]) -> str:
    """Return the row of a table without backslashes before the pipes of its code."""
    return CODE.sub(lambda code: code.group().replace("\\|", "|"), row.group())


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A long word in a cell of a table may break after a mark, so that its column is not the widest."""
    return CELL.sub(lambda cell: LONG.sub(break_after_marks, cell.group()), content)


def break_after_marks(word: re.Match[str]) -> str:
    return re.sub(r"(?<=[/_:=,])(?=\w)", "<wbr>", word.group())


def find_part(name: str) -> str:
    """Return the part of the front page that begins with `name`.

    That is a section by its heading; or a paragraph, with the picture or the block that follows it.
    """
    start = re.escape(name)
    section = rf"^## {start}.*?(?=\n## |\Z)"
    paragraph = rf"^{start}.*?(?=\n\n(?!!\[|<!-- run)|\Z)"
    found = re.search(
        f"{section}|{paragraph}", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    if not found:
        raise ValueError(f"the front page has no part that begins with {name!r}")
    return found.group()


def relink(markdown: str, folder: Path, depth: str) -> str:
    """Let links of a text in `folder` lead to the pages of folders and source files."""

    def link(found: re.Match[str]) -> str:
        path = (folder / found[1]).resolve()
        if "://" in found[1] or not path.is_relative_to(REPOSITORY) or not path.exists():
            return found[1]
        return depth + page_of(path)

    return LINK.sub(link, markdown)
