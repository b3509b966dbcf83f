"""A trainer in the way of a well-known tutorial, with its faults."""

import os
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group


class Random(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def ddp_setup():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group(backend="nccl")


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, path):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.model = model.to(self.gpu_id)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.path = path
        if os.path.exists(path):
            print("Loading snapshot")
            self._load(path)
        self.model = DDP(self.model, device_ids=[self.gpu_id])

    def _load(self, path):
        snapshot = torch.load(path, map_location=f"cuda:{self.gpu_id}")
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _run_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        b = len(next(iter(self.train_data))[0])
        print(f"[GPU{self.gpu_id}] Epoch {epoch} | Batchsize: {b} | Steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for x, y in self.train_data:
            self._run_batch(x.to(self.gpu_id), y.to(self.gpu_id))

    def _save(self, epoch):
        torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}, self.path)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self._run_epoch(epoch)
            if self.gpu_id == 0 and epoch % self.save_every == 0:
                self._save(epoch)


def main(epochs, save_every):
    ddp_setup()
    data = Random(256)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, pin_memory=True, shuffle=False, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, save_every, "snapshot.pt").train(epochs)
    destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
