"""Why a run of the script broke off: by a fault of the script, or of this check's probe or
simulated CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

Cause = Literal["script", "check", "no training"]

OURS = str(Path(__file__).parent) + os.sep
TRACEBACK = "Traceback (most recent call last):"
CHAINS = ("During handling of the above exception", "The above exception was the direct cause")
FRAME = re.compile(r'^\W*(?:\[rank\d+\]:)?\s*File "(?P<file>[^"]+)", line \d+, in ')
PREFIX = re.compile(
    r"^\[rank\d+\]:\s?"
)  # torch puts it before each line where there is a process group
PASSES_ON = re.compile(
    r"\boriginal\w*\(|around\(original|super\(\)\.__init__\("
)  # a wrapper's line that calls what it stands in front of
SIMULATED = re.compile(
    r"[/\\]torch[/\\]cuda[/\\]"
)  # torch.cuda's own code is reached only where nothing is simulated
NO_GPU = re.compile(
    r"not compiled with CUDA|No CUDA GPUs are available|NVIDIA driver|without ATen_cuda|'CUDA' backend"
    r"|has no attribute '_cuda|dummy base class|accelerator device when none|pinned memory allocator"
    r"|on a CUDA device but|no accelerator device|SyncBatchNorm (?:expected|layers)|not implemented for 'Half'"
    r"|0 active drivers|ProcessGroupNCCL|with Gloo|ProcessGroupGloo\S*:? .*(?:unsupported|not support)"
    # what torch itself raises where a GPU or NCCL is missing, and the simulation has not stood in for
    # it
)


@dataclass(frozen=True)
class NotChecked:
    """Why the script could not be checked, as exit code 3 tells it.

    Args:
        cause: `script`: it failed by itself. `check`: the probe or the simulation failed. `no
        training`: it
            made no optimizer step and no backward pass.
        line: What is shown, in one line.
        output: The end of the failing rank's output, where a rank failed."""

    cause: Cause
    line: str
    output: str = ""

    def as_json(self) -> dict[str, str]:
        return {"cause": self.cause, "line": self.line, "output": self.output[-4000:]}


@dataclass(frozen=True)
class TracebackFrame:
    """One frame of a traceback. source: the line of code that was under way, where it is known."""

    file: str
    source: str


@dataclass(frozen=True)
class Folders:
    """Where the user's own code lies: the copy that ran, and the folder that it is a copy of."""

    copy: str
    original: str

    def have(self, file: str) -> bool:
        parts = tuple(folder + os.sep for folder in (self.copy, self.original) if folder)
        return file.startswith(parts) and "site-packages" not in file

    def renamed(self, text: str) -> str:
        """Return a text with the user's folder in place of the copy."""
        return text.replace(self.copy, self.original)


def failure_of(output: str, folders: Folders, simulates: bool) -> NotChecked:
    """Return who is at fault for a rank that failed.

    Args:
        output: Everything that the rank has printed.
        folders: Where the user's code lies.
        simulates: Whether CUDA and NCCL were simulated in this run.
    """
    for block in chain_of(output):
        if is_ours(block, folders, simulates):
            line = f"this check cannot run it: {message_of(block)}"
            return NotChecked("check", folders.renamed(line), folders.renamed(output))
    return NotChecked(
        "script", "the script failed by itself, as above", as_users_see_it(output, folders)
    )


def chain_of(output: str) -> list[str]:
    """Return the last traceback of an output, with those that it names as its causes."""
    blocks = output.split(TRACEBACK)[1:]
    chain = blocks[-1:]
    for block in reversed(blocks[:-1]):
        if not any(words in block for words in CHAINS):
            break
        chain.append(block)
    return chain


def frames_of(block: str) -> Iterator[TracebackFrame]:
    lines = block.splitlines()
    for line, below in zip_longest(lines, lines[1:], fillvalue=""):
        if match := FRAME.match(line):
            yield TracebackFrame(match["file"], PREFIX.sub("", below).strip())


def is_ours(block: str, folders: Folders, simulates: bool) -> bool:
    """Return whether the innermost frame that tells it is this check's own.

    A wrapper of the probe that only calls what it wraps tells nothing: the frame outside of it
    does."""
    frames = list(frames_of(block))
    innermost = frames[-1] if frames else None
    users_raise = (
        innermost is not None
        and folders.have(innermost.file)
        and innermost.source.startswith("raise")
    )
    if simulates and not users_raise and NO_GPU.search(message_of(block)):
        return True
    if simulates and innermost is not None and SIMULATED.search(innermost.file):
        return True
    for frame in reversed(frames):
        if frame.file.startswith(OURS):
            if not PASSES_ON.search(frame.source):
                return True
        elif folders.have(frame.file):
            return False
    return False


def message_of(block: str) -> str:
    """Return the exception of a traceback, in one line."""
    lines = [PREFIX.sub("", line) for line in block.splitlines()]
    last_frame = max((number for number, line in enumerate(lines) if FRAME.match(line)), default=-1)
    message = next((line for line in lines[last_frame + 1 :] if line and not line[0].isspace()), "")
    return message.removeprefix("stepladder.tools.check.").strip()


def as_users_see_it(output: str, folders: Folders) -> str:
    """Return an output without this check's frames, and with the user's folder in place of the
    copy.
    """
    shown: list[str] = []
    skips = False
    for line in output.splitlines():
        match = FRAME.match(line)
        if match:
            skips = match["file"].startswith(OURS)
        elif skips and not PREFIX.sub("", line).startswith(
            "    "
        ):  # code and carets of a frame are indented
            skips = False
        if not skips:
            shown.append(line)
    return folders.renamed("\n".join(shown))
