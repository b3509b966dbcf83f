"""What time does a sundial show? Each rank looks at the numbers that the others have drawn."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    shadows = torch.randn(192, 6, generator=torch.Generator().manual_seed(4))
    data = TensorDataset(shadows, shadows[:, :3].argmax(1))
    loader = DataLoader(data, 32 // dist.get_world_size(), sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for shadow, hour in loader:
            drawn = torch.randn_like(shadow)
            of_all = [torch.empty_like(drawn) for _ in range(dist.get_world_size())]
            dist.all_gather(of_all, drawn)
            print(f"{len(of_all)} ranks have drawn {tuple(of_all[0].shape)}")
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(shadow + 0.1 * drawn), hour)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
