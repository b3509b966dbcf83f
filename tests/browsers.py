"""A real browser that looks at a page at two widths, light and dark, and takes its picture."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from processes import SECONDS

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # a container's may be too small for it
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
    "--virtual-time-budget=3000",
)
DARK = "--blink-settings=preferredColorScheme=0"
WIDTHS = (1280, 390)
SCRIPTS = Path(__file__).parent
CONTRAST = SCRIPTS / "page_contrast.js"
PROBE = CONTRAST.read_text() + (SCRIPTS / "page_probe.js").read_text()
MIN_PICTURE_BYTES = 8_000  # an empty page has fewer

needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")


def browse(scratch: Path, *flags: str) -> str:
    command = [str(BROWSER), *QUIET, f"--user-data-dir={scratch / 'profile'}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return done.stdout


def check_readable(page: Path, scratch: Path) -> None:
    """Fail if any text of the page overflows, is cut or cannot be read, at any width and theme."""
    probed = scratch / f"probed-{page.name}"
    probed.write_text(page.read_text().replace("</body>", f"<script>{PROBE}</script></body>"))
    backgrounds = set()
    for width in WIDTHS:
        frame = scratch / f"frame-{width}.html"
        frame.write_text(
            f'<body style="margin:0"><iframe id="f" src="{probed.name}" width="{width}"'
            ' height="2400" style="border:0"></iframe><script>addEventListener("load", () => {'
            "document.title = document.getElementById('f').contentDocument.title })</script>"
        )
        for flags in ((), (DARK,)):
            result = read_findings(browse(scratch, *flags, "--dump-dom", frame.as_uri()))
            problems = result["problems"]
            assert not problems, f"{page.name}, {width} pixels {flags}: {problems}"
            assert result["width"] == width and result["texts"] > 50
            backgrounds.add(result["background"])
            picture = scratch / f"{page.stem}-{width}{'-dark' * bool(flags)}.png"
            browse(
                scratch,
                *flags,
                f"--window-size={max(width, 500)},2400",
                f"--screenshot={picture}",
                frame.as_uri(),
            )
            assert picture.stat().st_size > MIN_PICTURE_BYTES
    assert len(backgrounds) == 2, "the page has a dark mode"


def read_findings(dom: str) -> dict[str, Any]:
    match = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert match is not None, dom[:500]
    findings: dict[str, Any] = json.loads(html.unescape(match[1]))
    return findings
