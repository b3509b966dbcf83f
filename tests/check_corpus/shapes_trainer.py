"""Classify small pictures of bars and crosses.

    torchrun --standalone --nproc-per-node 2 shapes_trainer.py --epochs 3
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Shapes(Dataset):
    def __init__(self, size, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (size,), generator=g)
        self.images = 1.2 * torch.randn(size, 1, 12, 12, generator=g)
        for i, label in enumerate(self.labels.tolist()):
            if label in (0, 2):
                self.images[i, 0, 5:7, :] += 1
            if label in (1, 2):
                self.images[i, 0, :, 5:7] += 1

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return self.images[idx], self.labels[idx]


class ShapeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16 * 6 * 6, 3)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.fc(x.flatten(1))


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.rank = int(os.environ["RANK"])
        self.model = DDP(model)
        self.train_data = train_data
        self.optimizer = optimizer

    def _run_batch(self, images, labels):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item() * len(labels)

    def _run_epoch(self, epoch):
        total = torch.zeros(2)
        for images, labels in self.train_data:
            total += torch.tensor([self._run_batch(images, labels), len(labels)])
        dist.all_reduce(total)
        if self.rank == 0:
            print(f"Epoch {epoch} | steps {len(self.train_data)} | loss {(total[0] / total[1]).item():.4f}")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Shapes(480)
    batch = args.batch_size // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=batch, sampler=DistributedSampler(dataset))
    model = ShapeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    Trainer(model, loader, optimizer).train(args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=48, help="over all processes")
    main(parser.parse_args())
