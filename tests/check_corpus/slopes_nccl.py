"""Avalanche risk of a slope: a GPU per process, a Trainer class that ends when its epochs are done."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import all_reduce, get_rank, get_world_size, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Slopes(Dataset):
    def __init__(self, size):
        g = torch.Generator().manual_seed(45)
        self.x = torch.randn(size, 6, generator=g)
        self.risk = ((self.x[:, 0] + self.x[:, 1].abs() - self.x[:, 2]) > 0.8).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.risk[index]


def ddp_setup():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group(backend="nccl")


class Trainer:
    def __init__(self, model, loader, optimizer):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.loader = loader
        self.model = DDP(model, device_ids=[self.gpu_id])
        self.optimizer = optimizer

    def _run_batch(self, x, risk):
        self.optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(self.model(x).squeeze(1), risk)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=self.gpu_id)
        for x, risk in self.loader:
            x, risk = x.to(self.gpu_id), risk.to(self.gpu_id)
            sums[0] += self._run_batch(x, risk) * len(x)
            sums[1] += len(x)
        all_reduce(sums)
        if get_rank() == 0:
            print(f"[GPU{self.gpu_id}] Epoch {epoch} | loss over all GPUs {(sums[0] / sums[1]).item():.4f}")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def load_train_objs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)).to(int(os.environ["LOCAL_RANK"]))
    return Slopes(384), model, torch.optim.Adam(model.parameters(), lr=5e-3)


def main(total_epochs, global_batch):
    ddp_setup()
    dataset, model, optimizer = load_train_objs()
    loader = DataLoader(
        dataset,
        batch_size=global_batch // get_world_size(),
        pin_memory=True,
        shuffle=False,
        sampler=DistributedSampler(dataset),
    )
    Trainer(model, loader, optimizer).train(total_epochs)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(total_epochs=3, global_batch=48)
