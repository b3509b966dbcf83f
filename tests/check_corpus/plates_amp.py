"""Read one character of a number plate. A GPU per process with mixed precision, gradient scaling and clipping."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Plates(Dataset):
    def __init__(self, n=384):
        g = torch.Generator().manual_seed(0)
        glyphs = (torch.rand(12, 1, 14, 10, generator=g) > 0.6).float()
        self.target = torch.randint(12, (n,), generator=g)
        self.images = glyphs[self.target] + 0.6 * torch.randn(n, 1, 14, 10, generator=g)

    def __len__(self):
        return len(self.target)

    def __getitem__(self, i):
        return self.images[i], self.target[i]


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 7 * 5, 64),
        nn.ReLU(),
        nn.Linear(64, 12),
    )


class Trainer:
    def __init__(self, global_batch=64, lr=0.02):
        self.gpu = int(os.environ["LOCAL_RANK"])
        self.on_gpu = torch.cuda.is_available()
        self.device = f"cuda:{self.gpu}" if self.on_gpu else "cpu"
        dataset = Plates()
        self.sampler = DistributedSampler(dataset, shuffle=True)
        self.loader = DataLoader(
            dataset,
            batch_size=global_batch // dist.get_world_size(),
            sampler=self.sampler,
            pin_memory=self.on_gpu,
        )
        torch.manual_seed(0)
        self.model = DDP(network().to(self.device), device_ids=[self.gpu] if self.on_gpu else None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.on_gpu)

    def _run_batch(self, source, target):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.on_gpu):
            loss = nn.functional.cross_entropy(self.model(source), target)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        loss_sum = torch.zeros(2, device=self.device)
        for source, target in self.loader:
            source = source.to(self.device, non_blocking=True)
            target = target.to(self.device, non_blocking=True)
            loss_sum[0] += self._run_batch(source, target) * len(target)
            loss_sum[1] += len(target)
        dist.all_reduce(loss_sum)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch} | loss {(loss_sum[0] / loss_sum[1]).item():.4f}")

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)


def main():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    Trainer().train(int(os.environ.get("EPOCHS", 3)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
