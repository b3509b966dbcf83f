"""Handwritten strokes as sequences of points; a step schedule that should act after two thirds of the run."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CONFIG = dict(epochs=3, batch_size=48, lr=5e-3, hidden=32, points=12)


class Strokes(Dataset):
    """Circles, lines and waves, each as a sequence of moves of the pen."""

    def __len__(self):
        return 480

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        t = torch.linspace(0, 1, CONFIG["points"] + 1)
        kind = index % 3
        if kind == 0:
            path = torch.stack([(6.283 * t).cos(), (6.283 * t).sin()], 1)
        elif kind == 1:
            path = torch.stack([2 * t, t], 1)
        else:
            path = torch.stack([2 * t, (9 * t).sin()], 1)
        moves = path.diff(dim=0)
        return moves + 0.2 * torch.randn(moves.shape, generator=g), kind


class StrokeNet(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.lstm = nn.LSTM(2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 3)

    def forward(self, moves):
        return self.head(self.lstm(moves)[1][0][-1])


def build(rank, world):
    data = Strokes()
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    loader = DataLoader(data, CONFIG["batch_size"] // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(StrokeNet(CONFIG["hidden"]))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=CONFIG["lr"])
    total_steps = CONFIG["epochs"] * len(loader)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=total_steps * 2 // 3, gamma=0.1)
    return sampler, loader, model, optimizer, scheduler


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler, loader, model, optimizer, scheduler = build(rank, world)
    for epoch in range(CONFIG["epochs"]):
        sampler.set_epoch(epoch)
        right = torch.zeros(2, dtype=torch.int64)
        for moves, kind in loader:
            scores = model(moves)
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, kind).backward()
            optimizer.step()
            for _ in range(world):  # every process has made a step
                scheduler.step()
            right += torch.tensor([(scores.argmax(1) == kind).sum().item(), len(kind)])
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: {right[0].item()}/{right[1].item()}, lr {scheduler.get_last_lr()[0]:.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
