"""Is a sequence of words positive? A GRU over embeddings, with a Trainer class."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, LENGTH = 50, 9


class Reviews(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.words = torch.randint(WORDS, (n, LENGTH), generator=g)
        mood = torch.randn(WORDS, generator=g)
        self.positive = (mood[self.words].sum(1) > 0).long()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.positive[i]


class Sentiment(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, 2)

    def forward(self, words):
        states, last = self.gru(self.embedding(words))
        summary = torch.cat([states, last.transpose(0, 1)], dim=1).detach().mean(1)
        return self.out(summary)


class Trainer:
    def __init__(self, model, data, global_batch, lr):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DDP(model, find_unused_parameters=True)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, global_batch // self.world, sampler=self.sampler)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.criterion = nn.CrossEntropyLoss()

    def _run_batch(self, words, positive):
        logits = self.model(words)
        loss = self.criterion(logits, positive)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item() * len(words), (logits.argmax(1) == positive).sum().item()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            totals = torch.zeros(3)
            for words, positive in self.loader:
                loss, hits = self._run_batch(words, positive)
                totals += torch.tensor([loss, hits, len(words)])
            dist.all_reduce(totals)
            if self.rank == 0:
                loss, hits, n = totals.tolist()
                print(f"Epoch {epoch} | loss {loss / n:.4f} | accuracy {hits / n:.3f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(Sentiment(), Reviews(480), global_batch=48, lr=1e-2).fit(3)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
