"""The page of a playback, from a check of the script."""

from __future__ import annotations

from stepladder.core.numbers import format_count
from stepladder.tools.check.check import Report
from stepladder.tools.pages.page import render_page
from stepladder.tools.playback.frames import make_frames
from stepladder.tools.playback.parts import Part, choose_parts, read_parts


def render_playback(report: Report, name: str, steps: int, epochs: int) -> str:
    """Return the page of what the ranks of a checked script did; "" if they made no step.

    Args:
        report: The report of the check, in which each rank's own gradients were recorded.
        name: The name of the script.
        steps: How many steps of each epoch are shown.
        epochs: How many epochs are shown.
    """
    chosen: list[tuple[Part, ...]] = []
    if report.evidence is not None:
        evidence = report.evidence
        parts = [read_parts(log, evidence) for log in evidence.ranks]
        chosen = choose_parts(parts, steps, epochs)
    if not chosen:
        return ""
    frames = make_frames(chosen, report.findings)
    bad = sum(frame.is_bad for frame in frames)
    num_ranks = len(chosen[0])
    size = f"{format_count(num_ranks, 'rank')}, in {format_count(len(frames), 'moment')}"
    intro = f"{name} on {size}. Moments with a mistake that check has found: {bad}."
    return render_page(
        "playback.html",
        title=f"Playback of {name}",
        intro=intro,
        frames=frames,
        num_ranks=num_ranks,
    )
