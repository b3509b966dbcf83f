"""Value of a chess-like position on GPUs: residual net, bfloat16, a copy stream for the next batch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def positions(n):
    g = torch.Generator().manual_seed(64)
    board = torch.randint(-1, 2, (n, 1, 6, 6), generator=g).float()
    worth = torch.randn(6, 6, generator=g)
    return TensorDataset(board, torch.tanh((board[:, 0] * worth).sum((1, 2)) / 4)[:, None])


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(1, width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


def network(width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), Residual(width), Residual(width), nn.Flatten(), nn.Linear(36 * width, 1)
    )


class Prefetcher:
    """Copies the next batch on a stream of its own while the model works."""

    def __init__(self, loader):
        self.loader, self.stream = loader, torch.cuda.Stream()

    def __iter__(self):
        ready = None
        for batch in self.loader:
            with torch.cuda.stream(self.stream):
                coming = [t.cuda(non_blocking=True) for t in batch]
            if ready is not None:
                yield ready
            torch.cuda.current_stream().wait_stream(self.stream)
            for t in coming:
                t.record_stream(torch.cuda.current_stream())
            ready = coming
        if ready is not None:
            yield ready


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    data = positions(512)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 64 // dist.get_world_size(), sampler=sampler, pin_memory=True)
    torch.manual_seed(0)
    model = DDP(network().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2).cuda()
        for board, value in Prefetcher(loader):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                guess = model(board)
            loss = nn.functional.mse_loss(guess.float(), value)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach() * len(board), torch.tensor(float(len(board))).cuda()])
        torch.cuda.synchronize()
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.4f}, {torch.cuda.max_memory_allocated()} bytes")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
