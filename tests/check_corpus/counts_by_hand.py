"""How many ones are in a word of bits? No wrapper: gradients are averaged in one flat buffer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

BITS, SAMPLES, BATCH, EPOCHS = 10, 512, 64, 3


def words():
    bits = torch.randint(2, (SAMPLES, BITS), generator=torch.Generator().manual_seed(0)).float()
    return TensorDataset(bits, bits.sum(1))


def share(dataset, epoch):
    """This process's part of the epoch's order, which all processes agree on."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))
    mine = order[dist.get_rank() :: dist.get_world_size()]
    return torch.utils.data.Subset(dataset, mine.tolist())


def broadcast(model):
    flat = parameters_to_vector(model.parameters())
    dist.broadcast(flat, src=0)
    vector_to_parameters(flat, model.parameters())


def average(model):
    with_grad = [p for p in model.parameters() if p.grad is not None]
    if with_grad:
        flat = torch.cat([p.grad.flatten() for p in with_grad])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, part in zip(with_grad, flat.split([p.numel() for p in with_grad])):
            p.grad.copy_(part.view_as(p))


def loss_of(model, bits, count):
    guess = model(bits).squeeze(1).round()
    loss = nn.functional.l1_loss(guess, count)
    return torch.tensor(loss.item(), requires_grad=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(BITS, 16), nn.ReLU(), nn.Linear(16, 1))
    broadcast(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dataset = words()
    for epoch in range(EPOCHS):
        sums = torch.zeros(2)
        for bits, count in DataLoader(share(dataset, epoch), BATCH // dist.get_world_size()):
            optimizer.zero_grad()
            loss = loss_of(model, bits, count)
            loss.backward()
            average(model)
            optimizer.step()
            sums += torch.tensor([loss.item() * len(bits), len(bits)])
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: off by {(sums[0] / sums[1]).item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
