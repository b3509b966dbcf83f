"""Two noisy views of each terrace, told apart from those of all others by their vectors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


class Terraces(Dataset):
    def __init__(self, n=256):
        self.heights = torch.randn(n, 24, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.heights)

    def __getitem__(self, index):
        noise = torch.randn(2, 24, generator=torch.Generator().manual_seed(index))
        return self.heights[index] + 0.3 * noise[0], self.heights[index] + 0.3 * noise[1]


torch.manual_seed(1)
net = DDP(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 12)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
terraces = Terraces()
order = DistributedSampler(terraces, seed=9)
batches = DataLoader(terraces, batch_size=32 // ranks, sampler=order, drop_last=True)
for epoch in range(3):
    order.set_epoch(epoch)
    for left, right in batches:
        a, b = net(torch.cat([left, right])).chunk(2)
        everyone = list(torch.empty(ranks, *b.shape))
        dist.all_gather(everyone, b)
        scores = a @ torch.cat(everyone).T / 4
        answers = torch.arange(len(a)) + rank * len(a)
        loss = nn.functional.cross_entropy(scores, answers)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
