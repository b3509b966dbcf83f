"""Continue a wave: Lightning Fabric with accumulation, clipping, and a validation that counts every sample once."""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

EPOCHS, GLOBAL_BATCH, ACCUMULATE = 3, 64, 2


def waves(n, seed):
    g = torch.Generator().manual_seed(seed)
    phase, speed = 6.283 * torch.rand(n, 1, generator=g), 0.2 + 0.3 * torch.rand(n, 1, generator=g)
    wave = torch.sin(phase + speed * torch.arange(17))
    return TensorDataset(wave[:, :16, None], wave[:, 16:])


class WaveRNN(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, wave):
        return self.out(self.rnn(wave)[0][:, -1])


def train(fabric, model, optimizer, loader):
    model.train()
    for number, (wave, following) in enumerate(loader, 1):
        accumulating = number % ACCUMULATE != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.mse_loss(model(wave), following)
            fabric.backward(loss / ACCUMULATE)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def validate(fabric, model, loader):
    model.eval()
    sums = torch.zeros(2, device=fabric.device)
    for wave, following in loader:
        sums[0] += nn.functional.mse_loss(model(wave), following, reduction="sum")
        sums[1] += following.numel()
    sums = fabric.all_reduce(sums, reduce_op="sum")
    return (sums[0] / sums[1]).item()


def main():
    fabric = Fabric(accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(4, verbose=False)
    model = WaveRNN()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=5e-3))
    micro_batch = GLOBAL_BATCH // fabric.world_size // ACCUMULATE
    train_loader = fabric.setup_dataloaders(DataLoader(waves(512, 0), micro_batch, shuffle=True))
    valid = waves(99, 1)
    mine = Subset(valid, range(fabric.global_rank, len(valid), fabric.world_size))
    valid_loader = fabric.setup_dataloaders(DataLoader(mine, 32), use_distributed_sampler=False)
    for epoch in range(EPOCHS):
        train(fabric, model, optimizer, train_loader)
        fabric.print(f"epoch {epoch}: validation mse {validate(fabric, model, valid_loader):.5f}")
    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
