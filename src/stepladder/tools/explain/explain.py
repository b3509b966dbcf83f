"""Finding known error messages in a text: those of torch, NCCL, gloo, CUDA and Slurm."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from stepladder.tools.findings.finding import Finding, Location

MIN_PART_CHARACTERS = 8  # of a part of a message that identifies it
MIN_SHARED_TERMS = 2
MIN_TERM_LETTERS = 3
MAX_NEAREST_ERRORS = 2
COMMON_WORDS = {
    "the", "and", "are", "was", "has", "have", "not", "for", "with", "from", "this", "that",
    "error", "runtimeerror",
}  # fmt: skip
EXPANDED_TERMS = {"oom": "out of memory", "timed? out": "timeout", "processgroupnccl": "nccl"}


@dataclass(frozen=True)
class KnownError:
    """A known error.

    Args:
        source: The program that reports it.
        texts: Literal parts of the message, of which one is enough.
        cause: What it means.
        do: What to type.
    """

    source: str
    texts: tuple[str, ...]
    cause: str
    do: str

    def is_in(self, line: str) -> bool:
        """Return whether a line contains this message.

        A part of the message that somebody remembers counts too.
        """
        normalized = _normalize(line)
        is_part = len(normalized) >= MIN_PART_CHARACTERS
        texts = [_normalize(text) for text in self.texts]
        return any(text in normalized or (is_part and normalized in text) for text in texts)

    def finding(self, evidence: str, line: int = 0) -> Finding:
        """Return the finding of this error, on a line of a text or (0) as the nearest known one."""
        return Finding(self.source, "note", Location(line=line), evidence, self.cause, self.do)


@dataclass(frozen=True)
class _Score:
    """The number of terms that a text shares with a known error, and with its message alone."""

    shared: int
    shared_with_message: int
    message: str
    error: KnownError


@cache
def known_errors() -> tuple[KnownError, ...]:
    """Return all errors of errors.toml, in its order."""
    text = files(__package__).joinpath("errors.toml").read_text(encoding="utf-8")
    return tuple(
        KnownError(entry["from"], tuple(entry["text"]), entry["cause"], entry["do"])
        for entry in tomllib.loads(text)["error"]
    )


def explain(lines: Iterable[str]) -> Iterator[Finding]:
    """Yield each known message once, where it comes first."""
    remaining = list(known_errors())
    for number, line in enumerate(lines, start=1):
        for error in [error for error in remaining if error.is_in(line)]:
            remaining.remove(error)
            yield error.finding(line.strip(), number)


def find_nearest(text: str) -> Iterator[Finding]:
    """Yield the messages that share the most terms with a text, in the message or its cause.

    They share at least two terms, and half of all, and one of them with the message itself.
    """
    terms = _significant_terms(text)
    scores = [score(terms, error) for error in known_errors()]
    least_shared = max(MIN_SHARED_TERMS, len(terms) / 2)
    scores = [s for s in scores if s.shared_with_message and s.shared >= least_shared]
    best = max(((s.shared, s.shared_with_message) for s in scores), default=None)
    nearest = [s for s in scores if (s.shared, s.shared_with_message) == best]
    for result in nearest[:MAX_NEAREST_ERRORS]:
        yield result.error.finding(result.message)


def score(terms: set[str], error: KnownError) -> _Score:
    """Return how many of these terms an error has, with the one of its texts that has most."""
    shared_with_message, message = max(
        (len(terms & _significant_terms(f"{error.source} {text}")), text) for text in error.texts
    )
    all_terms = _significant_terms(f"{error.source} {message} {error.cause}")
    return _Score(len(terms & all_terms), shared_with_message, message, error)


def _significant_terms(text: str) -> set[str]:
    """Return the terms of a message that identify it, without their endings."""
    expanded = text.lower()
    for short, long in EXPANDED_TERMS.items():
        expanded = re.sub(rf"\b{short}\b", long, expanded)
    terms = {term for term in re.findall(r"[a-z]+", expanded) if len(term) >= MIN_TERM_LETTERS}
    return {re.sub(r"(ing|ed|s|e)$", "", term) for term in terms - COMMON_WORDS}


def _normalize(text: str) -> str:
    """Return a text in lower case, with single spaces."""
    return " ".join(text.lower().split())
