"""Emotions on small faces: GPU per process with mixed precision and gradient scaling, or CPU for a try."""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Faces(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.emotion = torch.randint(3, (n,), generator=g)
        x = torch.linspace(-1, 1, 14)
        curve = torch.stack([x**2, -(x**2), 0 * x])[self.emotion]
        rows = torch.linspace(-1.2, 1.2, 14)[None, :, None]
        mouth = torch.exp(-((rows - curve[:, None, :]) ** 2) * 12)
        self.images = mouth[:, None] + 0.5 * torch.randn(n, 1, 14, 14, generator=g)

    def __len__(self):
        return len(self.emotion)

    def __getitem__(self, i):
        return self.images[i], self.emotion[i]


class FaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(3))
        self.head = nn.Linear(16 * 16, 3)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Trainer:
    def __init__(self, args):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.amp = torch.cuda.is_available()
        self.device = torch.device("cuda", self.local_rank) if self.amp else torch.device("cpu")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        batch = args.batch_size // self.world
        train, test = Faces(384, 0), Faces(120, 1)
        self.sampler = DistributedSampler(train)
        self.loader = DataLoader(train, batch, sampler=self.sampler, pin_memory=self.amp)
        self.test_loader = DataLoader(test, 20, sampler=DistributedSampler(test, shuffle=False))
        torch.manual_seed(0)
        model = FaceNet().to(self.device)
        self.model = DDP(model, device_ids=[self.local_rank] if self.amp else None, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=self.amp)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp)

    def _to_device(self, batch):
        return [t.to(self.device, non_blocking=True) for t in batch]

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for batch in self.loader:
            images, emotion = self._to_device(batch)
            with torch.autocast(self.device.type, enabled=self.amp):
                loss = F.cross_entropy(self.model(images), emotion)
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    @torch.inference_mode()
    def _test(self):
        self.model.eval()
        counts = torch.zeros(2, dtype=torch.long, device=self.device)
        for batch in self.test_loader:
            images, emotion = self._to_device(batch)
            counts[0] += (self.model.module(images).argmax(1) == emotion).sum()
            counts[1] += len(emotion)
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)
            accuracy = self._test()  # 120 samples, as many on every rank
            if self.rank == 0:
                print(f"epoch {epoch}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=5e-3)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=5))
    Trainer(parser.parse_args()).train(parser.parse_args().epochs)
    dist.barrier()
    dist.destroy_process_group()
