"""Rules about snapshots and other files, on recordings made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from check_recordings import SAVED, evidence_of, forward, rules_of, step, steps
from stepladder.tools.check.probe import hooks_snapshot
from stepladder.tools.check.rules.all_rules import apply_rules

LOADS = """import torch
if ready: net.load_state_dict(torch.load(path)["model"])
"""
LOADED = {"k": "load", "path": "/w/s.pt"}


@pytest.mark.parametrize(
    ("text", "before", "after", "found"),
    [
        (LOADS, ["looked"], [], True),
        (LOADS, [], [], True),  # it may load in a run that begins otherwise
        (LOADS, ["looked"], ["load"], False),  # for a test at the end
        ("import torch as t\nwhatever(t.load(path))\n", [], [], True),
        ("torch.save(state, best)\nload(path)\n", ["looked"], [], False),
        ("", ["load"], [], True),
    ],
)
def test_weights_and_an_epoch_are_a_snapshot_where_the_script_may_go_on_from_them(
    text: str, before: list[str], after: list[str], found: bool
) -> None:
    at = {"path": "/w/best.pt", "at": ["train.py", 2, "<module>"]}
    saved = SAVED | {"path": "/w/best.pt", "optimizer": False, "existed": False}
    trained = steps(step(1, state={"w": "m"}))
    events = [*({"k": k} | at for k in before), *trained, saved, *({"k": k} | at for k in after)]
    assert rules_of(events, trained, text=text) == ["incomplete-snapshot"] * found


@pytest.mark.parametrize(
    ("fields", "severity"),
    [
        ({"state": {"w": ""}}, "note"),
        ({"state": {"w": "-"}}, "warning"),  # it cannot be hashed, as where it is sharded
        ({"state": {"w": ""}, "lr": [0.2]}, "warning"),
    ],
)
def test_an_optimizer_without_state_is_hardly_missed(fields: Any, severity: str) -> None:
    saved = SAVED | {"optimizer": False, "existed": False}
    (finding,) = apply_rules(evidence_of([LOADED, *steps(step(1), step(2, **fields)), saved]))
    assert (finding.rule, finding.severity) == ("incomplete-snapshot", severity)


def test_a_snapshot_that_lacks_random_state_alone_is_told_to_add_it_alone() -> None:
    saved = SAVED | {"random": False, "existed": False}
    (finding,) = apply_rules(evidence_of([forward(drops=1), *steps(step(1), step(2)), saved]))
    assert (finding.rule, finding.severity) == ("incomplete-snapshot", "note")
    assert "torch.get_rng_state()" in finding.fix and "optimizer" not in finding.fix


def test_ranks_that_save_one_file_at_once_are_counted_alike_whoever_is_first() -> None:
    def overwritten(first: bool, second: bool) -> str:
        saves = [[SAVED | {"existed": there}, SAVED] for there in (first, second)]
        findings = {f.rule: f for f in apply_rules(evidence_of(*saves))}
        return findings["in-place-snapshot"].evidence

    assert overwritten(False, True) == overwritten(True, False) == overwritten(False, False)
    assert "written 2 times, 1 time over the only copy" in overwritten(False, True)
    assert "written 2 times, 2 times over the only copy" in overwritten(True, True)


def test_a_snapshot_is_not_written_over_the_only_copy_where_another_file_has_its_weights() -> None:
    first = SAVED | {"existed": False}
    assert "in-place-snapshot" in rules_of([first, SAVED])
    assert "in-place-snapshot" not in rules_of([first, SAVED | {"copied": True}])


def test_a_copy_of_a_snapshot_is_known_by_its_weights(tmp_path: Path) -> None:
    path, data = tmp_path / "last.pt", tmp_path / "data.bin"
    state = {"model": nn.Sequential(nn.Linear(8, 8)).state_dict(), "epoch": 1}
    torch.save(state, path)
    hooks_snapshot.saved_pieces[str(path)] = hooks_snapshot.weight_pieces(state)
    data.write_bytes(bytes(range(256)) * 1000)
    assert not hooks_snapshot.has_copy(str(path))
    torch.save(state["model"], tmp_path / "best.pt")
    assert hooks_snapshot.has_copy(str(path))
    del hooks_snapshot.saved_pieces[str(path)]
    assert not hooks_snapshot.has_copy(str(path))


def test_a_file_of_another_kind_that_several_ranks_write_is_a_note() -> None:
    written = {"k": "wrote", "path": "/w/curve.png"}
    (finding,) = apply_rules(evidence_of([written], [written], is_single_process=False))
    assert (finding.rule, finding.severity) == ("many-writers", "note")
    assert rules_of([written], [written | {"path": "/w/curve-1.png"}]) == []


def test_ranks_that_put_the_second_into_a_name_write_one_file_if_they_start_together() -> None:
    ranks = [[{"k": "wrote", "path": f"/w/events.179572077{second}.vm"}] for second in (8, 9)]
    (finding,) = apply_rules(evidence_of(*ranks))
    assert finding.evidence == "ranks 0 and 1 write events.*.vm"
    processes = [[{"k": "wrote", "path": f"/w/events.1795720778.vm.{pid}"}] for pid in (81, 82)]
    assert rules_of(*processes) == []
