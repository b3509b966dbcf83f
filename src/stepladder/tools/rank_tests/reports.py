"""What the processes of a test report, as one test's reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprFileLocation, ReprTracebackNative

from stepladder.core.numbers import format_ranks

MAX_MESSAGE_LETTERS = 400


@dataclass(frozen=True)
class RanksEnd:
    """How the processes of a test have ended.

    Args:
        records: For each rank, its reports in pytest's serialized form; None if it was ended before
            it had any.
        rank: The rank whose error was the cause, None if none has raised the cause.
        positions: Where the ranks were that still ran when another one failed.
        problem: Why the test has failed, in one line; "" if it has not.
        details: Further lines about the problem.
    """

    records: Sequence[Sequence[dict[str, Any]] | None]
    rank: int | None
    positions: Mapping[int, str]
    problem: str
    details: str


def make_reports(item: pytest.Item, end: RanksEnd) -> list[pytest.TestReport]:
    """Return the reports of a test: of the first rank that failed, or else of rank 0."""
    load = item.config.hook.pytest_report_from_serializable
    reports = {
        rank: [load(config=item.config, data=record) for record in records]
        for rank, records in enumerate(end.records)
        if records is not None
    }
    for parts in reports.values():
        if any(hasattr(report, "wasxfail") for report in parts):
            return parts  # the expected failure of one rank is that of the test
    failures = {
        rank: report for rank, parts in reports.items() for report in parts if report.failed
    }
    if failures:
        rank = min(failures, key=lambda rank: failures[rank].stop)
        if end.rank in failures:
            rank = end.rank
        _add_ranks(failures[rank], rank, reports, end)
        return reports[rank]
    problem = end.problem or _describe_difference(reports)
    if problem:
        return _make_failed(item, problem, end)
    return reports[0]


def _add_ranks(
    report: pytest.TestReport,
    rank: int,
    reports: Mapping[int, Sequence[pytest.TestReport]],
    end: RanksEnd,
) -> None:
    """Begin the report of a rank that failed by a line about all ranks."""
    message = _find_message(report)
    others: dict[str, list[int]] = {}
    for other in range(len(end.records)):
        if other != rank:
            text = _describe_rank(reports.get(other, ()), end.positions.get(other, ""))
            others.setdefault(text, []).append(other)
    alike = others.pop(f"failed: {message}", [])
    size = len(end.records)
    subject = f"{format_ranks(sorted([rank, *alike]))} of {size}"
    if len(alike) + 1 == size > 1:
        subject = f"all {size} ranks"
    texts = [f"{format_ranks(ranks)} {text}" for text, ranks in others.items()]
    sentence = "; ".join([f"{subject} failed: {message}", *texts])
    if end.rank != rank:
        sentence = end.problem or sentence
    chain: list[Any] = [(ReprTracebackNative([f"{sentence}\n\n"]), None, None)]
    location = ReprFileLocation(*report.location[:1], report.location[1] or 0, sentence)
    if isinstance(report.longrepr, ExceptionChainRepr):
        *causes, (trace, crash, link) = report.longrepr.chain
        if crash is not None:
            location = replace(crash, message=sentence)
        chain += [*causes, (trace, location, link)]
    else:
        chain.append((ReprTracebackNative([report.longreprtext]), location, None))
    report.longrepr = ExceptionChainRepr(chain)


def _find_message(report: pytest.TestReport) -> str:
    """Return the first line of what a report says was wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).splitlines() or [""]
    return str(lines[0])[:MAX_MESSAGE_LETTERS]


def _describe_rank(reports: Sequence[pytest.TestReport], position: str) -> str:
    """Return what a rank did, without its number."""
    for report in reports:
        if report.failed:
            return f"failed: {_find_message(report)}"
        if report.skipped:
            return "skipped"
    if reports:
        return "passed"
    return f"was {position}" if position else "was ended"


def _describe_difference(reports: Mapping[int, Sequence[pytest.TestReport]]) -> str:
    """Return what is different if some ranks skip the test, and others do not; else ""."""
    texts = [f"rank {rank} {_describe_rank(parts, '')}" for rank, parts in sorted(reports.items())]
    outcomes = {tuple(report.outcome for report in parts) for parts in reports.values()}
    return "; ".join(texts) if len(outcomes) > 1 else ""


def _make_failed(item: pytest.Item, problem: str, end: RanksEnd) -> list[pytest.TestReport]:
    """Return the reports of a test that no rank could report on."""
    path, line, _ = item.location
    location = ReprFileLocation(path, (line or 0) + 1, problem)
    text = f"{problem}\n{end.details}\n" if end.details else f"{problem}\n"
    longrepr = ExceptionChainRepr([(ReprTracebackNative([text]), location, None)])
    keywords: dict[str, Literal[1]] = dict.fromkeys(item.keywords, 1)
    return [
        pytest.TestReport(
            item.nodeid,
            item.location,
            keywords,
            outcome="failed" if when == "call" else "passed",
            longrepr=longrepr if when == "call" else None,
            when=when,
        )
        for when in ("setup", "call", "teardown")
    ]
