"""Which intent has a request? A transformer made for 20 intents gets a head for four."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, LENGTH = 40, 10


class IntentModel(nn.Module):
    def __init__(self, intents=20, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, intents)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)).mean(1))


def requests(n):
    g = torch.Generator().manual_seed(9)
    tokens = torch.randint(4, VOCABULARY, (n, LENGTH), generator=g)
    intent = torch.randint(4, (n,), generator=g)
    tokens[torch.arange(n), torch.randint(LENGTH, (n,), generator=g)] = intent  # one word gives it away
    return TensorDataset(tokens, intent)


def get_model_and_optimizer(lr):
    model = IntentModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    return model, optimizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model, optimizer = get_model_and_optimizer(args.lr)
    model.head = nn.Linear(model.head.in_features, 4)
    model = DDP(model)

    data = requests(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch // world, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        stats = torch.zeros(2)
        for tokens, intent in loader:
            loss = nn.functional.cross_entropy(model(tokens), intent)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item() * len(intent), len(intent)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {(stats[0] / stats[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
