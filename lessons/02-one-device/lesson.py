"""python lessons/02-one-device/lesson.py --total_epochs 50 --save_every 10 --batch_size 32

Training on one device, the baseline of all that follows. A known teacher makes the targets, so that
the best reachable loss is known: that of the noise."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NOISE = 0.1  # standard deviation of what no model can predict: the loss can fall to its square


def make_data():
    """Return 2048 samples: x of 20 numbers, y = teacher(x) + noise."""
    generator = torch.Generator().manual_seed(1234)
    x = torch.randn(2048, 20, generator=generator)
    directions = torch.randn(20, 2, generator=generator) / 20**0.5
    y = (x @ directions).tanh().sum(1, keepdim=True)
    return TensorDataset(x, y + NOISE * torch.randn(2048, 1, generator=generator))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))


def train_epoch(model, optimizer, loader, device):
    for x, y in loader:
        loss = F.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def loss_on(data, model, device):
    """Return the mean loss on all samples."""
    x, y = data.tensors
    return F.mse_loss(model(x.to(device)), y.to(device)).item()


def save(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "checkpoint.pt")


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "numbers", nargs="*", type=positive, metavar="50 10", help="total epochs, save every"
    )
    parser.add_argument("--total_epochs", type=positive, default=10)
    parser.add_argument("--save_every", type=positive, default=5, help="epochs")
    parser.add_argument("--batch_size", type=positive, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    folder = Path("runs/lessons", Path(__file__).parent.name)
    parser.add_argument("--folder", type=Path, default=folder)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but there is no GPU. HINT: --device cpu")
    if len(args.numbers) > 2:
        parser.error(f"{args.numbers} are more than two numbers. HINT: 50 10")
    if len(args.numbers) > 0:
        args.total_epochs = args.numbers[0]
    if len(args.numbers) > 1:
        args.save_every = args.numbers[1]
    return args


def main():
    args = parse_args()
    torch.set_num_threads(1)  # a second thread would slow down so small a model
    data = make_data()
    model = make_model().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    before = loss_on(data, model, args.device)
    for epoch in range(args.total_epochs):
        train_epoch(model, optimizer, loader, args.device)
        line = f"[GPU0] Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(loader)}"
        print(line, flush=True)
        if (epoch + 1) % args.save_every == 0:
            save(model, args.folder)
            loss = loss_on(data, model, args.device)
            print(f"       loss {loss:.4f}, saved in {args.folder}", flush=True)

    after = loss_on(data, model, args.device)
    assert after < before / 2, f"the loss went from {before:.4f} to {after:.4f}"
    print(
        f"claim holds: the loss fell from {before:.4f} to {after:.4f};"
        f" the noise alone is {NOISE**2:.4f}"
    )


if __name__ == "__main__":
    main()
