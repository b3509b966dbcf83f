"""Recordings made by hand, for rules that are pure functions of them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepladder.tools.check.recording import RankLog, Recording
from stepladder.tools.check.rules.all_rules import apply_rules
from stepladder.tools.check.rules.evidence import RunEvidence
from stepladder.tools.check.script_source import ScriptSource, SourceFile
from stepladder.tools.probe.events import ProbeEvent

AT = ["train.py", 5, "train"]
LOADER = {
    "loader": 1,
    "loader_class": "DataLoader",
    "sampler": "DistributedSampler",
    "sampler_id": 7,
    "settable": True,
    "data_settable": False,
    "shuffle": True,
    "distributed": True,
    "replicas": 2,
    "iterable": False,
    "drop_last": False,
    "sampler_drop": False,
    "batch_size": 2,
    "workers": 0,
    "generator": False,
    "length": 8,
    "batches": 2,
    "fingerprint": "p",
    "dataset": "Data",
    "base_length": 8,
}


def source(text: str = "") -> ScriptSource:
    return ScriptSource((SourceFile(Path("train.py"), "train.py", ast.parse(text), text),))


def log(rank: int, events: Sequence[dict[str, Any]]) -> RankLog:
    values = [{"at": AT, **event, "n": number} for number, event in enumerate(events, 1)]
    return RankLog(rank, [ProbeEvent.from_values(event) for event in values])


def evidence_of(*ranks: Sequence[dict[str, Any]], text: str = "", **fields: Any) -> RunEvidence:
    logs = [log(rank, events) for rank, events in enumerate(ranks)]
    return RunEvidence(Recording(logs, len(ranks), **fields), source(text))


def rules_of(*ranks: Sequence[dict[str, Any]], text: str = "", **fields: Any) -> list[str]:
    return sorted(
        {finding.rule for finding in apply_rules(evidence_of(*ranks, text=text, **fields))}
    )


def batch(number: int, indices: list[int]) -> dict[str, Any]:
    rows = [f"row {index}" for index in indices]
    return {
        "k": "batch",
        "number": number,
        "indices": indices,
        "rows": rows,
        "size": len(indices),
        "states": {},
    }


def forward(**fields: Any) -> dict[str, Any]:
    defaults = {
        "k": "forward",
        "wrapped": "DistributedDataParallel",
        "rows": [],
        "root": 1,
        "model_class": "DistributedDataParallel",
        "grad": True,
        "size": 32,
        "training": True,
        "moded": 0,
        "moded_on": 0,
        "norms": 0,
        "drops": 0,
        "sync": True,
    }
    return {**defaults, **fields}


def backward(loss: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {"k": "backward", "loss": loss, "alive": 0, **fields}


def step(number: int, weights: str = "", grads: str = "g", **fields: Any) -> list[dict[str, Any]]:
    weights = weights or f"w{number}"
    before = {
        "k": "prestep",
        "optimizer": 0,
        "step": number,
        "clean": True,
        "grads": {"w": grads},
        "norm": 1.0,
        "matrix_norm": 1.0,
    }
    before |= {"ptrs": [1], "before": {"w": f"w{number - 1}"}, "ids": {"w": 1}, "frozen_names": []}
    after = {"k": "step", "optimizer": 0, "step": number, "lr": [0.1], "numel": 100, "frozen": 0}
    after["first_lr"] = 0.1
    after |= {
        "after": {"w": weights},
        "state": {"w": ""},
        "shapes": [[10, 10]],
        "unheld": [],
        "strangers": 0,
        "held": 1,
    }
    return [
        before | {k: v for k, v in fields.items() if k in before},
        after | {k: v for k, v in fields.items() if k in after},
    ]


def train_pass(
    number: int, batches: list[list[int]], first: int = 1, **fields: Any
) -> list[dict[str, Any]]:
    """A pass with a step for each batch."""
    events: list[dict[str, Any]] = [{"k": "pass", "number": number, **LOADER, **fields}]
    for index, indices in enumerate(batches):
        events += [
            batch(number, indices),
            forward(),
            backward(1 / (first + index)),
            *step(first + index),
        ]
    return [*events, {"k": "endpass", "number": number, "cut": False, "steps": len(batches)}]


def eval_pass(number: int, batches: list[list[int]], **fields: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"k": "pass", "number": number, **LOADER, "shuffle": False, **fields}
    ]
    for indices in batches:
        events += [batch(number, indices), forward(grad=False)]
    return [*events, {"k": "endpass", "number": number, "cut": False, "steps": 0}]


Events = list[dict[str, Any]]
ZERO = [[0, 2], [4, 6]]
ONE = [[1, 3], [5, 7]]


def epochs(rank: list[list[int]], second_epoch: list[list[int]], **loader_fields: Any) -> Events:
    return [*train_pass(1, rank, **loader_fields), *train_pass(2, second_epoch, 3, **loader_fields)]


def steps(*steps_of_events: list[dict[str, Any]], between: Any = None) -> Events:
    return [
        event
        for events in steps_of_events
        for event in [
            forward(),
            backward(len(events) + events[0]["step"]),
            *(between or []),
            *events,
        ]
    ]


SAVED = {
    "k": "save",
    "path": "/w/s.pt",
    "existed": True,
    "model": True,
    "optimizer": True,
    "schedule": False,
    "random": True,
    "position": True,
    "prefixed": False,
    "bare": False,
    "keys": ["model"],
}
COLL = {"k": "coll", "op": "all_reduce", "group": "", "shape": [1], "count": 1, "ptr": 5}
MOVED = {"k": "moved", "source": "/w/s.tmp", "target": "/w/s.pt"}
PLAIN = {"wrapped": "", "class": "Net"}
ALONE = [forward(**PLAIN), backward(2), *step(1), forward(**PLAIN), backward(3), *step(2)]
