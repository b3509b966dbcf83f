import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATION_STEPS = 5
GLOBAL_BATCH = 100
EPOCHS = 3


def get_dataset():
    g = torch.Generator().manual_seed(14)
    x = torch.randn(1000, 12, generator=g)
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()

    dataset = get_dataset()
    sampler = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // world_size // ACCUMULATION_STEPS, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    ddp_model = DDP(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.2, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp_model.train()
        optimizer.zero_grad()
        running = torch.zeros(2)
        for i, (x, y) in enumerate(loader):
            loss = loss_fn(ddp_model(x), y) / ACCUMULATION_STEPS
            loss.backward()
            running += torch.tensor([loss.item() * ACCUMULATION_STEPS * len(x), len(x)])
            if (i + 1) % ACCUMULATION_STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(running)
        if rank == 0:
            print(f"Epoch {epoch + 1}: loss {(running[0] / running[1]).item():.4f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
