"""The documentation site, built as `make site` does and looked at in a browser, at the width of a
screen and of a phone, light and dark; and its search.
"""

from __future__ import annotations

import html
import json
import queue
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psutil
import pytest

from browsers import BROWSER, CONTRAST, STOP, WIDTHS, needs_browser, open_tab
from pages import blocks
from processes import SECONDS, wait_until

REPOSITORY = Path(__file__).parents[2]
LOOK = Path(__file__).parent / "browser.html"
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

# Which page explains each term: the first that a search of it shows.
EXPLAINED = {
    "gradient accumulation": "training",
    "learning-rate schedule": "training",
    "mixed precision": "training",
    "early stopping": "training",
    "hyperparameter": "training",
    "sweep": "training",
    "job array": "training",
    "fine-tuning": "use",
    "reproducibility": "exactness",
    "bitwise": "exactness",
    "silent data corruption": "corruption",
    "fault tolerance": "failures",
    "quickstart": "cluster",
    "FAQ": "faq",
    "Kubernetes": "faq",
}

pytestmark = pytest.mark.slow
Pages = dict[str, dict[str, Any]]


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--config-file",
            source / "mkdocs.yml",
            "-d",
            site,
        ],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    built = build(REPOSITORY, site)
    assert built.returncode == 0, built.stderr
    return site


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, and the page that looks at all others."""

    def __init__(self, *args: Any, site: Path, answers: queue.Queue[dict[str, Any]]) -> None:
        self.site = site
        self.answers = answers
        super().__init__(*args, directory=str(site))

    def do_GET(self) -> None:
        if self.path == "/-/look":
            self.answer(LOOK.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/-/contrast.js":
            self.answer(CONTRAST.read_bytes(), "text/javascript")
        elif self.path == "/-/pages":
            self.answer(json.dumps(self.pages()).encode(), "application/json")
        elif self.path == "/-/searches":
            self.answer(json.dumps(list(EXPLAINED)).encode(), "application/json")
        elif self.path.endswith("/search_index.json"):
            # Each page would build the index of the whole site.
            body = b'{"config": {"lang": ["en"], "separator": " "}, "docs": []}'
            self.answer(body, "application/json")
        else:
            self.answers.put({})  # a sign of life: how long all pages take depends on the machine
            super().do_GET()

    def pages(self) -> list[str]:
        folders = (
            path.parent.relative_to(self.site)
            for path in self.site.rglob("index.html")
            if 'http-equiv="refresh"' not in path.read_text()  # an old address leads elsewhere
        )
        return [page.replace("/./", "/") for page in sorted(f"/{f.as_posix()}/" for f in folders)]

    def do_POST(self) -> None:
        self.answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(b"", "text/plain")

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving(site: Path, answers: queue.Queue[dict[str, Any]]) -> Iterator[str]:
    """The site over HTTP, with the page that looks at all others."""
    handler = partial(Handler, site=site, answers=answers)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def browsed(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the browser saw: the pages, and the results of searches."""
    if BROWSER is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    profile = tmp_path_factory.mktemp("profile")
    with serving(site, answers) as address, (profile / "stderr").open("w") as stderr:
        browser = subprocess.Popen(
            [
                BROWSER,
                *QUIET,
                f"--user-data-dir={profile}",
                "--remote-debugging-port=0",
                f"{address}/-/look",
            ],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        family = psutil.Process(browser.pid)
        try:
            while not (answer := answers.get(timeout=SECONDS)):
                pass
            assert "error" not in answer, answer
            return answer
        except queue.Empty:
            pytest.fail(f"the browser gave no answer:\n{(profile / 'stderr').read_text()[-2000:]}")
        finally:
            members = [*family.children(recursive=True), family]
            for member in members:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            browser.wait()
            psutil.wait_procs(members, SECONDS)


@pytest.fixture(scope="module")
def rendered_pages(browsed: dict[str, Any]) -> Pages:
    """Every page as the browser saw it, by its path."""
    return browsed["pages"]


def origin(rendered_pages: Pages) -> str:
    parts = urlsplit(next(iter(rendered_pages.values()))["fetched"][0])
    return f"{parts.scheme}://{parts.netloc}/"


def test_every_page_has_a_heading_and_its_pictures(rendered_pages: Pages) -> None:
    assert {"/", "/docs/architecture/", "/lessons/", "/benchmarks/"} <= rendered_pages.keys()
    assert not [page for page, facts in rendered_pages.items() if not facts["heading"]]
    missing = {
        p: [src for src, there in facts["pictures"] if not there]
        for p, facts in rendered_pages.items()
    }
    assert not {page: sources for page, sources in missing.items() if sources}


def test_every_link_leads_somewhere(rendered_pages: Pages, site: Path) -> None:
    here = origin(rendered_pages)
    broken = []
    for page, facts in rendered_pages.items():
        for link in facts["links"]:
            if not link.startswith(here):
                continue
            parts = urlsplit(link)
            target = unquote(parts.path)
            name = unquote(parts.fragment)
            there = target in rendered_pages or (site / target.lstrip("/")).is_file()
            if not there or (
                name and target in rendered_pages and name not in rendered_pages[target]["names"]
            ):
                broken.append(f"{page} -> {link}")
    assert not broken


def test_old_addresses_lead_to_a_page_and_a_heading(rendered_pages: Pages, site: Path) -> None:
    moved = runpy.run_path(str(REPOSITORY / "docs" / "site.py"))["MOVED"]
    for old, new in moved.items():
        page, _, heading = new.partition("#")
        assert f"url=../{new}" in (site / "docs" / old / "index.html").read_text()
        assert f"/docs/{page}" in rendered_pages and (
            not heading or heading in rendered_pages[f"/docs/{page}"]["names"]
        )


def test_the_site_has_a_summary_for_language_models(rendered_pages: Pages, site: Path) -> None:
    links = re.findall(r"^- \[.+\]\((.+)\)$", (site / "llms.txt").read_text(), re.MULTILINE)
    assert len(links) > 30
    assert not [link for link in links if f"/{link}" not in rendered_pages]


def test_a_search_shows_the_page_that_explains_a_term_first(browsed: dict[str, Any]) -> None:
    first = {term: results[0] for term, results in browsed["searches"].items()}
    assert first == {term: f"docs/{page}/" for term, page in EXPLAINED.items()}


def test_the_landing_page_has_what_the_doors_of_the_readme_print(site: Path) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "index.html").read_text()))
    doors = [block for block in blocks(REPOSITORY / "README.md") if block.output]
    assert len(doors) == 3
    missing = [line for door in doors for line in door.output.splitlines() if line not in text]
    assert not missing


def test_the_code_in_a_table_has_no_backslash_before_a_pipe(site: Path) -> None:
    """Markdown on a repository's page needs one there, and shows none."""
    code = {
        page.relative_to(site): re.findall(r"<code>[^<]*\\\|[^<]*</code>", page.read_text())
        for page in site.rglob("*.html")
    }
    assert not {page: found for page, found in code.items() if found}
    assert "<code>--nproc N|A:B|auto|gpu|cpu</code>" in (
        (site / "docs/reference/commands/index.html").read_text()
    )


def test_nothing_comes_from_elsewhere(rendered_pages: Pages) -> None:
    here = origin(rendered_pages)
    foreign = {
        page: [f for f in facts["fetched"] if not f.startswith((here, "data:"))]
        for page, facts in rendered_pages.items()
    }
    assert not {page: addresses for page, addresses in foreign.items() if addresses}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_screen_and_a_phone_show_every_page_without_scrolling_sideways(
    rendered_pages: Pages, width: int
) -> None:
    problems = {}
    for page, facts in rendered_pages.items():
        [look] = [look for look in facts["looks"] if look["width"] == width]
        if look["scrolled"] > width or look["cut"]:
            problems[page] = look
    assert not problems
    assert min(facts["letters"] for facts in rendered_pages.values()) >= 14


def test_no_column_of_a_table_takes_the_room_of_another(rendered_pages: Pages) -> None:
    """As the names of tests did, which could not break, beside texts of one word a line."""
    looks = {page: facts["looks"][WIDTHS.index(1280)] for page, facts in rendered_pages.items()}
    assert not {page: look["squeezed"] for page, look in looks.items() if look["squeezed"]}


def test_every_text_can_be_read_in_light_and_dark(rendered_pages: Pages) -> None:
    """The contrast that WCAG 2.2 asks for at level AA."""
    faint = {text for facts in rendered_pages.values() for text in facts["faint"]}
    assert not sorted(faint)


def test_a_broken_link_is_no_site(tmp_path: Path) -> None:
    """So that a successful build says something."""
    (tmp_path / "copy").mkdir()
    files = ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    files += ("SECURITY.md", "LICENSE", "CITATION.cff")
    for name in (*files, "docs", "lessons", "benchmarks", "src", "tests"):
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(
                path, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(path, tmp_path / "copy" / name)
    page = tmp_path / "copy" / "docs" / "architecture.md"
    page.write_text(page.read_text() + "\n[gone](gone.md)\n")
    built = build(tmp_path / "copy", tmp_path / "site")
    assert built.returncode != 0
    assert "gone.md" in built.stderr


@needs_browser
def test_the_menu_the_search_and_the_links_are_used_with_the_keyboard(
    site: Path, tmp_path: Path
) -> None:
    with (
        serving(site, queue.Queue()) as address,
        open_tab(f"{address}/docs/install/", tmp_path) as tab,
    ):
        tab.set_size(WIDTHS[0])
        stops = tab.walk_focus()  # each of them is seen
        menu = ["Start", "Convert", "Install, and a first run", "A first run"]
        assert {"Skip to content", "Search", *menu, "the quickstart"} <= set(stops)
        tab.press("/")
        wait_until(lambda: tab.evaluate(STOP) and tab.evaluate(STOP)["name"] == "Search")
        tab.press("Escape")
    with (
        serving(site, queue.Queue()) as address,
        open_tab(f"{address}/docs/install/", tmp_path) as tab,
    ):
        tab.set_size(WIDTHS[1])
        stops = tab.walk_focus()
        assert {"Menu", "Search", "the quickstart"} <= set(stops) and "Convert" not in stops
        for _ in range(stops.index("Menu") + 1):
            tab.press("Tab")
        tab.press("Enter", "\r")
        wait_until(lambda: tab.evaluate("document.querySelector('#__drawer').checked"))
        assert {"Home", "Convert"} <= set(tab.walk_focus())
