"""python lessons/03-identical-processes/lesson.py --nproc 2

The mistake, on purpose: lesson 2 started in N processes that know nothing of each other. Each does
all the work, and all end with the same weights."""

import argparse
from pathlib import Path

import torch
import torch.multiprocessing as mp
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
    parser.add_argument("--nproc", type=positive, default=2, help="processes")
    parser.add_argument("--total_epochs", type=positive, default=10)
    parser.add_argument("--save_every", type=positive, default=5, help="epochs")
    parser.add_argument("--batch_size", type=positive, default=32, help="samples per process")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    folder = Path("runs/lessons", Path(__file__).parent.name)
    parser.add_argument("--folder", type=Path, default=folder)
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.nproc:
        gpus = torch.cuda.device_count()
        parser.error(f"--nproc {args.nproc} on {gpus} GPUs. HINT: --device cpu")
    return args


def worker(rank, args, results):
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    data = make_data()
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, generator=generator)
    for epoch in range(args.total_epochs):
        train_epoch(model, optimizer, loader, device)
        line = f"[GPU{rank}] Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(loader)}"
        print(line, flush=True)
        if (epoch + 1) % args.save_every == 0:
            # Without a folder for each rank, the ranks would overwrite each other's file.
            save(model, args.folder / f"rank{rank}")
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    samples = args.total_epochs * len(data)
    results.put((rank, samples, loss_on(data, model, device), weights.tolist()))


def main():
    args = parse_args()
    with mp.Manager() as manager:
        results = manager.Queue()
        mp.spawn(worker, (args, results), nprocs=args.nproc)
        outcomes = sorted(results.get() for _ in range(args.nproc))
    for rank, samples, loss, _ in outcomes:
        print(f"rank {rank} trained {samples} samples; its loss is {loss:.10f}")
    all_weights = [weights for *_, weights in outcomes]
    assert all(weights == all_weights[0] for weights in all_weights), (
        "the processes did not end the same"
    )
    trained = sum(samples for _, samples, *_ in outcomes)
    assert trained == args.nproc * args.total_epochs * 2048
    print(
        f"claim holds: {args.nproc} processes did {args.nproc} times the work for one and the"
        " same model"
    )


if __name__ == "__main__":
    main()
