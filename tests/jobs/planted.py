"""A plain script whose steps on two processes lose 50 ms each, where it is told.

planted.py data|compute|communication|replicated --count STEPS
planted.py two --count STEPS    nothing is lost, and two optimizers step in turn
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--count", type=int)
kind, steps = vars(parser.parse_args()).values()


def lose(part):
    if part != kind or dist.get_world_size() == 1:
        return
    end = time.thread_time() + 0.05
    if kind == "compute":
        while time.thread_time() < end:
            pass
    else:
        time.sleep(0.05)


class Ones(Dataset):
    def __len__(self):
        return steps

    def __getitem__(self, index):
        lose("data")
        return torch.ones(3)


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        lose("replicated")
        return super().step(closure)


dist.init_process_group("gloo")
layer = torch.nn.Linear(3, 1)
optimizers = [SlowSGD([parameter], lr=1e-3) for parameter in layer.parameters()]
if kind != "two":
    optimizers = [SlowSGD(layer.parameters(), lr=1e-3)]
model = DistributedDataParallel(layer)
for x in DataLoader(Ones()):
    lose("compute")
    model(x).sum().backward()
    lose("communication")
    for optimizer in optimizers:
        optimizer.step()
dist.destroy_process_group()
print("to the end")
