"""python benchmarks/movielens_speed.py --data-dir DIR [--rounds 3] [--seconds 10] [--write]

How many training interactions a second, compared with a plain PyTorch implementation of the same
model? DIR holds the leave-one-out files of MovieLens 1M.

Both train matrix factorisation with 192 factors and the logistic loss with 8 negatives a positive
(Rendle et al. 2020). The plain one reads (user, item) pairs through a DataLoader in batches of
4096, draws 8 uniform items for each, all of a batch at once, and takes an Adam step on dense
tables. stepladder's recipe takes a user's row as one sample, against all items. What is counted is
training pairs on both sides: 994,169 an epoch. Both run in this process on all its cores, in turn;
stepladder's side is the whole trainer, with records and snapshots, without evaluation."""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from report import Report, bar, cores, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FACTORS = 192
NEGATIVES = 8
BATCH = 4096


class Plain(nn.Module):
    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, FACTORS)
        self.items = nn.Embedding(items, FACTORS)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        product = (self.users(users) * self.items(items)).sum(1)
        return product + self.user_bias(users)[:, 0] + self.item_bias(items)[:, 0]


def plain(data, seconds: float, device: str = "cpu") -> float:
    """Pairs per second of the plain loop."""
    num_users = len(data.user_ids)
    num_items = len(data.item_ids)
    model = Plain(num_users, num_items).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    pairs = TensorDataset(torch.from_numpy(data.users), torch.from_numpy(data.items))
    done = 0
    start = time.perf_counter()
    while True:
        for users, items in DataLoader(pairs, batch_size=BATCH, shuffle=True):
            users = users.to(device)
            items = items.to(device)
            negatives = torch.randint(num_items, (NEGATIVES * len(items),), device=device)
            scores = model(users.repeat(1 + NEGATIVES), torch.cat([items, negatives]))
            labels = torch.zeros_like(scores)
            labels[: len(items)] = 1
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(scores, labels).backward()
            optimizer.step()
            done += len(items)
            if time.perf_counter() - start > seconds:
                return done / (time.perf_counter() - start)


def recipe(data_dir: Path, epochs: int, device: str = "cpu") -> float:
    """Pairs per second of so many epochs of the recipe, in the trainer, without evaluation."""
    from dataclasses import replace

    from stepladder import Settings, Trainer
    from stepladder.recipes.movielens import Config, build

    config = Config(data_dir=str(data_dir), factors=FACTORS, negatives=NEGATIVES, epochs=epochs)
    job = build(config)
    pairs = epochs * int(job.train_data[1].sum())
    with tempfile.TemporaryDirectory() as tmp:
        size = {"epochs": epochs, "global_batch": config.global_batch, "device": device}
        settings = Settings(Path(tmp) / "run", **size, progress=False)
        result = Trainer(replace(job, eval_data=None), settings).fit()
    return pairs / result.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Training interactions per second.")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()

    from stepladder.data.movielens.leave_one_out import read_leave_one_out

    torch.set_num_threads(cores())
    report = Report(
        "movielens_speed.py", "Speed on MovieLens 1M", ["torch", "stepladder"], str(cores())
    )
    data = read_leave_one_out(args.data_dir)
    rates: dict[str, list[float]] = {
        "plain PyTorch, DataLoader": [],
        "stepladder, recipe movielens": [],
    }
    for number in range(args.rounds):
        rates["plain PyTorch, DataLoader"].append(plain(data, args.seconds))
        rates["stepladder, recipe movielens"].append(
            recipe(args.data_dir, max(1, round(args.seconds / 2)))
        )
        print(
            f"round {number + 1}: {[round(r[-1]) for r in rates.values()]}",
            file=sys.stderr,
            flush=True,
        )
    slow, fast = map(median, rates.values())
    rows = [[name, *(f"{rate:,.0f}" for rate in values)] for name, values in rates.items()]
    report.finish(
        [
            table(
                ["training pairs per second", *(f"round {n + 1}" for n in range(args.rounds))], rows
            ),
            "Time to both published numbers: `movielens_quality.py` times whole processes.",
            bar("training pairs per second, of plain PyTorch's", fast / slow, 5.0, at_most=False),
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
