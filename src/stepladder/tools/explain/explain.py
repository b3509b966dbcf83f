"""Known error messages in a text: torch's, NCCL's, gloo's, CUDA's, Slurm's. What they mean and what
to type.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files

LEAST_PART = 8  # characters of a message that tell it from others
LEAST_WORDS = 2
LEAST_LETTERS = 3  # of a word that counts
MOST_NEAREST = 2
COMMON = {
    "the", "and", "are", "was", "has", "have", "not", "for", "with", "from", "this", "that", "error",
    "runtimeerror",
}  # fmt: skip
ABBREVIATIONS = {"oom": "out of memory", "timed? out": "timeout", "processgroupnccl": "nccl"}


@dataclass(frozen=True)
class KnownError:
    """texts: literal parts of the message, of which one is enough.  source: whose message it is."""

    source: str
    texts: tuple[str, ...]
    cause: str
    do: str

    def is_in(self, line: str) -> bool:
        """Whether a line is or holds this message; a part of the message that somebody remembers
        counts too.
        """
        found = plain(line)
        return any(
            text in found or (len(found) >= LEAST_PART and found in text)
            for text in map(plain, self.texts)
        )


@dataclass(frozen=True)
class Occurrence:
    """The first line of a text, counted from 1, that holds a known message.

    is_literal: whether it holds the message itself; else the line is the message that is nearest to
    it."""

    number: int
    line: str
    error: KnownError
    is_literal: bool = True


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


def nearest(text: str) -> Iterator[Occurrence]:
    """Return the messages that have the most words of a text, in themselves or in their cause.

    At least two words, and half of all, with one of them in the message itself; at most
    MOST_NEAREST messages."""
    asked = words_of(text)
    scores: list[tuple[int, int, str, KnownError]] = []
    for error in known_errors():
        in_message, message = max(
            (len(asked & words_of(f"{error.source} {each}")), each) for each in error.texts
        )
        shared = len(asked & words_of(f"{error.source} {message} {error.cause}"))
        if in_message and shared >= max(LEAST_WORDS, len(asked) / 2):
            scores.append((shared, in_message, message, error))
    most = max((score[:2] for score in scores), default=None)
    best = [(message, error) for *score, message, error in scores if tuple(score) == most]
    for message, error in best[:MOST_NEAREST]:
        yield Occurrence(1, message, error, is_literal=False)


def words_of(text: str) -> set[str]:
    """Return the words of a message that tell it from others, without their endings."""
    plain_text = text.lower()
    for short, long in ABBREVIATIONS.items():
        plain_text = re.sub(rf"\b{short}\b", long, plain_text)
    words = {word for word in re.findall(r"[a-z]+", plain_text) if len(word) >= LEAST_LETTERS}
    return {re.sub(r"(ing|ed|s|e)$", "", word) for word in words - COMMON}


def plain(text: str) -> str:
    return " ".join(text.lower().split())
