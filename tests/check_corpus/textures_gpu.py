"""Train a small image net with one GPU per process: torchrun --nproc-per-node N textures_gpu.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH_SIZE = 32
LEARNING_RATE = 0.05
EPOCHS = 3


def textures(n):
    """Stripes in four directions."""
    g = torch.Generator().manual_seed(0)
    label = torch.randint(4, (n,), generator=g)
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    waves = torch.stack([torch.sin(x), torch.sin(y), torch.sin(x + y), torch.sin(x - y)])
    return TensorDataset(waves[label][:, None] + torch.randn(n, 1, 12, 12, generator=g), label)


class TextureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2), nn.GroupNorm(3, 12), nn.ReLU(), nn.AdaptiveMaxPool2d(3)
        )
        self.classifier = nn.Linear(12 * 9, 4)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def main():
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    dataset = textures(384)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, pin_memory=cuda)
    torch.manual_seed(0)
    model = DDP(TextureNet().to(device), device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scheduler = MultiStepLR(optimizer, milestones=[2], gamma=0.1)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        correct = torch.zeros(2, device=device)
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            logits = model(images)
            loss = nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            correct[0] += (logits.argmax(1) == labels).sum()
            correct[1] += len(labels)
        scheduler.step()
        dist.all_reduce(correct)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: training accuracy {(correct[0] / correct[1]).item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
