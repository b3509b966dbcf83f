"""Rate a review by its words: embedding bag, one GPU per process, cosine schedule, goes on from a checkpoint."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CHECKPOINT, EPOCHS, BATCH = "reviews.ckpt", 4, 64
CUDA = torch.cuda.is_available()


def reviews(n=512):
    g = torch.Generator().manual_seed(5)
    worth = torch.randn(80, generator=g)
    words = torch.randint(80, (n, 12), generator=g)
    return TensorDataset(words, worth[words].mean(1, keepdim=True))


def build(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.EmbeddingBag(80, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    return net, optimizer


def save_checkpoint(net, optimizer, scheduler, epoch):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    if dist.get_rank() == 0:
        checkpoint = {
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "next_epoch": epoch + 1,
            "rng": rng,
        }
        torch.save(checkpoint, CHECKPOINT + ".tmp")
        os.replace(CHECKPOINT + ".tmp", CHECKPOINT)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    net, optimizer = build(device)
    start = 0
    if os.path.exists(CHECKPOINT):
        checkpoint = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["next_epoch"]
        torch.set_rng_state(checkpoint["rng"][rank])
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS)
    model = DDP(net, device_ids=[local_rank] if CUDA else None)

    data = reviews()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH // world, sampler=sampler, pin_memory=CUDA)
    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)
        for words, stars in loader:
            words, stars = words.to(device, non_blocking=True), stars.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            nn.functional.mse_loss(model(words), stars).backward()
            optimizer.step()
        scheduler.step()
        save_checkpoint(net, optimizer, scheduler, epoch)
    if rank == 0:
        print(f"done, learning rate {scheduler.get_last_lr()[0]:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
