"""The next rune of an inscription. There is no epoch: each rank draws windows, with a seed of its own."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

SNAPSHOT = "runes.pt"


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    runes = torch.randint(24, (4000,), generator=torch.Generator().manual_seed(8)).cumsum(0) % 24
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(24, 12), nn.Linear(12, 24))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step = 0
    torch.manual_seed(100 + rank)
    if os.path.exists(SNAPSHOT):
        saved = torch.load(SNAPSHOT, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        torch.manual_seed(100 + rank)
    model = DDP(net)
    while step < 24:
        starts = torch.randint(len(runes) - 17, (16 // dist.get_world_size(),)).tolist()
        windows = torch.stack([runes[s : s + 17] for s in starts])
        loss = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 6 == 0:
            if rank == 0:
                content = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(content, f"{SNAPSHOT}.new")
                os.replace(f"{SNAPSHOT}.new", SNAPSHOT)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
