"""python benchmarks/gpt_time_to_188.py --data-dir DIR [--write] [--quick]

How much sooner does stepladder's recipe gpt reach a validation loss of 1.88 than the well-known
small recipe?

That recipe is written out below in plain PyTorch, by its published settings for a laptop: 4 layers,
4 heads, 128 wide, blocks of 64 characters, 12 blocks a step drawn at random, AdamW with betas 0.9
and 0.99, weight decay 0.1 for matrices, gradients clipped at 1, learning rate 1e-3 after 100 steps
of warm-up, then a cosine down to 1e-4 at step 2,000, no dropout. It has all cores in one process.
Whatever can be given to it is given: the text is in memory before the clock starts, and its
evaluations are not timed. It stops at the first of them (every 100 steps) with 1.88 or less.

stepladder runs as a process of its own. Compared is its report's `seconds`: training, evaluation,
records and snapshots, data in memory before. The whole process, with imports and reading, is given
beside it. Its loss is taken from its own report; above 1.88 there is no result and the exit status
is 1.

The loss is the mean over the whole validation split, the last tenth of the text, in blocks of 64
without overlap. DIR holds input.txt. Order: stepladder, small recipe, stepladder, all on the same
cores. --quick is a trial of the script: two steps of the recipe; it gives no result."""

import argparse
import math
import sys
import time
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from commands import Failed, result_of
from report import Report, bar, cores, table
from torch import Tensor, nn

TARGET = 1.88
NPROCS = (1, 2)
LAYERS = 4
HEADS = 4
WIDTH = 128
BLOCK = 64
BATCH = 12
STEPS = 2000
WARMUP = 100
EVERY = 100
FLAGS = ()  # of stepladder besides the data's folder
History = list[
    tuple[int, float, float]
]  # per evaluation: steps, seconds of training so far, validation loss


class Layer(nn.Module):
    """Attention, then two linear layers, each after a layer norm and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            part.view(heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Peer(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if ends else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden) @ self.tokens.weight.T  # tied


def rate(step: int) -> float:
    """Return the learning rate of a step as a part of the largest."""
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / (STEPS - WARMUP)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def read(data_dir: Path) -> tuple[Tensor, Tensor, int]:
    """Training and validation characters as numbers, and how many there are."""
    text = (data_dir / "input.txt").read_text(encoding="utf-8")
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[character] for character in text])
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:], len(numbers)


@torch.no_grad()
def whole_loss(model: nn.Module, tokens: Tensor) -> float:
    """Mean over the whole split: all blocks at once, and the rest of it as a shorter one."""
    num_tokens = (len(tokens) - 1) // BLOCK * BLOCK
    total = 0.0
    for x, y in (
        (tokens[:num_tokens].view(-1, BLOCK), tokens[1 : num_tokens + 1].view(-1, BLOCK)),
        (tokens[num_tokens:-1].view(1, -1), tokens[num_tokens + 1 :].view(1, -1)),
    ):
        for some, targets in zip(x.split(256), y.split(256), strict=True):
            if some.numel():
                total += float(
                    F.cross_entropy(model(some).flatten(0, 1), targets.flatten(), reduction="sum")
                )
    return total / (len(tokens) - 1)


def small_recipe(
    train: Tensor, validation: Tensor, vocabulary: int, seed: int, max_steps: int | None
) -> History:
    """Train until TARGET, or to the end of its schedule."""
    torch.manual_seed(seed)
    model = Peer(vocabulary)
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    places = torch.arange(BLOCK)
    history = []
    seconds = 0.0
    for step in range(1, (max_steps or STEPS) + 1):
        start = time.perf_counter()
        rows = torch.randint(len(train) - BLOCK, (BATCH, 1)) + places
        loss = F.cross_entropy(model(train[rows]).flatten(0, 1), train[rows + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seconds += time.perf_counter() - start
        if step % EVERY == 0 or step == max_steps:
            history.append((step, seconds, whole_loss(model, validation)))
            print(
                "small recipe: step {}, {:.1f} s, {:.4f}".format(*history[-1]),
                file=sys.stderr,
                flush=True,
            )
            if history[-1][2] <= TARGET:
                break
    return history


def stepladder(data_dir: Path, nproc: int) -> tuple[float, float, float, float]:
    """One run as a process of its own: seconds of training, seconds from start to exit, loss,
    tokens a second.
    """
    result, total = result_of(
        "train", "gpt", "--data-dir", data_dir.resolve(), "--nproc", nproc, *FLAGS
    )
    seconds = float(result["seconds"])
    reached = float(result["metrics"]["val_loss"])
    print(
        f"stepladder --nproc {nproc}: {seconds:.1f} s, {reached:.4f}", file=sys.stderr, flush=True
    )
    if reached > TARGET:
        raise Failed(f"stepladder with --nproc {nproc} did not reach {TARGET}; no result")
    return seconds, total, reached, result["samples_per_second"] * BLOCK


def sections(runs: dict[int, list[tuple[float, ...]]], history: History, seed: int) -> list[str]:
    steps, small, loss = history[-1]
    name = "small recipe" + ("" if loss <= TARGET else ", which ends above it")
    rows = [
        [name, f"{small:.1f}", "", f"{loss:.4f}", f"{steps * BATCH * BLOCK / small:,.0f}", "1.0"]
    ]
    bars = []
    for nproc, results in runs.items():
        for seconds, total, reached, speed in results:
            ratio = f"{small / seconds:.1f}"
            rows.append(
                [
                    f"stepladder, --nproc {nproc}",
                    f"{seconds:.1f}",
                    f"{total:.1f}",
                    f"{reached:.4f}",
                    f"{speed:,.0f}",
                    ratio,
                ]
            )
        typical = mean(seconds for seconds, *_ in results)  # of two runs, the mean is the median
        bars.append(
            bar(
                f"faster than the small recipe, --nproc {nproc}",
                small / typical,
                3.0,
                at_most=False,
            )
        )
    late = [[str(step), f"{seconds:.1f}", f"{loss:.4f}"] for step, seconds, loss in history[-5:]]
    return [
        table(
            [
                "recipe",
                f"seconds to {TARGET}",
                "whole process",
                "val_loss",
                "tokens/s",
                "times faster",
            ],
            rows,
        ),
        "In the order stepladder (each --nproc), small recipe, stepladder. stepladder's seconds hold its"
        f" evaluation and its snapshot, the small recipe's (seed {seed}, all cores) hold training alone. Its last"
        " evaluations:",
        table(["step", "seconds", "val_loss"], late),
        "\n".join(bars),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time to a validation loss of 1.88 on tiny Shakespeare."
    )
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument(
        "--seed", type=int, default=1337, help="of the small recipe; 1337 is its default"
    )
    parser.add_argument("--quick", action="store_true", help="try the script; gives no result")
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    if args.quick and args.write:
        parser.error("--quick gives no result to write")
    torch.set_num_threads(cores())
    report = Report(
        "gpt_time_to_188.py",
        "Time to a loss of 1.88 on tiny Shakespeare",
        ["torch", "stepladder"],
        str(cores()),
        "gpt",
    )
    data = read(args.data_dir)
    if args.quick:
        print(
            f"trial only, no result: {small_recipe(*data, args.seed, 2)[-1][1]:.1f} s for two steps"
        )
        return
    try:
        runs = {nproc: [stepladder(args.data_dir, nproc)] for nproc in NPROCS}
        history = small_recipe(*data, args.seed, None)
        for nproc in NPROCS:
            runs[nproc].append(stepladder(args.data_dir, nproc))
    except Failed as error:
        sys.exit(str(error))
    report.finish(sections(runs, history, args.seed), args.write)


if __name__ == "__main__":
    main()
