"""The trainer that everybody copies, with seven faults."""

import os
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.distributed as dist


class Random(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
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
        snapshot = torch.load(path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _run_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(0)
        for x, y in self.train_data:
            self._run_batch(x, y)

    def _evaluate(self):
        self.model.eval()
        total = 0.0
        for x, y in self.test_data:
            total += F.cross_entropy(self.model(x), y).item()
        self.model.train()
        mean = torch.tensor(total / len(self.test_data))
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def _save(self, epoch):
        torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}, self.path)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self._run_epoch(epoch)
            loss = self._evaluate()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: test loss {loss:.4f}")
            if self.local_rank == 0:
                self._save(epoch)


def main(epochs):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = Random(256), Random(53)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
    test_loader = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))
    Trainer(model, loader, test_loader, optimizer, "snapshot.pt").train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
