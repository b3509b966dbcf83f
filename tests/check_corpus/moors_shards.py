"""How deep is the peat of a moor? The run can go on from its last step."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Keeper:
    def __init__(self, folder, model, optimizer):
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        self.is_first = dist.get_rank() == 0
        self.folder.mkdir(exist_ok=True)

    def save(self, step):
        with FSDP.state_dict_type(
            self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
        ):
            weights = self.model.state_dict()
        if self.is_first:
            part = self.folder / "last.part"
            torch.save({"weights": weights, "step": step}, part)
            os.replace(part, self.folder / "last.pt")
            torch.save(self.optimizer.state_dict(), self.folder / "moments.part")
            os.replace(self.folder / "moments.part", self.folder / f"moments-{dist.get_rank()}.pt")
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(3, 24), nn.GELU(), nn.Linear(24, 1))
    model = FSDP(net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keeper = Keeper("kept", model, optimizer)
    x = torch.rand(192, 3, generator=torch.Generator().manual_seed(6))
    data = TensorDataset(x, x.max(1, keepdim=True).values)
    sampler, step = DistributedSampler(data, shuffle=True), 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(data, 48 // dist.get_world_size(), sampler=sampler):
            optimizer.zero_grad()
            nn.functional.l1_loss(model(a), b).backward()
            optimizer.step()
            step += 1
        keeper.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
