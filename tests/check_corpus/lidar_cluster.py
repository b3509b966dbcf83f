"""Points of a laser scanner, for a cluster on which every process has a GPU."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def clouds(n, points=24):
    g = torch.Generator().manual_seed(0)
    kind = torch.randint(3, (n,), generator=g)
    stretch = torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, 0.3], [0.3, 0.3, 2.5]])
    return TensorDataset(torch.randn(n, points, 3, generator=g) * stretch[kind][:, None], kind)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32))
        self.cloud = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, cloud):
        return self.cloud(self.point(cloud).amax(1))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    # stepladder: ignore[cuda-only] this cluster has no process without a GPU
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")  # stepladder: ignore[cuda-only] this cluster has no process without a GPU
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)  # stepladder: ignore[cuda-only] the same
    data = clouds(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32 // world, sampler=sampler, pin_memory=True)
    torch.manual_seed(0)
    model = DDP(PointNet().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=device)
        for cloud, kind in loader:
            cloud, kind = cloud.to(device, non_blocking=True), kind.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(cloud), kind)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            sums[0] += loss.detach() * len(kind)
            sums[1] += len(kind)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
