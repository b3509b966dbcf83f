"""The moments of a run, each as a table of ranks with sentences that say what it shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from stepladder.tools.check.rules.shown_values import NUMBER
from stepladder.tools.findings.finding import Finding
from stepladder.tools.playback.parts import MOMENTS, Moment, Part

SHOWN_SAMPLES = 16
SHOWN_LAYERS = 8
Earlier = tuple[Part, ...] | None  # the same step of an earlier epoch
TITLES: dict[Moment, str] = {
    "samples": "Each rank takes its samples",
    "loss": "Each rank computes the loss of its samples",
    "gradients": "Each rank computes its own gradients",
    "meeting": "The ranks meet: nobody goes on before the last one has come",
    "step": "Each optimizer makes its step",
    "shown": "What is printed and saved",
}


@dataclass
class Row:
    """A row of a moment's table: a name, and what each rank has."""

    name: str
    cells: list[str]
    is_new: bool = True


@dataclass
class ShownMoment:
    """One moment.

    Args:
        where: The epoch and the step.
        title: What happens.
        rows: What each rank has by now.
        notes: Sentences of what the rows show. They accuse nobody: that is what `check` does.
        faults: What `check` has found at this moment.
    """

    where: str
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[Finding] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        return any(fault.severity != "note" for fault in self.faults)


def make_frames(
    chosen: Sequence[tuple[Part, ...]], findings: Iterable[Finding]
) -> list[ShownMoment]:
    """Return the moments of these parts; each finding is at the first moment of its line."""
    left = list(findings)
    frames: list[ShownMoment] = []
    seen: dict[int, tuple[Part, ...]] = {}
    for parts in chosen:
        rows: list[Row] = []
        for moment in MOMENTS:
            faults = [fault for fault in left if _find_moment(fault, parts) == moment]
            left = [fault for fault in left if fault not in faults]
            frame = ShownMoment(
                _describe_place(parts[0]), TITLES[moment], list(rows), faults=faults
            )
            DESCRIBE[moment](frame, parts, seen.get(parts[0].number))
            if len(frame.rows) > len(rows) or frame.notes or faults:
                frames.append(frame)
                rows = [replace(row, is_new=False) for row in frame.rows]
        if parts[0].number:
            seen.setdefault(parts[0].number, parts)
    if left:
        frames.append(ShownMoment("the whole run", "What else was found", faults=left))
    return frames


def _find_moment(fault: Finding, parts: tuple[Part, ...]) -> Moment | None:
    line = fault.location.file, fault.location.line
    return next((part.lines[line] for part in parts if line in part.lines), None)


def _describe_place(part: Part) -> str:
    if part.epoch < 0:
        return "before the first step"
    if part.number:
        return f"epoch {part.epoch}, step {part.number}"
    return f"epoch {part.epoch}, after its steps"


def _describe_samples(frame: ShownMoment, parts: tuple[Part, ...], earlier: Earlier) -> None:
    if not any(part.samples for part in parts):
        return
    frame.rows.append(Row("samples", [_join(part.samples) for part in parts]))
    if not parts[0].number:
        counts = ", ".join(f"rank {r}: {len(part.samples)}" for r, part in enumerate(parts))
        frame.notes.append(f"An evaluation with as many samples: {counts}.")
    names = {row: sample for part in parts for row, sample in part.rows.items()}
    counted = Counter(row for part in parts for row in part.rows)
    twice = [names[row] for row, count in counted.items() if count > 1]
    if twice:
        frame.notes.append(f"On more than one rank: {_join(twice)}.")
    if earlier and earlier[0].epoch < parts[0].epoch:
        before = [part.samples for part in earlier]
        if before == [part.samples for part in parts]:
            frame.notes.append(f"The same samples as in epoch {earlier[0].epoch}.")


def _describe_losses(frame: ShownMoment, parts: tuple[Part, ...], _: Earlier) -> None:
    if any(part.losses for part in parts):
        frame.rows.append(Row("loss", [_join(map(_format, part.losses)) for part in parts]))


def _describe_gradients(frame: ShownMoment, parts: tuple[Part, ...], _: Earlier) -> None:
    _add_gradients(frame, parts, "gradient of", [part.own for part in parts])


def _add_gradients(
    frame: ShownMoment, parts: tuple[Part, ...], words: str, values: Sequence[Sequence[float]]
) -> None:
    """Add a row for each of the first layers."""
    layers = max((part.layers for part in parts), key=len)
    for index, layer in list(enumerate(layers))[:SHOWN_LAYERS]:
        cells = [", ".join(map(_format, sums[index : index + 1])) for sums in values]
        if any(cells):
            frame.rows.append(Row(f"{words} {layer}", cells))


def _describe_meeting(frame: ShownMoment, parts: tuple[Part, ...], _: Earlier) -> None:
    calls = [part.meetings for part in parts]
    if any(calls):
        frame.rows.append(Row("collectives", [_join(names) for names in calls]))
    if any(names != calls[0] for names in calls):
        frame.notes.append(
            "The ranks call other collectives: a rank waits for one that another never calls."
        )
    if not parts[0].number:
        return
    own = [part.own for part in parts]
    exchanged = [part.exchanged for part in parts]
    _add_gradients(frame, parts, "after the exchange,", exchanged)
    if not any(exchanged) or not all(own):
        return
    means = [math.fsum(column) / len(parts) for column in zip(*own, strict=False)]
    if all(_are_close(values, means) for values in exchanged):
        frame.notes.append("Each rank now has the mean of the gradients of all ranks.")
    elif all(_are_close(mine, values) for mine, values in zip(own, exchanged, strict=True)):
        frame.notes.append("Each rank still has its own gradients: nothing was exchanged.")
    elif all(_are_close(values, [x * len(parts) for x in means]) for values in exchanged):
        frame.notes.append("Each rank has the sum of the gradients, not their mean.")


def _describe_step(frame: ShownMoment, parts: tuple[Part, ...], _: Earlier) -> None:
    weights = [part.weights for part in parts]
    if not any(weights):
        return
    cells = [_join(sorted({digest[:4] for digest in hashes.values()})) for hashes in weights]
    frame.rows.append(Row("hashes of the weights", cells))
    differ = [name for name in weights[0] if len({one.get(name) for one in weights}) > 1]
    if differ:
        frame.notes.append(f"The ranks now have other weights: {_join(differ)}.")
    else:
        frame.notes.append("All ranks have the same weights, to the bit.")


def _describe_prints(frame: ShownMoment, parts: tuple[Part, ...], _: Earlier) -> None:
    if not any(part.printed for part in parts):
        return
    frame.rows.append(Row("printed", [" / ".join(part.printed) for part in parts]))
    means = [math.fsum(part.losses) / len(part.losses) for part in parts if part.losses]
    if len(means) < len(parts):
        return
    known = {f"the loss of rank {rank} alone": loss for rank, loss in enumerate(means)}
    known["the mean of the ranks' losses"] = math.fsum(means) / len(means)
    known["the sum of the ranks' losses"] = math.fsum(means)
    for text in {word for part in parts for line in part.printed for word in NUMBER.findall(line)}:
        digits = len(text.partition(".")[2])
        origins = [name for name, value in known.items() if f"{value:.{digits}f}" == text]
        if len(origins) == 1:
            frame.notes.append(f"{text} is {origins[0]}.")


def _are_close(values: Sequence[float], others: Sequence[float]) -> bool:
    size = max(map(abs, (*values, *others)), default=0.0)
    return all(abs(a - b) <= 1e-5 * size for a, b in zip(values, others, strict=False))


def _format(value: float) -> str:
    return f"{value:.4g}"


def _join(words: Iterable[str]) -> str:
    words = list(words)
    more = len(words) - SHOWN_SAMPLES
    shown = ", ".join(words[:SHOWN_SAMPLES])
    if more > 0:
        return f"{shown} and {more} more"
    return shown


DESCRIBE: dict[Moment, Callable[[ShownMoment, tuple[Part, ...], Earlier], None]] = {
    "samples": _describe_samples,
    "loss": _describe_losses,
    "gradients": _describe_gradients,
    "meeting": _describe_meeting,
    "step": _describe_step,
    "shown": _describe_prints,
}
