"""Curves for others than TensorBoard: by rank 0, each point once whatever is trained again, never
in the way.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from installed import install_example, with_first_on_path
from processes import refused, run, train
from ranks import run_ranks
from stepladder import Comm, Job, Settings, Trainer, mean_loss
from stepladder.core.errors import InputError
from stepladder.train.metrics.loggers import Wandb

SMALL = "mlp", "--samples", 256, "--global-batch", 32, "--epochs", 2  # 8 steps an epoch


class Curves:
    """A logger as a user would write one. lost_at: from this step on its server is gone."""

    def __init__(self, lost_at: float = float("inf")) -> None:
        self.points: list[tuple[int, str]] = []
        self.values: dict[str, float] = {}
        self.lost_at = lost_at
        self.closed = 0

    def log(self, step: int, values: dict[str, float]) -> None:
        if step >= self.lost_at:
            raise ConnectionError("the server is gone\nsecond line")
        self.points += [(step, name) for name in values]
        self.values |= values

    def close(self) -> None:
        self.closed += 1


def fit(run_dir: Path, *loggers: Any, comm: Comm | None = None, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = nn.Linear(4, 1)
    job = Job(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        mean_loss(nn.functional.mse_loss),
        (x, x[:, :1]),
        (x, x[:, :1]),
        lambda m, b: {"error": (nn.functional.mse_loss(m(b[0]), b[1], reduction="sum"), len(b[0]))},
    )
    given = Settings(run_dir, global_batch=8, progress=False, threads=1, **settings)
    return Trainer(job, given, comm=comm, loggers=loggers).fit().as_json()


def test_a_user_s_own_object_gets_the_curves(tmp_path: Path) -> None:
    curves = Curves()
    result = fit(tmp_path / "run", curves, epochs=2)
    assert {"train/loss", "train/lr", "eval/error"} == curves.values.keys()
    assert curves.values["eval/error"] == result["metrics"]["error"]
    assert [step for step, name in curves.points if name == "eval/error"] == [8, 16]
    assert curves.closed == 1
    assert list((tmp_path / "run/tensorboard").iterdir()), "TensorBoard always"


def test_steps_that_are_trained_again_give_no_second_point(tmp_path: Path) -> None:
    curves = Curves()
    fit(tmp_path / "run", curves, epochs=2)
    first = list(curves.points)
    for removed in ("snapshots", "result.json", "lock"):  # the last says that there was a snapshot
        path = tmp_path / "run" / removed
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    fit(tmp_path / "run", curves, epochs=3)  # from step 0, for no snapshot is left
    assert curves.points[: len(first)] == first
    new = curves.points[len(first) :]
    assert new and min(step for step, _ in new) > 0
    assert len(set(curves.points)) == len(curves.points)
    assert [step for step, name in curves.points if name == "eval/error"] == [8, 16, 24]


def test_a_damaged_record_of_the_loggers_keeps_nobody_from_training(tmp_path: Path) -> None:
    fit(tmp_path / "run", Curves())
    (tmp_path / "run/loggers.json").write_text('{"Curves-0": {"la')
    curves = Curves()
    assert fit(tmp_path / "run", curves, epochs=2)["steps"] == 16
    assert [step for step, name in curves.points if name == "eval/error"] == [16]


@pytest.mark.parametrize("lost_at", [0, 9])
def test_a_logger_that_raises_is_off_and_training_goes_on(
    lost_at: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = Curves(lost_at)
    good = Curves()
    result = fit(tmp_path / "run", bad, good, epochs=3)
    assert result["steps"] == 24
    lines = [line for line in capfd.readouterr().err.splitlines() if "Curves" in line]
    assert lines == [
        "stepladder: Curves-0 is off, training goes on: ConnectionError: the server is gone"
    ]
    assert bad.closed == 0 and good.closed == 1
    assert [step for step, name in good.points if name == "eval/error"] == [8, 16, 24]


def points_on_a_rank(comm: Comm, run_dir: Path) -> tuple[int, int]:
    curves = Curves()
    fit(run_dir, curves, comm=comm)
    return len(curves.points), curves.closed


@pytest.mark.ranks
def test_only_the_first_rank_logs(tmp_path: Path) -> None:
    first, second = run_ranks(points_on_a_rank, 2, tmp_path / "run")
    assert first[0] > 0 and first[1] == 1
    assert second == (0, 0)


@pytest.mark.slow
def test_what_is_not_installed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(wandb=None, mlflow=None)\n"
    )
    for name in ("wandb", "mlflow"):
        done = run(
            "train", *SMALL, "--log-to", name, cwd=tmp_path, env=with_first_on_path(tmp_path)
        )
        refused(done, f"--log-to {name}: it is not installed", f"pip install 'stepladder[{name}]'")
    assert not (tmp_path / "runs").exists()


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--log-to 'comet' is unknown"):
        Settings(tmp_path, log_to=("comet",))


# -- in another package ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def csv_logger(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables with which the example of docs/report.md is installed."""
    return install_example("csv-logger", tmp_path_factory.mktemp("csv-logger"))


@pytest.mark.slow
def test_a_logger_of_an_installed_package_gets_the_curves(
    csv_logger: dict[str, str], tmp_path: Path
) -> None:
    flags = *SMALL, "--log-to", "csv"
    train(*flags, "--steps", 8, cwd=tmp_path, env=csv_logger)
    result = train(*flags, cwd=tmp_path, env=csv_logger)
    rows = [line.split(",") for line in (tmp_path / "runs/mlp/curves.csv").read_text().splitlines()]
    evaluated = {int(step): float(value) for step, name, value in rows if name == "eval/test_mse"}
    assert list(evaluated) == [8, 16] and evaluated[16] == result["metrics"]["test_mse"]
    assert len({(step, name) for step, name, _ in rows}) == len(rows)
    state = json.loads((tmp_path / "runs/mlp/loggers.json").read_text())["csv"]
    assert (state["starts"], state["last"]["eval/test_mse"]) == (2, 16)


def make_dist_info(folder: Path, name: str, value: str) -> None:
    """A package as pip leaves it, with one logger."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[stepladder.loggers]\ncsv = {value}\n")


@pytest.mark.slow
def test_a_logger_that_cannot_be_imported_is_one_line_before_anything_is_written(
    tmp_path: Path,
) -> None:
    make_dist_info(tmp_path / "broken", "broken", "no_such_module:Logger")
    env = with_first_on_path(tmp_path / "broken")
    done = run("train", *SMALL, "--log-to", "csv", cwd=tmp_path, env=env)
    problem = "--log-to csv: no_such_module:Logger cannot be imported: ModuleNotFoundError"
    refused(done, problem, 'python -c "import no_such_module"')
    assert not (tmp_path / "runs").exists()


ODD_LOGGER = """
class Logger:
    def __init__(self, state, run_dir, config):
        state |= {"object": object(), (1, 2): 3}

    def log(self, step, values):
        pass

    def close(self):
        pass
"""


def test_what_json_cannot_hold_in_a_logger_s_entries_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dist_info(tmp_path, "odd", "odd_logger:Logger")
    (tmp_path / "odd_logger.py").write_text(ODD_LOGGER)
    monkeypatch.syspath_prepend(tmp_path)
    curves = Curves()
    assert fit(tmp_path / "run", curves, log_to=("csv",))["steps"] == 8 and curves.points
    entries = json.loads((tmp_path / "run/loggers.json").read_text())
    assert entries["csv"]["last"]["train/loss"] == 8 and "object" in entries["csv"]


def test_a_name_of_two_loggers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        make_dist_info(tmp_path, name, f"{name}:Logger")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="several meanings: first:Logger, second:Logger"):
        Settings(tmp_path, log_to=("csv",))


# -- the real ones ---------------------------------------------------------------------------------

needs_mlflow = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="mlflow-skinny is not installed"
)
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")


@needs_mlflow
@pytest.mark.slow
@pytest.mark.ranks
def test_mlflow_has_one_run_of_all_starts_and_each_point_once(tmp_path: Path) -> None:
    env = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/store", "MLFLOW_ALLOW_FILE_STORE": "true"}
    train(*SMALL, "--log-to", "mlflow", "--nproc", 2, "--steps", 8, cwd=tmp_path, env=env)
    shutil.rmtree(tmp_path / "runs/mlp/snapshots")  # so the first epoch is trained again
    for trace in ("result.json", "lock"):  # the lock says that there was a snapshot
        (tmp_path / "runs/mlp" / trace).unlink()
    result = train(*SMALL, "--log-to", "mlflow", cwd=tmp_path, env=env)
    stored = list((tmp_path / "store").glob("*/*/metrics"))
    assert len(stored) == 1, "one run"
    lines = (stored[0] / "eval/test_mse").read_text().splitlines()
    assert [int(line.split()[2]) for line in lines] == [8, 16]
    assert float(lines[-1].split()[1]) == result["metrics"]["test_mse"]
    assert (stored[0].parent / "params/global_batch").read_text() == "32"
    assert "status: 3" in (stored[0].parent / "meta.yaml").read_text(), "finished"


@needs_mlflow
@pytest.mark.slow
def test_an_mlflow_server_that_does_not_answer_costs_seconds_and_nothing_else(
    tmp_path: Path,
) -> None:
    done = run(
        "train",
        *SMALL,
        "--log-to",
        "mlflow",
        cwd=tmp_path,
        env={"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
    )
    assert done.returncode == 0, done.stderr
    assert (
        len(
            re.findall(r"^stepladder: mlflow is off, training goes on: ", done.stderr, re.MULTILINE)
        )
        == 1
    )


@needs_wandb
@pytest.mark.slow
@pytest.mark.ranks
def test_wandb_goes_on_with_its_run(tmp_path: Path) -> None:
    flags = *SMALL, "--log-to", "wandb"
    stranger = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    refused(
        run("train", *flags, cwd=tmp_path, env=stranger),
        "--log-to wandb: nobody is logged in",
        "wandb login",
    )
    assert not (tmp_path / "runs").exists()
    env = {"WANDB_MODE": "offline"}
    train(*flags, "--nproc", 2, "--steps", 8, cwd=tmp_path, env=env)
    train(*flags, cwd=tmp_path, env=env)
    run_id = json.loads((tmp_path / "runs/mlp/loggers.json").read_text())["wandb"]["id"]
    files = sorted((tmp_path / "runs/mlp/wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2, "one for each start, of one run"
    assert all(b"eval/test_mse" in file.read_bytes() for file in files)


def test_wandb_gets_no_secret_that_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uploads the command line."""
    arguments: list[list[str]] = []
    fake_wandb = SimpleNamespace(
        init=lambda **_: arguments.append(sys.argv), Settings=lambda **_: None
    )
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb)
    monkeypatch.setattr(sys, "argv", ["train", "--hf-token", "abc"])
    Wandb({}, tmp_path, {})
    assert arguments == [["train", "--hf-token", "***"]] and sys.argv[-1] == "abc"


FULL = """
import resource
from pathlib import Path
from stepladder.train.metrics.loggers import SafeLogger, TensorBoard
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
logger = SafeLogger("tensorboard", lambda: TensorBoard(Path("events")), {}, lambda: None)
for step in range(1, 100):
    logger.log(step, {"loss": 1.0})
logger.close()
"""


def test_a_disk_that_takes_no_more_ends_tensorboard_with_a_line(tmp_path: Path) -> None:
    done = run(sys.executable, "-c", FULL, cwd=tmp_path, command=())
    message = (
        "stepladder: tensorboard is off, training goes on: OSError: [Errno 27] File too large\n"
    )
    assert (done.returncode, done.stderr) == (0, message)
