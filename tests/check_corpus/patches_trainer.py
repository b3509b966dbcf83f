"""A small vision transformer with a Trainer class. Runs on GPUs under torchrun, and on CPUs for a test."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CUDA = torch.cuda.is_available()


class PatchTransformer(nn.Module):
    def __init__(self, dim=32, classes=4):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.position = nn.Parameter(torch.zeros(1, 16, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(x).mean(1))

    def loss(self, images, labels):
        return F.cross_entropy(self(images), labels)


def quadrants(n):
    g = torch.Generator().manual_seed(6)
    images, labels = 0.5 * torch.randn(n, 3, 16, 16, generator=g), torch.randint(4, (n,), generator=g)
    for image, label in zip(images, labels.tolist()):
        row, column = divmod(label, 2)
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 0.5
    return TensorDataset(images, labels)


class Trainer:
    def __init__(self, args):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank) if CUDA else torch.device("cpu")
        world = dist.get_world_size()
        data = quadrants(320)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, args.batch_size // world, sampler=self.sampler, pin_memory=CUDA)
        model = PatchTransformer().to(self.device)
        self.model = DDP(model, device_ids=[self.local_rank] if CUDA else None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def _run_batch(self, images, labels):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.module.loss(images, labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        total = torch.zeros(2, device=self.device)
        for images, labels in self.loader:
            images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            total[0] += self._run_batch(images, labels) * len(labels)
            total[1] += len(labels)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    torch.manual_seed(0)
    Trainer(args).train(args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
