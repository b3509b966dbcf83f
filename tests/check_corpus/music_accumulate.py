"""Next note of a melody, with a small LSTM. Accumulates gradients over several batches."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NOTES = 14


class Melodies(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        start, up = torch.randint(NOTES, (2,), generator=g).tolist()
        notes = torch.tensor([(start + (k if up % 2 else -k) + (k % 4 == 3)) % NOTES for k in range(9)])
        return notes[:8], notes[1:]


class MelodyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NOTES, 24)
        self.lstm = nn.LSTM(24, 48, batch_first=True)
        self.head = nn.Linear(48, NOTES)

    def forward(self, notes):
        return self.head(self.lstm(self.embed(notes))[0])


class MelodyTrainer:
    accumulate = 3
    global_batch = 48

    def __init__(self):
        self.world = int(os.environ["WORLD_SIZE"])
        data = Melodies()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(
            data, batch_size=self.global_batch // self.world // self.accumulate, sampler=self.sampler
        )
        self.model = DDP(MelodyModel())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.scale = 1 / (self.accumulate * self.world)

    def _micro_step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x).transpose(1, 2), y)
        (loss * self.scale).backward()
        return loss.item() * len(x)

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for i, (x, y) in enumerate(self.loader):
            if (i + 1) % self.accumulate:
                with self.model.no_sync():
                    loss = self._micro_step(x, y)
            else:
                loss = self._micro_step(x, y)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            stats += torch.tensor([loss, len(x)])
        dist.all_reduce(stats)
        return (stats[0] / stats[1]).item()

    def train(self, epochs):
        for epoch in range(epochs):
            loss = self._run_epoch(epoch)
            if dist.get_rank() == 0:
                print(f"[epoch {epoch}] loss per note {loss:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    MelodyTrainer().train(epochs=2)
    dist.barrier()
    dist.destroy_process_group()
