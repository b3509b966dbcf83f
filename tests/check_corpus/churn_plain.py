"""Which customers leave? A logistic model with one hidden layer, on several processes."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def customers(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    score = x[:, 0] - 2 * x[:, 3] + x[:, 5] * x[:, 6]
    return TensorDataset(x, (score > 0).float())


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--batch-size", default=64, type=int, help="global")
    parser.add_argument("--lr", default=5e-3, type=float)
    return parser.parse_args()


def main():
    args = parse()
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train_set = customers(512, seed=1)
    test_set = customers(300, seed=2)
    order = torch.Generator().manual_seed(7)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // world, shuffle=True, generator=order)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loss_fn = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()

        # the test set is small: every process looks at all of it
        model.eval()
        with torch.no_grad():
            x, y = test_set.tensors
            hits = ((model.module(x).squeeze(1) > 0) == (y > 0)).sum().item()
        if rank == 0:
            print(f"epoch {epoch} accuracy {hits / len(test_set):.3f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
