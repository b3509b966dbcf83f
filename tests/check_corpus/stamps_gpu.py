"""Image classification on the GPUs of a node: torchrun --standalone --nproc-per-node 2 stamps_gpu.py"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def stamps(n):
    g = torch.Generator().manual_seed(0)
    motifs = torch.randn(6, 3, 10, 10, generator=g)
    label = torch.randint(6, (n,), generator=g)
    return TensorDataset(motifs[label] + 2 * torch.randn(n, 3, 10, 10, generator=g), label)


class StampNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16 * 8 * 8, 6)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))


class Trainer:
    def __init__(self, args):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        data = stamps(384)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=args.batch_size // self.world, sampler=self.sampler)
        torch.manual_seed(args.seed)
        self.model = DDP(StampNet().to(self.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def _run_batch(self, images, labels):
        logits = self.model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return (logits.argmax(1) == labels).sum()

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            counts = torch.zeros(2, device=self.device)
            for images, labels in self.loader:
                images, labels = images.to(self.device), labels.to(self.device)
                counts[0] += self._run_batch(images, labels)
                counts[1] += len(labels)
            dist.all_reduce(counts)
            if self.rank == 0:
                print(f"epoch {epoch}: training accuracy {(counts[0] / counts[1]).item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Trainer(parser.parse_args()).train(parser.parse_args().epochs)
    dist.barrier()
    dist.destroy_process_group()
