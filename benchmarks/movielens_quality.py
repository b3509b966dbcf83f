"""python benchmarks/movielens_quality.py --data-dir DIR [--write] [--quick]

How good are the recommender's models, beside published numbers? DIR holds the folders
ml-latest-small and ncf-ml-1m.

Ranking: `stepladder train movielens` with its defaults for each model, on 2 processes, then EASE in
closed form. Rating: all five folds, RMSE of each fold and their mean, and the biases alone on the
same folds. Published numbers are quoted with their sources. --quick is a trial of the script, one
epoch and one fold: it gives no result."""

import argparse
import sys
import time
from pathlib import Path
from statistics import mean

import torch
from commands import Failed, result_of
from report import Report, cores, table

PUBLISHED = [
    ["MF, 192 dimensions (Rendle et al. 2020)", "0.7294", "0.4523", "", ""],
    ["NeuMF, 16 factors, no pre-training (He et al. 2017)", "0.696", "0.420", "", ""],
]
BAR = (0.7294, 0.4523)


def train(data_dir: Path, *flags: object) -> tuple[dict[str, float], float]:
    """Metrics of one run, and its seconds as a whole process. Raises Failed."""
    result, seconds = result_of("train", "movielens", "--data-dir", data_dir.resolve(), *flags)
    print(
        f"{' '.join(map(str, flags))}: {result['metrics']}, {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return result["metrics"], seconds


def closed_form(data_dir: Path) -> tuple[dict[str, float], float]:
    """EASE, scored by the same metrics."""
    from stepladder.data.movielens.leave_one_out import read_leave_one_out
    from stepladder.train.metrics.ranking import fit_ease, ranking_metrics

    data = read_leave_one_out(data_dir)
    rated = torch.from_numpy(data.rated_matrix())
    start = time.perf_counter()
    scores = rated.float() @ fit_ease(rated)
    seconds = time.perf_counter() - start
    sums = ranking_metrics(
        scores, torch.from_numpy(data.held_out), torch.from_numpy(data.negatives), rated
    )
    return {name: float(total) / count for name, (total, count) in sums.items()}, seconds


def biases(data_dir: Path, fold: int) -> float:
    """RMSE of mean + user bias + item bias, on the recipe's fold: its model before training."""
    from stepladder.recipes.movielens import Config, build

    job = build(Config(data_dir=str(data_dir), task="rating", fold=fold))
    job.model.users.weight.data.zero_()
    with torch.no_grad():
        total, count = job.metrics(job.model, list(job.eval_data))["mse"]
    return (float(total) / count) ** 0.5


def as_row(name: str, metrics: dict[str, float], seconds: float) -> list[str]:
    return [
        name,
        *(f"{metrics[key]:.4f}" for key in ("hr@10", "ndcg@10", "hr@10_all")),
        f"{seconds:.0f}",
    ]


def ranking_table(rows: list[list[str]]) -> str:
    """Make a table of the rankings, with the published numbers beside them."""
    return table(
        ["model", "HR@10", "NDCG@10", "HR@10, whole catalogue", "seconds"], rows + PUBLISHED
    )


def reached(model: str, metrics: dict[str, float], margin: float) -> str:
    hits, gains = (metrics[key] for key in ("hr@10", "ndcg@10"))
    passed = hits >= BAR[0] + margin and gains >= BAR[1] + margin
    return f"- {'PASS' if passed else 'FAIL'}: {model}: {hits:.4f} / {gains:.4f} (bar: both + {margin})"


def ranking(large: Path, few: tuple[str, ...]) -> tuple[str, list[str]]:
    """The table of the leave-one-out split, and its bars."""
    metrics = {}
    for model in ("mf", "hybrid", "neumf"):
        metrics[model] = train(large, "--task", "ranking", "--model", model, "--nproc", "2", *few)
    metrics["EASE, closed form"] = closed_form(large)
    shown = ranking_table([as_row(name, *values) for name, values in metrics.items()])
    return shown, [
        reached("mf", metrics["mf"][0], 0.0),
        reached("hybrid", metrics["hybrid"][0], 0.006),
    ]


def rating(small: Path, few: tuple[str, ...]) -> tuple[str, str]:
    """The table of the five folds, and its bar; with --quick one fold."""
    folds = [train(small, "--task", "rating", "--fold", k, *few) for k in range(1 if few else 5)]
    errors = [metrics["rmse"] for metrics, _ in folds]
    plain = [biases(small, k) for k in range(len(folds))]
    rows = [
        [str(k), f"{plain[k]:.4f}", f"{errors[k]:.4f}", f"{folds[k][1]:.0f}"]
        for k in range(len(folds))
    ]
    rows.append(
        ["mean", f"{mean(plain):.4f}", f"{mean(errors):.4f}", f"{mean(s for _, s in folds):.0f}"]
    )
    passed = mean(errors) <= 0.86
    verdict = f"- {'PASS' if passed else 'FAIL'}: mean RMSE {mean(errors):.4f} (bar: <= 0.86)"
    return table(["fold", "biases alone", "mf", "seconds"], rows), verdict


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of the recommender.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="try the script; gives no result")
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    if args.quick and args.write:
        parser.error("--quick gives no result to write")
    report = Report(
        "movielens_quality.py", "Quality on MovieLens", ["torch", "stepladder"], str(cores())
    )
    few = ("--epochs", "1") if args.quick else ()
    try:
        models, bars = ranking(args.data_dir / "ncf-ml-1m", few)
        folds, verdict = rating(args.data_dir / "ml-latest-small", few)
    except Failed as error:
        sys.exit(f"{error}\nno result")
    if args.quick:
        print("trial only, no result")
        return
    texts = ["MovieLens 1M, leave-one-out; seconds of the whole process.", models]
    texts += ["ml-latest-small, five random folds, RMSE.", folds, "\n".join([*bars, verdict])]
    report.finish(texts, args.write)


if __name__ == "__main__":
    main()
