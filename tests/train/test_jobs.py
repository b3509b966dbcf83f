"""The user's own job file, the recipes, and the many ways to start the same run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from processes import JOBS, SECONDS, refused, run, train

pytestmark = pytest.mark.ranks

OWN = JOBS / "augmented.py"
STEPS_PER_EPOCH = 4  # 40 samples, 12 per step


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# -- the settings of a job file --------------------------------------------------------------------


def test_the_config_of_a_job_file_becomes_flags(tmp_path: Path) -> None:
    shown = run("train", OWN, "--help", cwd=tmp_path).stdout
    for flag in (
        "--augment / --no-augment",
        "--activation [tanh|relu]",
        "--workers INTEGER",
        "[default: tanh]",
    ):
        assert flag in shown
    train(OWN, "--no-augment", "--activation", "relu", "--epochs", 1, cwd=tmp_path)
    config = json.loads((tmp_path / "runs/augmented/config.json").read_text())["config"]
    assert (config["augment"], config["activation"], config["epochs"], config["workers"]) == (
        False,
        "relu",
        1,
        0,
    )
    refused(
        run("train", OWN, "--activation", "relu", cwd=tmp_path),
        "augment=False",
        "HINT: --no-augment to resume",
    )
    refused(run("train", OWN, "--activation", "gelu", cwd=tmp_path), "'gelu'", "'tanh', 'relu'")


def test_a_field_named_as_a_flag_of_train_is_refused_at_load(tmp_path: Path) -> None:
    clash = OWN.read_text().replace(
        "workers: int = 0", "workers: int = 0\n    precision: str = 'low'"
    )
    (tmp_path / "clash.py").write_text(clash)
    for args in ((), ("--help",)):
        refused(run("train", "clash.py", *args, cwd=tmp_path), "Config.precision", "--precision")


# -- its data, its loss, its schedule --------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[int, int], tuple[dict[str, Any], Path]]:
    """The same job on 1 and 2 processes with 0 and 2 workers each: result and folder."""
    done = {}
    for nproc, workers in ((1, 0), (1, 2), (2, 0), (2, 2)):
        folder = tmp_path_factory.mktemp(f"own-{nproc}-{workers}")
        (folder / "seen").mkdir()
        options = ("--nproc", nproc, "--workers", workers, "--seen-dir", "seen", "--microbatch", 3)
        done[nproc, workers] = train(OWN, *options, cwd=folder), folder
    return done


Runs = dict[tuple[int, int], tuple[dict[str, Any], Path]]


def test_an_item_is_the_same_on_any_number_of_processes_and_workers_and_new_in_each_epoch(
    runs: Runs,
) -> None:
    items_read = []
    for _, folder in runs.values():
        items = [
            json.loads(line)
            for path in (folder / "seen").iterdir()
            for line in path.read_text().splitlines()
        ]
        assert sorted(index for index, _ in items) == sorted(2 * list(range(40)))
        assert len({x for _, x in items}) == 80
        items_read.append(sorted(items))
    assert all(items == items_read[0] for items in items_read)


def test_a_mean_loss_on_a_short_last_batch_counts_with_its_true_weight(runs: Runs) -> None:
    curves = []
    for _, folder in runs.values():
        losses = [line["loss"] for line in lines(folder / "runs/augmented") if "loss" in line]
        assert len(losses) == 2 * STEPS_PER_EPOCH
        curves.append(losses)
        mean = next(
            line["train_loss"] for line in lines(folder / "runs/augmented") if "train_loss" in line
        )
        assert mean == pytest.approx((12 * sum(losses[:3]) + 4 * losses[3]) / 40)
    assert all(losses == pytest.approx(curves[0], rel=1e-5) for losses in curves)


def test_a_schedule_per_epoch_moves_only_there(runs: Runs) -> None:
    for _, folder in runs.values():
        rates = [line["lr"] for line in lines(folder / "runs/augmented") if "lr" in line]
        assert rates == [0.05] * STEPS_PER_EPOCH + [0.025] * STEPS_PER_EPOCH


def test_an_evaluation_of_equal_weights_is_equal_to_the_bit_on_any_number_of_processes(
    tmp_path: Path,
) -> None:
    options = (OWN, "--lr", 0, "--epochs", 1)
    results = [train(*options, "--nproc", n, "--run-dir", n, cwd=tmp_path) for n in (1, 2, 3)]
    assert len({result["weights_sha256"] for result in results}) == 1
    assert [result["metrics"] for result in results] == [results[0]["metrics"]] * 3


# -- a fixed batch per process ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_batch_per_rank_prints_its_effective_values_and_resumes_only_on_the_same_size(
    tmp_path: Path,
) -> None:
    options = (OWN, "--batch-per-rank", 5, "--lr-scale", "linear", "--warmup-steps", 4, "--lr", 0.1)
    done = run("train", *options, "--nproc", 2, "--steps", 6, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "global batch 10, " in done.stderr
    assert "learning rate 0.2 at the start (batch 5 per process, --lr-scale linear)" in done.stderr
    assert "after a linear warm-up of 4 steps" in done.stderr
    rates = [line["lr"] for line in lines(tmp_path / "runs/augmented") if "lr" in line]
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.1, 0.1])  # then halved by the schedule
    refused(run("train", *options, cwd=tmp_path), "global_batch=10", "5", "HINT: --nproc 2")
    resumed = run("train", *options, "--nproc", 2, cwd=tmp_path)
    assert resumed.returncode == 0 and "resumed after step 6" in resumed.stderr, resumed.stderr
    assert "learning rate 0.1 after step 6 (batch" in resumed.stderr
    assert "warm-up" not in resumed.stderr


# -- recipes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_recipe_mlp_falls_to_the_noise_floor(tmp_path: Path) -> None:
    result = train("mlp", "--nproc", 2, cwd=tmp_path)
    assert 0.009 < result["metrics"]["test_mse"] < 0.02  # the noise is 0.1 squared
    first = next(line["loss"] for line in lines(tmp_path / "runs/mlp"))
    assert first > 10 * result["train_loss"]


@pytest.mark.slow
def test_recipe_digits_reads_digits(tmp_path: Path) -> None:
    assert train("digits", "--nproc", 2, cwd=tmp_path)["metrics"]["test_accuracy"] >= 0.97


@pytest.mark.slow
def test_recipe_digits_moves_each_image_alike_on_any_number_of_processes(tmp_path: Path) -> None:
    exact = ("digits", "--sync", "exact", "--steps", 6)
    results = [train(*exact, "--nproc", n, "--run-dir", n, cwd=tmp_path) for n in (1, 2)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


def test_images_of_recipe_digits_move_by_one_pixel_at_most() -> None:
    from stepladder.recipes.digits import shift_images

    image = torch.arange(1.0, 65).view(8, 8)
    padded = F.pad(image, (1, 1, 1, 1))
    places = {
        (down, right): padded[down : down + 8, right : right + 8]
        for down in range(3)
        for right in range(3)
    }
    shifted = shift_images(image.expand(200, 1, 8, 8))
    where = [
        {offset for offset, at in places.items() if torch.equal(sample[0], at)}
        for sample in shifted
    ]
    assert all(len(sample) == 1 for sample in where)
    assert set.union(*where) == places.keys(), "200 draws meet all nine"


@pytest.mark.slow
def test_recipe_mnist_reaches_99_percent_in_two_epochs(tmp_path: Path, mnist_dir: Path) -> None:
    result = train(
        "mnist", "--data-dir", mnist_dir, "--nproc", 2, cwd=tmp_path, timeout=2 * SECONDS
    )
    assert result["metrics"]["test_accuracy"] >= 0.99


# -- ways to start ---------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from stepladder import Settings, Trainer
from stepladder.recipes.mlp import Config, build

def fit():
    config = Config(samples=300, epochs=2, global_batch=64)
    settings = Settings(Path(sys.argv[1]), epochs=2, global_batch=64)
    result = Trainer(build(config), settings).fit().as_json()
    sys.stdout.write(f"{result['world_size']} {result['weights_sha256']}\\n")  # in one piece

def rank_main(rank, store):
    import torch.distributed
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    fit()
    torch.distributed.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    if len(sys.argv) == 2:
        fit()
    else:
        import torch.multiprocessing
        torch.multiprocessing.spawn(rank_main, (sys.argv[2],), nprocs=2)
"""
MLP = ("train", "mlp", "--samples", 300, "--epochs", 2, "--global-batch", 64)
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The weights of `train mlp --nproc N`, by N."""
    folder = tmp_path_factory.mktemp("expected")
    return {
        n: train(*MLP[1:], "--nproc", n, "--run-dir", n, cwd=folder)["weights_sha256"]
        for n in (1, 2)
    }


@pytest.mark.parametrize(
    "nproc, how", [(1, "python"), pytest.param(2, "torchrun", marks=pytest.mark.slow), (2, "spawn")]
)
def test_a_script_finds_itself_however_it_was_started(
    nproc: int, how: str, expected: dict[int, str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    args = ["script.py", "run", *([tmp_path / "store"] if how == "spawn" else [])]
    done = run(*args, cwd=tmp_path, command=TORCHRUN if how == "torchrun" else PYTHON)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == nproc * [f"{nproc} {expected[nproc]}"]
