"""Known error messages in a text: torch's, NCCL's, gloo's, CUDA's, Slurm's. What they mean and what to type."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files

LEAST_PART = 8  # characters of a message that tell it from others


@dataclass(frozen=True)
class KnownError:
    """texts: literal parts of the message, of which one is enough.  source: whose message it is."""

    source: str
    texts: tuple[str, ...]
    cause: str
    do: str

    def is_in(self, line: str) -> bool:
        """Whether a line is or holds this message; a part of the message that somebody remembers counts too."""
        found = plain(line)
        return any(
            text in found or (len(found) >= LEAST_PART and found in text) for text in map(plain, self.texts)
        )


@dataclass(frozen=True)
class Occurrence:
    """The first line of a text, counted from 1, that holds a known message."""

    number: int
    line: str
    error: KnownError


def known_errors() -> list[KnownError]:
    """All of errors.toml, in its order."""
    text = files(__package__).joinpath("errors.toml").read_text(encoding="utf-8")
    return [
        KnownError(one["from"], tuple(one["text"]), one["cause"], one["do"])
        for one in tomllib.loads(text)["error"]
    ]


def explain(lines: Iterable[str]) -> Iterator[Occurrence]:
    """Each known message once, where it comes first."""
    left = known_errors()
    for number, line in enumerate(lines, start=1):
        for error in [error for error in left if error.is_in(line)]:
            left.remove(error)
            yield Occurrence(number, line.strip(), error)


def plain(text: str) -> str:
    return " ".join(text.lower().split())
