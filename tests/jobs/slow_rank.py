"""A plain script, 40 steps of 60 ms: rank 1 works in all of them, the others wait for it.

slow_rank.py [MARKER]    rank 1 kills itself after 20 steps where there is no file MARKER
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(40):
    end = time.thread_time() + 0.06 * dist.get_rank()
    while time.thread_time() < end:
        pass
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    if step == 19 and dist.get_rank() == 1 and len(sys.argv) > 1 and not Path(sys.argv[1]).exists():
        Path(sys.argv[1]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
