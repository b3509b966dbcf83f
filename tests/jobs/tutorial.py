"""What people bring: a plain script in the manner of the multi-node tutorials, written for
torchrun.

tutorial.py TOTAL_EPOCHS SAVE_EVERY [--batch-size N]
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 20, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum().view(1)


class Trainer:
    def __init__(self, model, data, optimizer, save_every, snapshot_path):
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.data, self.optimizer = data, optimizer
        self.save_every, self.snapshot_path, self.epochs_run = save_every, snapshot_path, 0
        if Path(snapshot_path).exists():
            snapshot = torch.load(snapshot_path)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DistributedDataParallel(model)

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.data.sampler.set_epoch(epoch)
            for x, y in self.data:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
            print(
                f"[GPU{self.global_rank}] Epoch {epoch} | Batchsize: {len(x)} | Steps: {len(self.data)}"
            )
            if self.global_rank == 0 and epoch % self.save_every == 0:
                snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(snapshot, self.snapshot_path)


def main(total_epochs, save_every, batch_size, snapshot_path="snapshot.pt"):
    dist.init_process_group("gloo")
    model = torch.nn.Linear(20, 1)
    data = Points(2048)
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))
    Trainer(
        model, loader, torch.optim.SGD(model.parameters(), lr=1e-2), save_every, snapshot_path
    ).train(total_epochs)
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch-size", "--batch_size", type=int, default=32)
    arguments = parser.parse_args()
    main(arguments.total_epochs, arguments.save_every, arguments.batch_size)
