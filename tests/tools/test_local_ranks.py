"""Ranks that a tool starts: a signal ends the tool too, whatever its ranks were about to do."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from stepladder.core.settings import Settings, TrainRequest
from stepladder.tools.trial import ranks as local_ranks
from stepladder.train.job_file import RECIPES_FOLDER


def test_a_signal_that_comes_as_the_ranks_end_by_themselves_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_local(group: Any, _ranks: int) -> int:
        group.stop_signal = signal.SIGTERM
        return 0

    class Group:
        stop_signal = 0

        def __init__(self, *_: object) -> None: ...

    monkeypatch.setattr(local_ranks, "LocalGroup", Group)
    monkeypatch.setattr(local_ranks, "run_local", run_local)
    with pytest.raises(KeyboardInterrupt):
        local_ranks.run_on_ranks(lambda: 0, 1, TrainRequest(Path("job.py"), {}, Settings("run")))


def test_the_command_that_shows_a_failure_has_the_folder_and_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(
        tmp_path / "run", steps=70, sync="exact", microbatch=4, compile=True, threads=2
    )
    config = {"lr": 0.5, "dropout": False, "api_token": "hidden"}
    request = TrainRequest(tmp_path / "jobs" / "my job.py", config, settings)
    command = local_ranks.make_train_command(request, 2)
    assert command.startswith(
        "stepladder train 'jobs/my job.py' --microbatch 4 --sync exact --compile --lr 0.5 "
    )
    assert (
        " --no-dropout --api-token " in command
        and "hidden" not in command
        and command.endswith(" --nproc 2")
    )
    recipe = TrainRequest(RECIPES_FOLDER / "mlp.py", {}, Settings("run"))
    assert local_ranks.make_train_command(recipe, 1) == "stepladder train mlp --nproc 1"
