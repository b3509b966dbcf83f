"""Random numbers that several ranks or workers draw alike."""

from __future__ import annotations

from typing import Any

from stepladder.tools.check.recording import Event
from stepladder.tools.check.rules.base import Faults, Seen


def same_augmentation(seen: Seen) -> Faults:
    """The same random numbers for other samples, on two ranks or two workers."""
    states: dict[tuple[str, str], tuple[int, int, list[int]]] = {}
    for log in seen.run.ranks:
        for event in [*log.of("fetch"), *[e for e in log.workers if e["k"] == "fetch"]]:
            for name, state in event["used"].items():
                key = (name, state)
                who = (log.rank, event["worker"], event["indices"])
                if key not in states:
                    states[key] = who
                elif states[key][:2] != who[:2] and states[key][2] != who[2]:
                    first = states[key]
                    yield seen.fault(
                        "same-augmentation",
                        drawn_at(seen) or event["at"],
                        f"{named(first)} and {named(who)} draw the same random "
                        f"numbers ({name} generator, state {state}) for samples {first[2][:3]} and {who[2][:3]}",
                    )
                    return
    yield from same_draws(seen)


def drawn_at(seen: Seen) -> Any:
    """The line of a data set that draws, else where the loader is made."""
    draws = [
        e
        for log in seen.run.ranks
        for e in [*log.of("draw"), *log.workers]
        if e["k"] == "draw" and e["at"]
    ]
    inside = [e["at"] for e in draws if e["at"][2] == "__getitem__"]
    return next(iter(inside), None) or next(
        (one.built for log in seen.run.ranks for one in log.training), None
    )


def named(who: tuple[int, int, list[int]]) -> str:
    return f"rank {who[0]}" + (f"'s worker {who[1]}" if who[1] >= 0 else "")


AUGMENTS = (
    "augment",
    "jitter",
    "noise",
    "noisy",
    "crop",
    "flip",
    "mixup",
    "cutout",
    "cutmix",
    "transform",
    "corrupt",
    "perturb",
    "mask_tokens",
)


def same_draws(seen: Seen) -> Faults:
    """Drawn in the training loop itself, or in a function that is named after augmentation."""
    if not seen.many:
        return
    logs = [loop_draws(log.events) for log in seen.run.ranks[:2]]
    pairs = [(a, b) for a, b in zip(*logs, strict=False) if a["at"] == b["at"]]
    same = [(a, b) for a, b in pairs if a["state"] == b["state"] and a["state"]]
    if len(same) >= 3 and len(same) == len(pairs):
        yield seen.fault(
            "same-augmentation",
            same[0][0]["at"],
            f"rank 0 and rank 1 draw the same random numbers in {len(same)} "
            f"of {len(pairs)} draws (state {same[0][0]['state']} before the first)",
        )


def loop_draws(events: list[Event]) -> list[Event]:
    """Draws between a batch and its backward pass, and those of functions that augment."""
    found, after_batch = [], False
    for event in events:
        if event["k"] == "batch":
            after_batch = True
        elif event["k"] in ("backward", "pass", "endpass", "step"):
            after_batch = False
        elif event["k"] == "draw" and event["fn"] not in ("randperm",):
            function = (event["at"] or ["", 0, ""])[2].lower()
            if after_batch or any(word in function for word in AUGMENTS):
                found.append(event)
    return found
