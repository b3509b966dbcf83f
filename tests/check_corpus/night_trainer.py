"""A Trainer with snapshots for jobs on several nodes; one process per GPU, a disk that all nodes share."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Stars(Dataset):
    def __init__(self, n=400):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 20, generator=g)
        self.y = (self.x[:, :10].sum(1) > self.x[:, 10:].sum(1)).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Trainer:
    def __init__(self, model, dataset, optimizer_of, args):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.device = torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        model = model.to(self.device)
        self.optimizer = optimizer_of(model.parameters())
        self.epochs_run = 0
        self.snapshot_path = args.snapshot_path
        if os.path.exists(self.snapshot_path):
            self._load_snapshot(model)
        self.model = DDP(model, device_ids=[self.local_rank] if self.device.type == "cuda" else None)
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, args.batch_size // dist.get_world_size(), sampler=self.sampler)

    def _load_snapshot(self, model):
        snapshot = torch.load(self.snapshot_path, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        torch.set_rng_state(snapshot["rng"][self.global_rank])
        self.epochs_run = snapshot["epochs_run"]
        print(f"[rank {self.global_rank}] goes on after {self.epochs_run} epochs")

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for x, y in self.loader:
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def _save_snapshot(self, epoch, rng):
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": epoch + 1,
            "rng": rng,
        }
        unfinished = f"{self.snapshot_path}.{self.global_rank}.tmp"
        torch.save(snapshot, unfinished)
        os.replace(unfinished, self.snapshot_path)

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            rng = [None] * dist.get_world_size()
            dist.all_gather_object(rng, torch.get_rng_state())
            if self.local_rank == 0:
                self._save_snapshot(epoch, rng)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--snapshot-path", default="snapshot.pt")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    Trainer(model, Stars(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), args).train(args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
