"""The order of each epoch is drawn once for all, then cut into shares, the last ones filled up by wrapping around."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SAMPLES, GLOBAL_BATCH, EPOCHS, SEED = 487, 32, 3, 12


def ellipses(n):
    g = torch.Generator().manual_seed(SEED)
    points = 2 * torch.rand(n, 2, generator=g) - 1
    return points, (points[:, 0] ** 2 + 3 * points[:, 1] ** 2 < 0.8).float()


def batches_of(rank, world, epoch):
    """Indices of this rank's batches; every rank gets as many, of the same sizes."""
    g = torch.Generator()
    g.manual_seed(SEED * 1000 + epoch)
    order = torch.randperm(SAMPLES, generator=g)
    missing = -SAMPLES % world
    if missing:
        order = torch.cat([order, order[:missing]])
    mine = order[rank::world]
    return mine.split(GLOBAL_BATCH // world)


def test_accuracy(model, rank, world):
    points, inside = ellipses(301)
    points, inside = points[rank::world], inside[rank::world]
    with torch.no_grad():
        right = ((model(points).squeeze(1) > 0) == inside.bool()).sum()
    counts = torch.stack([right, torch.tensor(len(inside))])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    points, inside = ellipses(SAMPLES)
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    for epoch in range(EPOCHS):
        net.train()
        for indices in batches_of(rank, world, epoch):
            optimizer.zero_grad()
            scores = model(points[indices]).squeeze(1)
            nn.functional.binary_cross_entropy_with_logits(scores, inside[indices]).backward()
            optimizer.step()
        net.eval()
        accuracy = test_accuracy(net, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
