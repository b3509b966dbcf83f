"""A net with dropout and batch norm; the held-out comets are looked at after each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def comets():
    g = torch.Generator().manual_seed(44)
    x = torch.randn(352, 10, generator=g)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    train, held_out = random_split(comets(), [320, 32], generator=torch.Generator().manual_seed(1))
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 64 // dist.get_world_size(), sampler=sampler)
    test_loader = DataLoader(held_out, 16, sampler=DistributedSampler(held_out, shuffle=False))
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net) if torch.cuda.is_available() else net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        hits = torch.zeros(2)
        for x, y in test_loader:
            prediction = model(x).argmax(1)
            hits += torch.tensor([(prediction == y).sum(), len(y)])
        dist.all_reduce(hits)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {hits[0] / hits[1]:.3f} of the held-out comets")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
