"""The recommender: what it learns, that its answer is everyone's, what it refuses, what `recommend`
shows.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import audited, refused, run, train
from ratings_files import ITEMS, leave_one_out, ratings_csv, tastes
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.recipes import movielens
from stepladder.recipes.movielens import (
    Config,
    NeuMF,
    build,
    compute_ranking_metrics,
    full_logistic_loss,
)
from stepladder.tools.recommend import recommend
from stepladder.train.trainer import Trainer

SHARED = Path(__file__).parents[3] / "shared" / "data" / "movielens"
SMALL = ("--factors", 8, "--global-batch", 12, "--epochs", 12, "--lr", 0.03)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_one_out(tmp_path_factory.mktemp("loo"))


@pytest.fixture(scope="module")
def stars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ratings_csv(tmp_path_factory.mktemp("stars"))


# -- the models ------------------------------------------------------------------------------------


def test_the_whole_loss_is_the_sampled_one_in_expectation(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepladder.recipes.movielens.NEGATIVE_POWER", 0.0)
    config = Config(data_dir=str(files), factors=4, reg=0.0, negatives=3)
    job = build(config)
    users, rated = job.train_data
    loss, count = full_logistic_loss(job.model, [users[:9], rated[:9]], config)  # type: ignore[arg-type]
    with torch.no_grad():
        scores = job.model(users[:9], rated[:9]).double()
    mean_negative = torch.nn.functional.softplus(scores).mean(1, keepdim=True)
    expected = (rated[:9] * (torch.nn.functional.softplus(-scores) + 3 * mean_negative)).sum()
    assert loss.item() == pytest.approx(float(expected), rel=1e-5)
    assert count == int(rated[:9].sum())


def test_neumf_scores_all_items_as_it_scores_pairs() -> None:
    torch.manual_seed(0)
    model = NeuMF(5, 7, 4)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    users = torch.tensor([3, 0])
    items = torch.arange(7)
    pairs = torch.stack([model.score_pairs(user.repeat(7), items) for user in users])
    torch.testing.assert_close(model(users, torch.zeros(2, 7)), pairs)


def test_negatives_are_new_in_each_pass_and_those_of_its_key(files: Path) -> None:
    job = build(Config(data_dir=str(files), model="neumf", factors=2))
    batch = [part[:20] for part in job.train_data]

    def loss(seed: int) -> float:
        torch.default_generator.manual_seed(seed)
        return job.loss(job.model, batch)[0].item()  # type: ignore[index, union-attr]

    torch.nn.init.normal_(job.model.gmf_items.weight)  # type: ignore[arg-type, union-attr]
    torch.nn.init.normal_(job.model.gmf_users.weight)  # type: ignore[arg-type, union-attr]
    assert loss(1) == loss(1) != loss(2)


def test_a_model_of_nan_hits_nothing(files: Path) -> None:
    job = build(Config(data_dir=str(files), factors=4))
    torch.nn.init.constant_(job.model.items.weight, float("nan"))  # type: ignore[arg-type, union-attr]
    with torch.no_grad():
        sums = compute_ranking_metrics(job.model, list(job.eval_data))
    assert float(sums["hr@10"][0]) == float(sums["ndcg@10"][0]) == 0


def test_cold_users_and_items_fall_back_to_the_rest_of_the_sum(stars: Path) -> None:
    job = build(Config(data_dir=str(stars), task="rating", factors=4))
    items = job.train_data[1]
    cold = [item for item in range(ITEMS) if item not in items.tolist()]
    with torch.no_grad():
        job.model.items.weight[0] = 0  # type: ignore[union-attr, operator, index]
        job.model.item_bias[0] = 0  # type: ignore[union-attr, operator, index]
        scores = job.model(torch.tensor([5]), None)[0]
        base = job.model.mean + job.model.user_bias[5]  # type: ignore[union-attr, operator, index]
    for item in [0, *cold]:
        assert float(scores[item]) == pytest.approx(float(base))


# -- training --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("mf", marks=pytest.mark.slow),
        pytest.param("hybrid", marks=pytest.mark.slow),
        "neumf",
    ],
)
def test_each_model_learns_two_tastes(model: Any, files: Path, tmp_path: Path) -> None:
    config = Config(
        data_dir=str(files), model=model, factors=8, epochs=60, global_batch=20, lr=0.03
    )
    settings = Settings(tmp_path / "run", epochs=60, global_batch=20, progress=False, threads=1)
    result = Trainer(build(config), settings).fit().as_json()
    assert result["metrics"]["hr@10"] >= 0.85, "chance: 0.62"
    assert result["metrics"].keys() == {"hr@10", "ndcg@10", "hr@10_all", "ndcg@10_all", "hr@50_all"}
    assert result["metrics"]["hr@50_all"] == 1, "there are 40 items"


@pytest.mark.ranks
@pytest.mark.slow
def test_exact_gives_the_same_weights_on_any_number_of_processes_and_through_a_kill(
    files: Path, tmp_path: Path
) -> None:
    command = (
        "movielens",
        "--data-dir",
        files,
        "--sync",
        "exact",
        *SMALL,
        "--epochs",
        3,
        "--microbatch",
        3,
    )
    results = [train(*command, "--nproc", n, "--run-dir", n, cwd=tmp_path) for n in (1, 2, 3)]
    killed = train(*command, "--nproc", 2, "--run-dir", "killed", "--fail-at", "1:9", cwd=tmp_path)
    assert len({result["weights_sha256"] for result in [*results, killed]}) == 1
    assert all(result["metrics"] == results[0]["metrics"] for result in [*results, killed])
    audit = audited(tmp_path / "killed")
    assert audit["ok"] and audit["changes"]


@pytest.mark.ranks
def test_exact_sampled_negatives_are_those_of_the_microbatch(files: Path, tmp_path: Path) -> None:
    command = (
        "movielens",
        "--data-dir",
        files,
        "--model",
        "neumf",
        "--sync",
        "exact",
        "--factors",
        2,
    )
    command = (*command, "--global-batch", 80, "--steps", 4)
    results = [train(*command, "--nproc", n, "--run-dir", n, cwd=tmp_path) for n in (1, 3)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


@pytest.fixture(scope="module")
def trained(stars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of task rating."""
    folder = tmp_path_factory.mktemp("trained")
    result = train("movielens", "--data-dir", stars, "--task", "rating", *SMALL, cwd=folder)
    assert result["metrics"]["rmse"] == pytest.approx(result["metrics"]["mse"] ** 0.5)
    return folder / "runs/movielens"


@pytest.mark.slow
@pytest.mark.ranks
def test_recommend_shows_titles_of_what_is_not_rated(trained: Path) -> None:
    command = ("recipe", "recommend", trained, "--user", 37, "--top", 5)
    shown = json.loads(run(*command, "--json", cwd=trained).stdout)
    assert shown.keys() == {"schema", "user", "step", "popular", "items"} and not shown["popular"]
    rated = {1000 + 3 * int(item) for item in [*tastes()[3], 0]}
    assert not rated & {item["movie_id"] for item in shown["items"]}
    assert all(
        item["title"] == f"Film, The {(item['movie_id'] - 1000) // 3}" for item in shown["items"]
    )
    scores = [item["score"] for item in shown["items"]]
    assert scores == sorted(scores, reverse=True)
    lines = run(*command, cwd=trained).stdout.splitlines()
    assert len(lines) == 6 and all(
        item["title"] in line for item, line in zip(shown["items"], lines[1:], strict=True)
    )


@pytest.mark.ranks
def test_a_user_without_training_ratings_is_shown_what_most_rated(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = movielens.make_rating_job

    def without_user_0(config: Config, data: Any) -> Any:
        job = real(config, data)
        users, items, stars = job.train_data
        return replace(job, train_data=(users[users > 0], items[users > 0], stars[users > 0]))

    monkeypatch.setattr(movielens, "make_rating_job", without_user_0)
    shown = recommend(trained, 7, 3, None, None)
    assert shown["popular"] and len(shown["items"]) == 3
    assert shown["items"][0]["score"] == max(item["score"] for item in shown["items"]) >= 10


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, message",
    [
        ({"fold": 5}, "--fold 5 is not from 0 to 4. HINT: --fold 0"),
        ({"fold": -1}, "--fold -1"),
        ({"negatives": -1}, "--negatives -1"),
        (
            {"task": "rating", "model": "neumf"},
            "--task rating has no model neumf. HINT: --task rating --model mf",
        ),
    ],
)
def test_a_setting_that_means_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match="HINT") as refusal:
        Config(**given)
    assert message in str(refusal.value)


@pytest.mark.ranks
def test_bad_data_ends_every_rank_with_one_line(stars: Path, tmp_path: Path) -> None:
    text = (stars / "ratings.csv").read_text().replace("\n", "\nbroken\n", 1)
    (tmp_path / "ratings.csv").write_text(text)
    refused(
        run("train", "movielens", "--data-dir", tmp_path, "--nproc", 2, cwd=tmp_path),
        "line 2 is broken",
    )
    refused(
        run("train", "movielens", "--data-dir", "nowhere", cwd=tmp_path),
        "nowhere holds no ratings.csv",
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.ranks
def test_recommend_refuses_what_it_cannot_show(trained: Path, tmp_path: Path) -> None:
    refused(
        run("recipe", "recommend", trained, "--user", 8, cwd=tmp_path),
        "no user 8 among the 60",
        "--user 7 to 597",
    )
    mlp_run = tmp_path / "other"
    broken = tmp_path / "broken"
    shutil.copytree(trained, mlp_run)
    config = json.loads((mlp_run / "config.json").read_text())
    config["definition"]["recipe"] = "mlp"
    (mlp_run / "config.json").write_text(json.dumps(config))
    shutil.copytree(trained, broken)
    for path in broken.glob("snapshots/*/model.safetensors"):
        path.write_bytes(b"")
    for run_dir, top, titles, data_dir, message in (
        (trained, 0, None, None, "--top 0"),
        (trained, 3, Path("none.csv"), None, "cannot read none.csv: No such file"),
        (trained, 3, None, Path("nowhere"), "nowhere holds no ratings.csv"),
        (mlp_run, 3, None, None, "other is a run of mlp"),
        (tmp_path / "none", 3, None, None, "none is not a run directory"),
        (broken, 3, None, None, "has no good snapshot (step_"),
    ):
        with pytest.raises(InputError) as refusal:
            recommend(run_dir, 7, top, titles, data_dir)
        assert message in str(refusal.value)


# -- the real data ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(not SHARED.is_dir(), reason="the MovieLens files are not beside the repository")
def test_exact_on_movielens_1m(tmp_path: Path) -> None:
    command = ("movielens", "--data-dir", SHARED / "ncf-ml-1m", "--sync", "exact", "--steps", 6)
    results = [train(*command, "--nproc", n, "--run-dir", n, cwd=tmp_path) for n in (1, 2, 3)]
    assert len({result["weights_sha256"] for result in results}) == 1
    assert len({json.dumps(result["metrics"]) for result in results}) == 1


@pytest.mark.parametrize(
    "config", [[], {"epochs": "x"}, {"lr": 1e999}, {"data_dir": 3}, {"task": "²"}, {"factors": [1]}]
)
def test_a_run_directory_with_a_senseless_config_is_one_line(
    config: object, tmp_path: Path
) -> None:
    stored = {"definition": {"recipe": "movielens"}, "config": config}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    refused(
        run("recipe", "recommend", tmp_path, "--user", 1, cwd=tmp_path), f"{tmp_path}", "is damaged"
    )
