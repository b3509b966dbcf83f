"""What a run is: one owner of its sizes, and what a resumed run must have in common with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from stepladder import Comm, InputError, Job, Recipe, Settings, World, mean_loss
from stepladder.train.run_description import describe_missed_failures
from stepladder.train.run_spec import RunSpec, Sizes, resolve_sizes


@dataclass
class Config:
    lr: float = 0.1
    global_batch: int = 8
    data_dir: str = "here"
    cache_file: str = "there"
    table_path: str = "words.txt"

    outside_definition = ("cache_file",)


def a_job(**parts: Any) -> Job:
    model = torch.nn.Linear(2, 1)
    return Job(**{
        "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": mean_loss(torch.nn.functional.mse_loss), "train_data": (torch.ones(20, 2), torch.ones(20, 1)),
    } | parts)  # fmt: skip


def spec(config: Any, job: Job | None = None, **settings: Any) -> RunSpec:
    return RunSpec.make(
        job or a_job(),
        Settings(Path("runs"), **settings),
        Recipe("mine", config),
        Comm(World(), torch.device("cpu")),
    )


@pytest.mark.parametrize(
    "part",
    [
        {"model": 3},
        {"optimizer": None},
        {"loss": None},
        {"metrics": 4},
        {"derived": 4},
        {"collate": []},
        {"schedule": 3},
        {"schedule_per": "day"},
        {"clip_norm": -1},
        {"clip_norm": "x"},
        {"clip_norm": math.nan},
        {"best": 3},
        {"best": ("loss", "least")},
        {"best": "loss"},
        {"num_workers": -1},
        {"eval_batch": 0},
    ],
    ids=str,
)
def test_a_part_of_a_job_that_is_none_is_refused_by_name(part: dict[str, Any]) -> None:
    (name,) = part
    with pytest.raises(InputError, match=rf"^{name} of the Job is .*HINT: {name}="):
        spec(Config(), a_job(**part), epochs=1)


def test_sizes_are_the_configs_then_the_settings_then_the_defaults() -> None:
    recipe = Recipe("mine", {"epochs": 3, "lr": 0.1})
    assert resolve_sizes(Settings("runs", global_batch=16), recipe) == Sizes(
        epochs=3, global_batch=16, seed=0
    )
    assert resolve_sizes(Settings("runs", epochs=3), recipe).epochs == 3
    assert resolve_sizes(Settings("runs"), recipe.with_sizes(epochs=9)).epochs == 9


@pytest.mark.parametrize("root", ["/", "/usr/.."])
def test_a_root_is_no_run_directory(root: str) -> None:
    with pytest.raises(InputError, match=f"--run-dir {root} is the root of the file system"):
        Settings(root)


def test_a_step_behind_the_last_can_have_no_failure() -> None:
    settings = {"epochs": 2, "fail_at": ((0, 6), (0, 7))}  # 20 samples, 8 per step
    with pytest.raises(
        InputError, match=r"--fail-at 0:7: the run's last step is 6\. HINT: --fail-at 0:6"
    ):
        spec(Config(), **settings)


def test_two_owners_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match="epochs is 3 in the job's Config and 4 in the settings"):
        resolve_sizes(Settings("runs", epochs=4), Recipe("mine", {"epochs": 3}))


def test_the_plan_has_the_configs_global_batch() -> None:
    run = spec(Config(global_batch=10), epochs=2)
    assert (run.plan.global_batch, run.plan.steps_per_epoch, run.num_steps) == (10, 2, 4)
    assert run.definition["global_batch"] == 10


def test_only_what_a_config_says_lies_outside_may_change() -> None:
    defined = spec(Config()).definition
    assert not defined.keys() & {"data_dir", "cache_file"}
    assert defined["table_path"] == "words.txt", "what a name ends in says nothing"
    assert defined["lr"] == 0.1 and defined["recipe"] == "mine"


def test_a_recipe_takes_a_dataclass_or_a_mapping() -> None:
    assert Recipe("mine", Config()).config == Recipe("mine", vars(Config())).config
    with pytest.raises(InputError, match="config of the Recipe is a int"):
        Recipe("mine", 3)


def test_a_failure_that_cannot_come_any_more_is_said(tmp_path: Path) -> None:
    """Its step was done by an earlier attempt. One that has come is not mentioned."""
    settings = Settings(tmp_path, fail_at=((0, 2), (1, 3), (0, 5)))
    (tmp_path / "failed-at-0-2").touch()
    expected = ["  --fail-at 1:3 does nothing: step 3 is done; --fresh begins again"]
    assert describe_missed_failures(settings, 4) == expected
    assert describe_missed_failures(settings, 0) == []
