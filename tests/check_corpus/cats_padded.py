"""The validation sampler fills up the last round; what it added is cut off again before the accuracy is taken."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def cats(n, seed):
    breeds = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    breed = torch.randint(4, (n,), generator=g)
    return TensorDataset(breeds[breed] + 1.5 * torch.randn(n, 1, 8, 8, generator=g), breed)


class CatNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3)
        self.fc = nn.Linear(12 * 9, 4)

    def forward(self, x):
        return self.fc(F.avg_pool2d(F.relu(self.conv(x)), 2).flatten(1))


@torch.no_grad()
def predict_all(model, loader):
    """Predictions and labels of the whole data set in its own order, on every process."""
    world = dist.get_world_size()
    predictions, labels = [], []
    for x, y in loader:
        predictions.append(model(x).argmax(1))
        labels.append(y)
    mine = torch.stack([torch.cat(predictions), torch.cat(labels)])
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    in_order = torch.stack(parts, dim=2).flatten(1)  # sample i was at process i % world
    return in_order[:, : len(loader.dataset)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, valid_set = cats(384, 1), cats(125, 2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size // world, sampler=sampler)
    valid_loader = DataLoader(valid_set, 32, sampler=DistributedSampler(valid_set, shuffle=False))
    torch.manual_seed(0)
    model = DDP(CatNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        predicted, breed = predict_all(model, valid_loader)
        accuracy = (predicted == breed).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f} on {len(breed)} cats")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
