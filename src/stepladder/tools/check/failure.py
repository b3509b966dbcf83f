"""Causes of a failed run: a mistake of the script, or of this check's probe or simulated CUDA."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from stepladder.core.errors import INTERRUPTED
from stepladder.tools.findings.finding import Finding

Cause = Literal["script", "check", "no training", "resume", "stopped"]

CHECK_PREFIX = str(Path(__file__).parent) + os.sep
PARITY_PREFIX = str(Path(__file__).parents[1] / "parity") + os.sep
MAX_OUTPUT_CHARACTERS = 4000  # of a failed rank, in JSON
TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
FRAME = re.compile(r'^\W*(?:\[rank\d+\]:)?\s*File "(?P<file>[^"]+)", line \d+, in ')
# torch puts it before each line where there is a process group.
RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
OWN_MODULE = re.compile(r"^stepladder\.[\w.]*\.(?=\w+:)")  # before the name of an exception
CPP_FRAME = re.compile(r"^(?:\[rank\d+\]:\s?)?frame #\d+: .*\n?", re.MULTILINE)
LOG_TIME = re.compile(r"(\[[IWEF])\d{4} [\d:.]+(?= )")
# Lines of wrappers that only call the wrapped function.
FORWARDING_CALL = re.compile(
    r"\boriginal\w*\(|\b(?:around|call)\((?:WrappedCall\()?original|\bcall\.run\(|super\(\)\.__init__\("
)
# The code of torch.cuda itself is reached only through something that is not simulated.
TORCH_CUDA = re.compile(r"[/\\]torch[/\\]cuda[/\\]")
# What torch raises where a GPU or NCCL is missing, and nothing is simulated in its place.
MISSING_GPU = re.compile(
    r"not compiled with CUDA|No CUDA GPUs are available|NVIDIA driver|without ATen_cuda"
    r"|'CUDA' backend|has no attribute '_cuda|dummy base class|accelerator device when none"
    r"|pinned memory allocator|on a CUDA device but|no accelerator device"
    r"|SyncBatchNorm (?:expected|layers)|not implemented for 'Half'|0 active drivers"
    r"|ProcessGroupNCCL|with Gloo|ProcessGroupGloo\S*:? .*(?:unsupported|not support)"
    r"|If capturable=|CUDA_HOME"
    # Its operators for tensors of several ranks are those of CUDA, and the CPU has others.
    r"|does not have a sharding strategy"
)
NOT_INSTALLED = re.compile(r"(?:ModuleNotFound|Import)Error: No module named '(?P<name>\w+)")
NO_NETWORK = re.compile(
    r"Name or service not known|Temporary failure in name resolution|Network is unreachable"
    r"|No address associated with hostname|check your (?:internet )?connection",
    re.IGNORECASE,
)
MISSING_VARIABLE = re.compile(
    r"(?:<frozen os>|[/\\]os\.py)\", line \d+, in __getitem__\n"
    r"(?:.*\n)*?.*KeyError: '(?P<name>\w+)'"
)
PORT_IN_USE = re.compile(r"(?:port: (?P<port>\d+).*)?(?:EADDRINUSE|[Aa]ddress already in use)")
WAITED_TOO_LONG = re.compile(r"timed? ?out", re.IGNORECASE)
# What a rank raises because another one was lost, has not come, or sends something else.
TELLS_OF_A_PEER = re.compile(
    r"gloo|Connection (?:closed|reset|refused) ?(?:by peer)?|Broken pipe|recvVal failed"
    rf"|{WAITED_TOO_LONG.pattern}",
    re.IGNORECASE,
)
# A script that insists on where a tensor is: with simulated GPUs it says that it is on the CPU.
INSISTS_ON_DEVICE = re.compile(r"^assert\b.*(?:\.is_cuda\b|\.device\b)")


@dataclass(frozen=True)
class NotChecked:
    """The reason why the script could not be checked, with exit code 3.

    Args:
        cause: "script" if it failed by itself, "check" if the probe or the simulation failed,
            "no training" if it made no optimizer step and no backward pass, "resume" if it was not
            resumed, "stopped" by Ctrl-C.
        line: What is shown, in one line.
        output: The end of the failing rank's output, where a rank failed.
    """

    cause: Cause
    line: str
    output: str = ""

    def as_json(self) -> dict[str, str]:
        return {
            "cause": self.cause,
            "line": self.line,
            "output": self.output[-MAX_OUTPUT_CHARACTERS:],
        }


STOPPED_BY_USER = NotChecked("stopped", "stopped by Ctrl-C: a check to the end may find more")


@dataclass(frozen=True)
class TracebackFrame:
    """One frame of a traceback, with its line of source where that is known."""

    file: str
    source: str


@dataclass(frozen=True)
class Folders:
    """The folders of the user's own code: the copy that ran, and the original."""

    copy: str
    original: str

    def contain(self, file: str) -> bool:
        prefixes = tuple(folder + os.sep for folder in (self.copy, self.original) if folder)
        return file.startswith(prefixes) and "site-packages" not in file

    def show_original(self, text: str) -> str:
        """Return a text with the original folder in place of the copy."""
        return text.replace(self.copy, self.original)


def classify_failure(output: str, folders: Folders) -> NotChecked:
    """Return why a rank failed.

    Args:
        output: Everything that the rank has printed.
        folders: The folders of the user's code.
    """
    for traceback in last_traceback_chain(output):
        if is_caused_by_check(traceback, folders):
            line = f"this check cannot run it: {exception_line(traceback)}"
            return NotChecked("check", folders.show_original(line), folders.show_original(output))
    shown = hide_check_frames(output, folders)
    return NotChecked("script", describe_failure(output), shown)


def choose_exit_code(findings: Iterable[Finding], not_checked: NotChecked | None) -> int:
    """Return 130 after Ctrl-C, 1 for an error or a warning, 3 if a run proves nothing, else 0."""
    if not_checked and not_checked.cause == "stopped":
        return INTERRUPTED
    if any(finding.severity != "note" for finding in findings):
        return 1
    return 3 if not_checked else 0


def has_own_error(output: str) -> bool:
    """Return whether a rank was ended by an exception that does not tell of another rank."""
    exceptions = [exception_line(traceback) for traceback in last_traceback_chain(output)]
    return bool(exceptions) and not any(map(TELLS_OF_A_PEER.search, exceptions))


def describe_failure(output: str) -> str:
    """Return who failed, in one line: the script, or what is missing on this machine."""
    chain = last_traceback_chain(output)
    if match := NOT_INSTALLED.search(chain[0] if chain else ""):
        return (
            f"the script cannot run here, as above: {match['name']} is not installed for "
            f"{sys.executable}"
        )
    if match := MISSING_VARIABLE.search(chain[0] if chain else ""):
        name = match["name"]
        return (
            f"the script cannot run here, as above: the variable {name} is not set; "
            f"{name}=... stepladder check SCRIPT"
        )
    if match := PORT_IN_USE.search(chain[0] if chain else ""):
        port = f"port {match['port']}" if match["port"] else "a port that it names"
        return (
            f"the script cannot run here, as above: {port} is in use, by another program or by "
            "another rank of this script"
        )
    if any(NO_NETWORK.search(traceback) for traceback in chain):
        return "the script cannot run here, as above: it needs a network that is not there"
    return "the script failed by itself, as above"


def last_traceback_chain(output: str) -> list[str]:
    """Return the last traceback of an output, and the tracebacks that it names as its causes."""
    tracebacks = output.split(TRACEBACK)[1:]
    chain = tracebacks[-1:]
    for traceback in reversed(tracebacks[:-1]):
        if not any(text in traceback for text in CHAINED):
            break
        chain.append(traceback)
    return chain


def frames_of(traceback: str) -> Iterator[TracebackFrame]:
    lines = traceback.splitlines()
    for line, source in zip_longest(lines, lines[1:], fillvalue=""):
        if match := FRAME.match(line):
            yield TracebackFrame(match["file"], RANK_PREFIX.sub("", source).strip())


def is_caused_by_check(traceback: str, folders: Folders) -> bool:
    """Return whether the innermost frame that decides it is this check's own.

    A wrapper of the probe that only calls the wrapped function does not decide it: the frame
    outside of it does.
    """
    frames = list(frames_of(traceback))
    if lacks_simulation(traceback, frames, folders):
        return True
    for frame in reversed(frames):
        if frame.file.startswith((CHECK_PREFIX, PARITY_PREFIX)):
            if not FORWARDING_CALL.search(frame.source):
                return True
        elif folders.contain(frame.file):
            return False
    return False


def lacks_simulation(traceback: str, frames: list[TracebackFrame], folders: Folders) -> bool:
    """Return whether the script failed because something of CUDA is not simulated."""
    is_raised_by_user = False
    if frames:
        innermost = frames[-1]
        is_raised_by_user = folders.contain(innermost.file) and innermost.source.startswith("raise")
        if TORCH_CUDA.search(innermost.file) or INSISTS_ON_DEVICE.search(innermost.source):
            return True
    return not is_raised_by_user and bool(MISSING_GPU.search(exception_line(traceback)))


def exception_line(traceback: str) -> str:
    """Return the exception of a traceback, in one line."""
    lines = [RANK_PREFIX.sub("", line) for line in traceback.splitlines()]
    frame_numbers = [number for number, line in enumerate(lines) if FRAME.match(line)]
    after_frames = lines[frame_numbers[-1] + 1 :] if frame_numbers else lines
    exceptions = (line for line in after_frames if line and not line[0].isspace())
    exception = OWN_MODULE.sub("", next(exceptions, "")).strip()
    if exception == "AssertionError":  # without a message: the line says what was expected
        sources = [frame.source for frame in frames_of(traceback)]
        return ": ".join([exception, *sources[-1:]])
    return exception


def hide_check_frames(output: str, folders: Folders) -> str:
    """Return an output without this check's frames, and with the original folder for the copy.

    Frames of C++, and the times of torch's log, would be others each time.
    """
    shown: list[str] = []
    is_hidden = False
    for line in CPP_FRAME.sub("", LOG_TIME.sub(r"\1", output)).splitlines():
        if match := FRAME.match(line):
            is_hidden = match["file"].startswith((CHECK_PREFIX, PARITY_PREFIX))
        elif not RANK_PREFIX.sub("", line).startswith("    "):  # no source line of the frame
            is_hidden = False
        if not is_hidden:
            shown.append(line)
    return folders.show_original("\n".join(shown))
