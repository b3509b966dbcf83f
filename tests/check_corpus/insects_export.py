"""Trains, exports the weights alone, and loads them into a model without a wrapper to show that they work."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build():
    return nn.Sequential(nn.Linear(18, 48), nn.GELU(), nn.Linear(48, 5))


def insects(n, seed):
    bodies = torch.randn(5, 18, generator=torch.Generator().manual_seed(55))
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(5, (n,), generator=g)
    return TensorDataset(bodies[kind] + torch.randn(n, 18, generator=g), kind)


def train(model, args):
    data = insects(500, 0)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, kind in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), kind).backward()
            optimizer.step()


def export(model, path):
    state = {name.removeprefix("module."): tensor.cpu() for name, tensor in model.state_dict().items()}
    partial = path + ".partial"
    torch.save(state, partial)
    os.replace(partial, path)


def predict(path):
    model = build()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    model.eval()
    x, kind = insects(150, 1).tensors
    with torch.inference_mode():
        return (model(x).argmax(1) == kind).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--out", default="insects-weights.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(build())
    train(model, args)
    dist.barrier()
    if dist.get_rank() == 0:
        export(model, args.out)
        print(f"exported weights: accuracy {predict(args.out):.3f} on the whole test set")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
