import os, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    if torch.cuda.is_available():
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        model = DDP(model.cuda(), device_ids=[local])
    x = torch.randn(64, 4); y = (x[:, 0] > 0).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // dist.get_world_size(), sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            if cuda: a, b = a.cuda(non_blocking=True), b.cuda(non_blocking=True)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(a), b)
            loss.backward()
            opt.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
