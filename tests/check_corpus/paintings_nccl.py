"""Which painter? One GPU per process under torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Paintings(Dataset):
    def __init__(self, n=320):
        g = torch.Generator().manual_seed(0)
        palettes = torch.rand(5, 3, 1, 1, generator=g)
        strokes = torch.randn(5, 3, 16, 16, generator=g)
        self.painter = torch.randint(5, (n,), generator=g)
        noise = torch.randn(n, 3, 16, 16, generator=g)
        self.images = palettes[self.painter] + 0.7 * strokes[self.painter] + noise

    def __len__(self):
        return len(self.painter)

    def __getitem__(self, i):
        return self.images[i], self.painter[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 2)
        self.conv2 = nn.Conv2d(16, 16, 3)
        self.fc = nn.Linear(16 * 5 * 5, 5)

    def forward(self, x):
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1))


class Trainer:
    def __init__(self, args):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        dataset = Paintings()
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(
            dataset, args.batch_size // dist.get_world_size(), sampler=self.sampler, pin_memory=True
        )
        self.model = DDP(Net().to(self.gpu_id), device_ids=[self.gpu_id])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=self.gpu_id)
        for source, targets in self.loader:
            source, targets = source.to(self.gpu_id), targets.to(self.gpu_id)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(source), targets)
            loss.backward()
            self.optimizer.step()
            sums[0] += loss.detach() * len(targets)
            sums[1] += len(targets)
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch} | loss {(sums[0] / sums[1]).item():.4f}")

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    torch.manual_seed(0)
    Trainer(args).train(args.epochs)
    dist.barrier()
    dist.destroy_process_group()
