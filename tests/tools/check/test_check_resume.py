"""What --resume says, on recordings made by hand: the unbroken run, the one that was ended, the
resumed one.
"""

from __future__ import annotations

from typing import Any

from check_recordings import LOADER, backward, evidence_of, forward, log, step, train_pass
from stepladder.tools.check.recording import Recording
from stepladder.tools.check.resume import compare, until_opened

Events = list[dict[str, Any]]
FIRST = [[0, 2], [4, 6]]
SECOND = [[1, 0], [3, 2]]
LOAD = {"k": "load", "path": "s.pt", "weights_only": "True"}
SAVE = {"k": "save", "path": "s.pt"}


def set_epoch(epoch: int) -> dict[str, Any]:
    return {"k": "setepoch", "sampler": 7, "value": epoch}


UNBROKEN: Events = [
    set_epoch(0),
    *train_pass(1, FIRST),
    SAVE,
    set_epoch(1),
    *train_pass(2, SECOND, 3),
    {"k": "exit"},
]
ENDED: Events = [set_epoch(0), *train_pass(1, FIRST), SAVE, set_epoch(1)]


def rules(resumed: Events, unbroken: Events = UNBROKEN, ended: Events = ENDED) -> list[str]:
    runs = [
        Recording([log(0, [LOAD, *events] if events is resumed else events)], 2)
        for events in (ended, resumed)
    ]
    report = compare(evidence_of(unbroken), runs[:1], runs[1])
    return [finding.rule for finding in report.findings]


def test_a_resume_that_goes_on_where_it_stopped_has_no_finding() -> None:
    assert rules([set_epoch(1), *train_pass(1, SECOND, 3), {"k": "exit"}]) == []


def test_a_start_goes_on_from_the_snapshot_that_an_argument_names() -> None:
    runs = [
        Recording([log(0, [{"k": "snapshot", "paths": paths}])], 2)
        for paths in (["a.pt"], ["b.pt", "c.pt"])
    ]
    for path, count in (("a.pt", 1), ("b.pt", 2), ("elsewhere.pt", 2)):
        resumed = Recording([log(0, [LOAD | {"path": path}])], 2)
        assert until_opened(runs, resumed) == runs[:count]


def test_an_epoch_that_is_trained_again_or_skipped_is_named() -> None:
    assert rules([set_epoch(0), *train_pass(1, FIRST)]) == ["resume-epoch"]
    assert rules([set_epoch(2), *train_pass(1, FIRST)]) == ["resume-epoch"]


def test_a_constant_that_set_epoch_was_told_is_the_number_of_no_epoch() -> None:
    """The order of the samples says which epoch it is, or else the number of epochs does."""
    end = {"k": "exit"}
    unbroken = [
        set_epoch(0), *train_pass(1, FIRST), SAVE, set_epoch(0), *train_pass(2, SECOND, 3), end
    ]  # fmt: skip
    ended = [set_epoch(0), *train_pass(1, FIRST), SAVE, set_epoch(0)]
    assert rules([set_epoch(0), *train_pass(1, FIRST), end], unbroken, ended) == ["resume-epoch"]
    assert rules([set_epoch(0), *train_pass(1, SECOND, 3), end], unbroken, ended) == []
    alike = [set_epoch(0), *train_pass(1, FIRST), SAVE, set_epoch(0), *train_pass(2, FIRST, 3), end]
    twice = [set_epoch(0), *train_pass(1, FIRST), set_epoch(0), *train_pass(2, FIRST, 3), end]
    assert rules(twice, alike, ended) == ["resume-epoch"]
    assert rules([set_epoch(0), *train_pass(1, FIRST, 3), end], alike, ended) == []


def test_samples_that_are_trained_again_in_the_same_epoch_are_named() -> None:
    half = train_pass(1, FIRST[:1])[:-1]  # ended in its midst
    assert rules([set_epoch(0), *train_pass(1, FIRST)], ended=[set_epoch(0), *half, SAVE]) == [
        "resume-samples"
    ]


def test_a_learning_rate_that_begins_anew_is_named() -> None:
    resumed = [
        set_epoch(1),
        *(e | {"lr": [0.4]} if e["k"] == "step" else e for e in train_pass(1, SECOND, 3)),
    ]
    assert rules(resumed) == ["resume-lr"]


def test_weights_that_are_not_those_of_the_unbroken_run_are_named() -> None:
    resumed = [
        set_epoch(1),
        *(e | {"after": {"w": "x"}} if e["k"] == "step" else e for e in train_pass(1, SECOND, 3)),
    ]
    assert rules(resumed) == ["resume-differs"]


def saved_after_steps(events: Events, *numbers: int) -> Events:
    """Let the best model be saved after some steps of the second epoch."""
    best = {"k": "save", "path": "best.pt"}
    return [
        each
        for event in events
        for each in (event, *[best] * (event["k"] == "step" and event["step"] in numbers))
    ]


def test_a_file_that_is_saved_after_other_steps_tells_of_a_lost_value() -> None:
    """Such as the best loss: what follows is saved as the best model, and overwrites it."""
    third = train_pass(3, FIRST, 5)
    resumed = [set_epoch(1), *train_pass(1, SECOND, 3), set_epoch(2), *third]
    unbroken = [*UNBROKEN[:-1], set_epoch(2), *third]
    ended = saved_after_steps(ENDED, 1)
    for numbers, found in (((1, 4), []), ((1,), ["resume-differs"])):
        all_saves = saved_after_steps(unbroken, *numbers)
        assert rules(saved_after_steps(resumed, 4), all_saves, ended) == found
    assert rules(resumed, unbroken, ended) == [], "a file by the time of day"


def test_without_a_seed_and_without_set_epoch_the_epochs_are_counted() -> None:
    """Each epoch has the same order, and each run other weights: their number says it."""
    end = {"k": "exit"}
    first_epoch = [
        e | {"after": {"w": "y"}} if e["k"] == "step" else e for e in train_pass(1, FIRST)
    ]
    unbroken = [*train_pass(1, FIRST), SAVE, *train_pass(2, FIRST, 3), end]
    assert rules([*first_epoch, *train_pass(2, FIRST, 3), end], unbroken, [*first_epoch, SAVE]) == [
        "resume-epoch"
    ]
    assert rules([*first_epoch, end], unbroken, [*first_epoch, SAVE]) == []


def windows(*names: str) -> Events:
    """Steps on inputs that no loader has read."""
    return [
        e for n, name in enumerate(names) for e in [forward(rows=[name]), backward(n), *step(n + 1)]
    ]


def test_windows_that_begin_anew_are_named() -> None:
    unbroken = [*windows("a", "b", "c"), SAVE, *windows("d", "e", "f"), {"k": "exit"}]
    ended = [*windows("a", "b", "c"), SAVE]
    assert rules(windows("a", "b", "c"), unbroken, ended) == ["resume-samples"]
    assert rules(windows("d", "e", "f"), unbroken, ended) == []
    alike = [*windows("a", "b", "c"), SAVE, *windows("a", "b", "c"), {"k": "exit"}]
    assert rules(windows("a", "b", "c"), alike, ended) == []


def test_a_stream_that_begins_anew_is_named() -> None:
    start = {"k": "pass", "number": 1, **LOADER, "iterable": True}

    def stream(*names: str) -> Events:
        batches = [
            {"k": "batch", "number": 1, "rows": [n], "indices": None, "size": 1} for n in names
        ]
        return [
            e for name, batch in zip(names, batches, strict=True) for e in [batch, *windows(name)]
        ]

    first, second = stream("a", "b", "c"), stream("d", "e", "f")
    unbroken = [start, *first, SAVE, *second, {"k": "exit"}]
    assert rules([start, *first], unbroken, [start, *first, SAVE]) == ["resume-samples"]
    assert rules([start, *second], unbroken, [start, *first, SAVE]) == []


def test_ranks_that_differ_only_after_a_resume_are_named() -> None:
    resumed = [LOAD, set_epoch(1), *train_pass(1, SECOND, 3)]
    other = [e | {"before": {"w": "x"}} if e["k"] == "prestep" else e for e in resumed]
    for second, found in ((other, ["changed-outside"]), (resumed, [])):
        recording = Recording([log(0, resumed), log(1, second)], 2)
        halted = Recording([log(0, ENDED)], 2)
        report = compare(evidence_of(UNBROKEN, UNBROKEN), [halted], recording)
        assert [finding.rule for finding in report.findings] == found


def test_where_two_runs_differ_anyway_nothing_is_said_of_weights() -> None:
    resumed = [
        set_epoch(1),
        *(e | {"after": {"w": "x"}} if e["k"] == "step" else e for e in train_pass(1, SECOND, 3)),
    ]
    ended = [e | {"after": {"w": "y"}} if e["k"] == "step" else e for e in ENDED]
    halted = Recording([log(0, ended)], 2)
    report = compare(evidence_of(UNBROKEN), [halted], Recording([log(0, [LOAD, *resumed])], 2))
    assert report.findings == []
    assert "seed it" in report.note
