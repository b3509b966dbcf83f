"""The page that plays back what each rank of a script did."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from check_recordings import AT, backward, batch, eval_pass, evidence_of, forward, step, train_pass
from processes import refused, run
from stepladder.tools.check.rules.evidence import CHECK_TEXTS
from stepladder.tools.findings.finding import Location
from stepladder.tools.playback.frames import ShownMoment, make_frames
from stepladder.tools.playback.parts import choose_parts, read_parts

CORPUS = Path(__file__).parents[1] / "check_corpus"


def frames_of(*ranks: Sequence[dict[str, Any]], rules: Sequence[str] = ()) -> list[ShownMoment]:
    evidence = evidence_of(*ranks)
    parts = [read_parts(log, evidence) for log in evidence.ranks]
    place = Location(AT[0], AT[1], None)
    findings = [CHECK_TEXTS.finding(rule, place, "seen") for rule in rules]
    return make_frames(choose_parts(parts, steps=2, epochs=2), findings)


def step_with(own: float, exchanged: float, samples: list[int], **fields: Any) -> list[Any]:
    before, after = step(1, **fields)
    leaves = {"k": "leaves", "sums": [own]}
    before["sums"] = [exchanged]
    return [batch(1, samples), forward(), backward(own), leaves, before, after]


def two_ranks(*steps: list[Any]) -> list[list[Any]]:
    start, *_, end = train_pass(1, [])
    return [[start, *events, end] for events in steps]


def test_a_step_is_shown_in_the_order_in_which_it_happens() -> None:
    ranks = two_ranks(step_with(2.0, 3.0, [0, 1]), step_with(4.0, 3.0, [2, 3]))
    frames = frames_of(*ranks)
    assert [frame.title.split()[0] for frame in frames] == ["Each"] * 3 + ["The", "Each"]
    assert {frame.where for frame in frames} == {"epoch 0, step 1"}
    assert [row.cells for row in frames[-1].rows] == [
        ["0, 1", "2, 3"], ["2", "4"], ["2", "4"], ["3", "3"], ["w1", "w1"]
    ]  # fmt: skip
    assert [row.is_new for row in frames[-1].rows] == [False] * 4 + [True]
    assert "Each rank now has the mean of the gradients of all ranks." in frames[3].notes
    assert not any(frame.is_bad for frame in frames)


@pytest.mark.parametrize(
    ("exchanged", "weights", "says"),
    [
        ((2.0, 4.0), ("w1", "w1"), "still has its own gradients"),
        ((6.0, 6.0), ("w1", "w1"), "the sum of the gradients"),
        ((3.0, 3.0), ("w1", "w2"), "The ranks now have other weights: w."),
    ],
)
def test_what_ranks_tell_by_themselves_is_said_and_accuses_nobody(
    exchanged: tuple[float, float], weights: tuple[str, str], says: str
) -> None:
    own = 2.0, 4.0
    steps = [
        step_with(mine, after, [rank], weights=hashed)
        for rank, (mine, after, hashed) in enumerate(zip(own, exchanged, weights, strict=True))
    ]
    frames = frames_of(*two_ranks(*steps))
    assert says in " ".join(text for frame in frames for text in frame.notes)
    assert not any(frame.is_bad for frame in frames)


def test_samples_of_two_ranks_and_of_two_epochs_are_compared() -> None:
    twice = [*train_pass(1, [[0, 1]]), *train_pass(2, [[0, 1]], first=2)]
    notes = [text for frame in frames_of(twice, twice) for text in frame.notes]
    assert [text for text in notes if "same" not in text or "epoch" in text] == [
        "On more than one rank: 0, 1.",
        "On more than one rank: 0, 1.",
        "The same samples as in epoch 0.",
    ]


def test_a_printed_number_is_followed_to_its_losses() -> None:
    steps = [
        [*step_with(loss, 3.0, [rank]), {"k": "print", "text": "loss 3.0000 and 2.00"}]
        for rank, loss in enumerate((2.0, 4.0))
    ]
    shown = frames_of(*two_ranks(*steps))[-1]
    assert sorted(shown.notes) == [
        "2.00 is the loss of rank 0 alone.",
        "3.0000 is the mean of the ranks' losses.",
    ]


def test_a_finding_is_at_the_first_moment_of_its_line() -> None:
    ranks = train_pass(1, [[0], [2]]), train_pass(1, [[1], [3]])
    frames = frames_of(*ranks, rules=["set-epoch"])
    assert [frame.is_bad for frame in frames] == [True, *[False] * (len(frames) - 1)]
    (fault,) = frames[0].faults
    assert fault.rule == "set-epoch"
    assert fault.location == Location(AT[0], AT[1], None)
    elsewhere = CHECK_TEXTS.finding("set-epoch", Location("other.py", 1, None), "seen")
    assert make_frames([], [elsewhere])[-1].faults == [elsewhere]


def test_an_evaluation_is_a_part_of_its_own() -> None:
    log = [*train_pass(1, [[0]]), *eval_pass(2, [[5], [6]]), {"k": "print", "text": "done"}]
    frames = frames_of(log, log)
    assert [frame.where for frame in frames][-2:] == ["epoch 0, after its steps"] * 2
    assert "An evaluation with as many samples: rank 0: 2, rank 1: 2." in frames[-2].notes


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "rule"), [("bikes_spawn.py", None), ("letters_eval.py", "padded-evaluation")]
)
def test_a_script_is_played_back(script: str, rule: str | None, tmp_path: Path) -> None:
    text = (CORPUS / script).read_text()
    (tmp_path / "train.py").write_text(text)
    done = run("playback", "-o", "page.html", "train.py", cwd=tmp_path, timeout=200)
    page = (tmp_path / "page.html").read_text()
    assert done.stdout.endswith("written: page.html\n") and len(page) < 1_000_000
    assert not re.search(r"<script|src=|href=|@import|url\(", page)
    moments = re.findall(r'<p class="where">(\d+) of (\d+): ([^<]*)', page)
    assert len(moments) == int(moments[0][1]) and moments[0][2] == "epoch 0, step 1"
    assert "Each rank now has the mean of the gradients of all ranks." in unescape(page)
    assert re.findall("<b>(.*?)</b>", page) == ([rule] if rule else [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "train.py"]


@pytest.mark.ranks
def test_a_script_that_fails_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise ValueError('bad')\n")
    done = run("playback", "train.py", cwd=tmp_path)
    assert done.returncode == 3 and "ValueError: bad" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.ranks
def test_bad_input_is_one_line(tmp_path: Path) -> None:
    refused(run("playback", "no.py", cwd=tmp_path), "script no.py is not a file")
    (tmp_path / "a.ipynb").write_text("{}")
    for command in ("playback", "run"):
        refused(
            run(command, "a.ipynb", cwd=tmp_path), "a.ipynb is a notebook", "nbconvert --to script"
        )
    (tmp_path / "train.py").write_text("print('nothing is trained')")
    (tmp_path / "page.html").write_text("mine")
    refused(run("playback", "-o", "page.html", "train.py", cwd=tmp_path), "page.html")
    assert (tmp_path / "page.html").read_text() == "mine"
