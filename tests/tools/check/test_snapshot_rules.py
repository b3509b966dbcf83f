"""Rules about snapshots and other files, on recordings made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from check_recordings import MOVED, SAVED, evidence_of, forward, rules_of, step, steps
from stepladder.tools.check.rules.all_rules import apply_rules

RESUMES = """if os.path.exists(path):
    net.load_state_dict(torch.load(path)["model"])
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (RESUMES, ["incomplete-snapshot"]),
        ("if args.resume:\n    load_checkpoint(args.resume)\n", ["incomplete-snapshot"]),
        ("if os.path.exists(path):\n    os.remove(path)\nmodel = torch.load(path)\n", []),
    ],
)
def test_the_best_model_is_a_snapshot_where_the_script_goes_on_from_it(
    text: str, found: list[str]
) -> None:
    looked = {"k": "looked", "path": "/w/best.pt", "at": ["train.py", 1, "<module>"]}
    best = SAVED | {"path": "/w/best.pt", "optimizer": False, "existed": False}
    trained = steps(step(1, state={"w": "m"}))
    assert rules_of([looked, *trained, best], trained, text=text) == found
    both = [looked, *trained, best, SAVED | {"path": "/w/last.pt", "existed": False}]
    assert rules_of(both, trained, text="if args.resume:\n    torch.load(args.resume)\n") == []


STORES = 'state = {"best": best}'


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ([STORES, "if new > best:", "    best = new"], True),
        ([STORES, "best = max(best, new)"], True),
        (["if new > best:", f"    {STORES}", "    best = new"], True),
        (["best = max(best, new)", STORES], False),
        (["if new > best:", "    best = new", STORES, "best = max(best, 0)"], False),
        (["if best > new:", f"    {STORES}", "else:", "    best = new"], False),
        ([STORES, "best = new"], False),
        (["for batch in loader:", f"    {STORES}", "best = max(best, new)"], False),
    ],
)
def test_a_best_value_that_is_compared_after_it_is_stored_is_named(
    body: list[str], found: bool
) -> None:
    saved = [SAVED | {"path": "/w/s.tmp", "keys": ["best"]}, MOVED]
    text = "\n    ".join(["for epoch in range(9):", *body])
    named = apply_rules(evidence_of([*steps(step(1)), *saved], [], text=text))
    assert ["the best value" in finding.what for finding in named] == [True] * found


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
    (finding,) = apply_rules(evidence_of([*steps(step(1), step(2, **fields)), saved]))
    assert (finding.rule, finding.severity) == ("incomplete-snapshot", severity)


def test_a_snapshot_that_lacks_random_state_alone_is_told_to_add_it_alone() -> None:
    saved = SAVED | {"random": False, "existed": False}
    (finding,) = apply_rules(evidence_of([forward(drops=1), *steps(step(1), step(2)), saved]))
    assert (finding.rule, finding.severity) == ("incomplete-snapshot", "note")
    assert "torch.get_rng_state()" in finding.fix and "optimizer" not in finding.fix


RESUMES = """if args.resume:
    model.load_state_dict(torch.load(path))
torch.save(model.state_dict(), path)
"""


def test_weights_are_a_snapshot_where_the_script_resumes_from_them() -> None:
    fields = {"optimizer": False, "position": False, "existed": False, "bare": True}
    saved = SAVED | fields | {"at": ["train.py", 3, ""]}
    trained = steps(step(1, state={"w": "m"}))
    (finding,) = apply_rules(evidence_of([*trained, saved], trained, text=RESUMES))
    assert finding.rule == "incomplete-snapshot"
    assert "holds weights; missing: the optimizer (it has state" in finding.evidence
    assert rules_of([*trained, saved], trained, text=RESUMES.replace("resume", "test")) == []


def test_ranks_that_save_one_file_at_once_are_counted_alike_whoever_is_first() -> None:
    def overwritten(first: bool, second: bool) -> str:
        saves = [[SAVED | {"existed": there}, SAVED] for there in (first, second)]
        findings = {f.rule: f for f in apply_rules(evidence_of(*saves))}
        return findings["in-place-snapshot"].evidence

    assert overwritten(False, True) == overwritten(True, False) == overwritten(False, False)
    assert "written 2 times, 1 time over the only copy" in overwritten(False, True)
    assert "written 2 times, 2 times over the only copy" in overwritten(True, True)


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


BY_LOCAL_RANK_0 = """
gpu = int(os.environ["LOCAL_RANK"])
def keep(model):
    ...
    torch.save(model, path)
if gpu == 0:
    keep(model)
"""


@pytest.mark.parametrize(
    ("text", "asked", "severity"),
    [
        (BY_LOCAL_RANK_0, "LOCAL_WORLD_SIZE", "note"),
        (BY_LOCAL_RANK_0 + "# dist.get_rank()", "LOCAL_WORLD_SIZE", "note"),
        (BY_LOCAL_RANK_0.replace("if gpu == 0", "if ready"), "LOCAL_WORLD_SIZE", "error"),
        (BY_LOCAL_RANK_0, "get_rank", "error"),
    ],
)
def test_a_file_of_local_rank_0_is_a_note_where_the_script_is_for_one_node(
    text: str, asked: str, severity: str
) -> None:
    questions = [{"k": "readrank", "name": name} for name in ("LOCAL_RANK", asked)]
    saved = [*questions, SAVED | {"existed": False}]
    findings = apply_rules(evidence_of(saved, saved, text=text))
    assert [(f.rule, f.severity) for f in findings if f.rule == "many-writers"] == [
        ("many-writers", severity)
    ]
