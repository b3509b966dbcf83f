"""A real browser that looks at a page at two widths, light and dark, and takes its picture."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from processes import SECONDS, wait_until

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
)
VIRTUAL_TIME = "--virtual-time-budget=3000"
DARK = "--blink-settings=preferredColorScheme=0"
WIDTHS = (1280, 390)
SCRIPTS = Path(__file__).parent
CONTRAST = SCRIPTS / "page_contrast.js"
PROBE = CONTRAST.read_text() + (SCRIPTS / "page_probe.js").read_text()
CONTROLS = 'a[href], button, input, summary, [tabindex="0"]'
MAX_STOPS = 400  # elements of a page that get the focus
KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27}
STILL = "*, *::before, *::after { transition: none !important }"
STOP = """(() => {
  const element = document.activeElement
  if (element === document.body) return null
  const shown = element.type === "radio" ? [element.nextElementSibling] : [element]
  const isOnScreen = part => {
    const box = part.getBoundingClientRect()
    const isInside = box.right > 0 && box.left < innerWidth && box.bottom > 0 && box.top < innerHeight
    return isInside && part.checkVisibility({opacityProperty: true, visibilityProperty: true})
  }
  const isMarked = part => getComputedStyle(part).outlineStyle !== "none" && isOnScreen(part)
  const name = element.getAttribute("aria-label") || element.innerText || element.tagName
  return {name: name.trim(), kind: element.tagName, is_visible: shown.some(isMarked)}
})()"""
MIN_PICTURE_BYTES = 8_000  # an empty page has fewer

needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")


def browse(scratch: Path, *flags: str) -> str:
    profile = f"--user-data-dir={scratch / 'profile'}"
    command = [str(BROWSER), *QUIET, VIRTUAL_TIME, profile, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return done.stdout


def check_readable(page: Path, scratch: Path) -> None:
    """Fail if any text of the page overflows, is cut or cannot be read, at any width and theme, or if
    Tab does not reach everything that moves, such as a chart.
    """
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
    with open_tab(page.as_uri(), scratch) as tab:
        controls = f"[...document.querySelectorAll('{CONTROLS}')]"
        num_controls = tab.evaluate(f"{controls}.filter(part => part.checkVisibility()).length")
        assert len(tab.walk_focus()) >= num_controls


def check_tables_fit(page: Path, scratch: Path) -> None:
    """Fail if a table of the page must be scrolled sideways in a window of 1000 pixels."""
    with open_tab(page.as_uri(), scratch) as tab:
        tab.set_size(1000)
        wide = "[...document.querySelectorAll('div.wide:has(> table)')]"
        names = ".map(part => part.getAttribute('aria-label'))"
        assert tab.evaluate(f"{wide}.length") > 0
        assert (
            tab.evaluate(f"{wide}.filter(part => part.scrollWidth > part.clientWidth){names}") == []
        )


def read_findings(dom: str) -> dict[str, Any]:
    match = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert match is not None, dom[:500]
    findings: dict[str, Any] = json.loads(html.unescape(match[1]))
    return findings


class BrowserTab:
    """A page in a browser that gets keys, by the browser's debugging protocol over two pipes."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = os.fdopen(answers, "rb")
        self._session = ""
        self._number = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            text = bytearray()
            while (letter := self._answers.read(1)) not in (b"\0", b""):
                text += letter
            assert text, "the browser has ended"
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def set_size(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, address: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.navigate", url=address)
        loaded = "location.href != 'about:blank' && document.readyState == 'complete'"
        wait_until(lambda: self.evaluate(loaded))

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def walk_focus(self) -> list[str]:
        """Press Tab until the end of the page; return the names of what had the focus.

        Fail if the focus is not seen, with an outline on the screen.
        """
        style = f"Object.assign(document.createElement('style'), {{textContent: '{STILL}'}})"
        self.evaluate(f"document.head.append({style})")
        stops = []
        while True:
            self.press("Tab")
            stop = self.evaluate(STOP)
            if stop is None:
                return stops
            # The page may be about to open what got the focus.
            wait_until(self._sees_focus, partial("no focus is seen at {name}".format, **stop))
            stops.append(stop["name"])
            assert len(stops) < MAX_STOPS, f"the focus does not leave {stop}"

    def _sees_focus(self) -> bool:
        return bool(self.evaluate(STOP)["is_visible"])

    def press(self, key: str, text: str = "") -> None:
        """Press a key that has a name, or with `text` a letter."""
        code = KEY_CODES.get(key, 0)
        down = {"type": "keyDown", "key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", **down, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)


@contextmanager
def open_tab(address: str, scratch: Path) -> Iterator[BrowserTab]:
    """Open a page in a browser, which ends with the block."""
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    # The browser reads commands from descriptor 3, and writes answers to 4.
    shell = f'exec "$@" 3<&{command_end} 4>&{answer_end}'
    flags = [*QUIET, "--remote-debugging-pipe", f"--user-data-dir={scratch / 'profile'}"]
    browser = subprocess.Popen(
        ["bash", "-c", shell, "bash", str(BROWSER), *flags],
        pass_fds=(command_end, answer_end),
        stderr=subprocess.DEVNULL,
    )
    os.close(command_end)
    os.close(answer_end)
    try:
        tab = BrowserTab(commands, answers)
        tab.open(address)
        yield tab
    finally:
        members = [*psutil.Process(browser.pid).children(recursive=True), browser]
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        browser.wait()
        os.close(commands)
