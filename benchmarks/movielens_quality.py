"""python benchmarks/movielens_quality.py --data-dir DIR [--write] [--quick]

How good are the recommender's models, beside published numbers? DIR holds the folders ml-latest-small and
ncf-ml-1m.

Ranking: `stepladder train movielens` with its defaults for each model, on 2 processes, then EASE in closed form.
Rating: all five folds, RMSE of each fold and their mean, and the biases alone on the same folds. Published numbers
are quoted with their sources. --quick is a trial of the script, one epoch and one fold: it gives no result.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch
from report import Report, cores, table

PUBLISHED = [
    ["MF, 192 dimensions (Rendle et al. 2020)", "0.7294", "0.4523", "", ""],
    ["NeuMF, 16 factors, no pre-training (He et al. 2017)", "0.696", "0.420", "", ""],
]
BAR = (0.7294, 0.4523)


def train(data_dir: Path, *flags: str) -> tuple[dict[str, float], float]:
    """Metrics of one run, and its seconds as a whole process."""
    with tempfile.TemporaryDirectory() as tmp:
        command = [sys.executable, "-m", "stepladder", "train", "movielens", "--data-dir", str(data_dir), *flags]
        start = time.perf_counter()
        done = subprocess.run([*command, "--run-dir", f"{tmp}/run", "--json"], stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(flags)} ended with status {done.returncode}; no result")
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    print(f"{' '.join(flags)}: {metrics}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return metrics, seconds


def closed_form(data_dir: Path) -> tuple[dict[str, float], float]:
    """EASE, scored by the same metrics."""
    from stepladder.data.movielens.leave_one_out import read_leave_one_out
    from stepladder.train.metrics.ranking import ease, ranking_metrics

    data = read_leave_one_out(data_dir)
    rated = torch.from_numpy(data.rated())
    start = time.perf_counter()
    scores = rated.float() @ ease(rated)
    seconds = time.perf_counter() - start
    sums = ranking_metrics(scores, torch.from_numpy(data.held_out), torch.from_numpy(data.negatives), rated)
    return {name: float(total) / count for name, (total, count) in sums.items()}, seconds


def biases(data_dir: Path, fold: int) -> float:
    """RMSE of mean + user bias + item bias, on the recipe's fold: its model before training."""
    from stepladder.recipes.movielens import Config, build

    job = build(Config(data_dir=str(data_dir), task="rating", fold=fold))
    job.model.users.weight.data.zero_()
    with torch.no_grad():
        total, count = job.metrics(job.model, list(job.eval_data))["mse"]
    return (float(total) / count) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of the recommender.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="try the script; gives no result")
    parser.add_argument("--write", action="store_true", help="save the report under benchmarks/results/")
    args = parser.parse_args()
    if args.quick and args.write:
        parser.error("--quick gives no result to write")
    report = Report("movielens_quality.py", "Quality on MovieLens", ["torch", "stepladder"], str(cores()))
    small, large = args.data_dir / "ml-latest-small", args.data_dir / "ncf-ml-1m"
    few = ("--epochs", "1") if args.quick else ()

    rows, found = [], {}
    for model in ("mf", "hybrid", "neumf"):
        found[model] = train(large, "--task", "ranking", "--model", model, "--nproc", "2", *few)
    found["EASE, closed form"] = closed_form(large)
    for name, (metrics, seconds) in found.items():
        values = [f"{metrics[key]:.4f}" for key in ("hr@10", "ndcg@10", "hr@10_all")]
        rows.append([name, *values, f"{seconds:.0f}"])
    folds = [train(small, "--task", "rating", "--fold", str(k), *few) for k in range(1 if args.quick else 5)]
    errors = [metrics["rmse"] for metrics, _ in folds]
    plain = [biases(small, k) for k in range(len(folds))]
    if args.quick:
        print("trial only, no result")
        return

    def reached(model: str, margin: float) -> str:
        hits, gains = (found[model][0][key] for key in ("hr@10", "ndcg@10"))
        passed = hits >= BAR[0] + margin and gains >= BAR[1] + margin
        return f"- {'PASS' if passed else 'FAIL'}: {model}: {hits:.4f} / {gains:.4f} (bar: both + {margin})"

    passed = mean(errors) <= 0.86
    fold_rows = [
        [str(k), f"{plain[k]:.4f}", f"{errors[k]:.4f}", f"{folds[k][1]:.0f}"] for k in range(len(folds))
    ] + [["mean", f"{mean(plain):.4f}", f"{mean(errors):.4f}", f"{mean(s for _, s in folds):.0f}"]]
    report.finish(
        [
            "MovieLens 1M, leave-one-out; seconds of the whole process.",
            table(["model", "HR@10", "NDCG@10", "HR@10, whole catalogue", "seconds"], rows + PUBLISHED),
            "ml-latest-small, five random folds, RMSE.",
            table(["fold", "biases alone", "mf", "seconds"], fold_rows),
            "\n".join(
                [
                    reached("mf", 0.0),
                    reached("hybrid", 0.006),
                    f"- {'PASS' if passed else 'FAIL'}: mean RMSE {mean(errors):.4f} (bar: <= 0.86)",
                ]
            ),
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
