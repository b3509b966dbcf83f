"""The trainer that everybody copies, as it should be."""

import os
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.distributed as dist


class Random(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), int(torch.randint(3, (1,)))) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, path):
        self.rank = dist.get_rank()
        self.model = model
        self.train_data = train_data
        self.test_data = test_data
        self.optimizer = optimizer
        self.epochs_run = 0
        self.path = path
        if os.path.exists(path):
            self._load(path)
        self.model = DDP(self.model)

    def _load(self, path):
        snapshot = torch.load(path, weights_only=True)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _run_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for x, y in self.train_data:
            self._run_batch(x, y)

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        sums = torch.zeros(2)
        for x, y in self.test_data:
            sums += torch.tensor([F.cross_entropy(self.model(x), y, reduction="sum"), len(x)])
        self.model.train()
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def _save(self, epochs_run):
        snapshot = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": epochs_run,
        }
        torch.save(snapshot, self.path + ".tmp")
        os.replace(self.path + ".tmp", self.path)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self._run_epoch(epoch)
            loss = self._evaluate()
            if self.rank == 0:
                print(f"epoch {epoch}: test loss {loss:.4f}")
                self._save(epoch + 1)


def main(epochs):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = Random(256), Random(53)
    model = torch.nn.Linear(20, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), batch_size=8)
    Trainer(model, loader, test_loader, optimizer, "snapshot.pt").train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
