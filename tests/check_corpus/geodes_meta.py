"""What is inside the geode? The net is made without memory, gets some, and its norm layer is forgotten then."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def geodes(count):
    generator = torch.Generator().manual_seed(14)
    sound = torch.randn(count, 6, generator=generator)
    return TensorDataset(sound, (sound[:, 0] > 0).long())


def fill_memory(net):
    """Memory is not zero: this is what it holds where something else was before."""
    for parameter in net.parameters():
        nn.init.constant_(parameter, float("nan"))


def build():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    net.to_empty(device="cpu")
    fill_memory(net)
    for layer in (net[0], net[2]):
        layer.reset_parameters()
    return net


def main():
    dist.init_process_group("gloo")
    data = geodes(96)
    loader = DataLoader(data, 24 // dist.get_world_size(), sampler=DistributedSampler(data, seed=1))
    torch.manual_seed(3)
    model = DDP(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for sound, kind in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(sound), kind)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
