"""A stream shared out over ranks and, within a rank, over the workers of its loader; a shuffle buffer on top."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ARTICLES, WORDS, TOPICS = 512, 60, 4


class News(IterableDataset):
    def __init__(self, rank, world, seed=0, buffer_size=64):
        self.rank, self.world, self.seed, self.buffer_size = rank, world, seed, buffer_size
        self.epoch = 0
        self.theme = torch.randn(TOPICS, WORDS, generator=torch.Generator().manual_seed(3)).mul(1.5).exp()

    def article(self, number):
        g = torch.Generator().manual_seed(number)
        topic = number * 7 % TOPICS
        words = torch.multinomial(self.theme[topic], 12, replacement=True, generator=g)
        return words, topic

    def my_numbers(self):
        worker = get_worker_info()
        workers, me = (worker.num_workers, worker.id) if worker else (1, 0)
        return range(self.rank * workers + me, ARTICLES, self.world * workers)

    def __iter__(self):
        shuffler = random.Random(f"{self.seed} {self.epoch} {self.rank}")
        buffer = []
        for number in self.my_numbers():
            buffer.append(number)
            if len(buffer) >= self.buffer_size:
                yield self.article(buffer.pop(shuffler.randrange(len(buffer))))
        shuffler.shuffle(buffer)
        yield from map(self.article, buffer)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stream = News(rank, world)
    loader = DataLoader(stream, batch_size=32 // world, num_workers=2)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.EmbeddingBag(WORDS, 16), nn.ReLU(), nn.Linear(16, TOPICS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        stream.epoch = epoch
        sums = torch.zeros(2)
        for words, topic in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words), topic)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(topic), len(topic)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f} on {int(sums[1])} articles")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
