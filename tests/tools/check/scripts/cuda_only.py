"""For GPUs alone: what `--pretend-gpus` has to stand in for."""

import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

assert torch.cuda.is_available(), "needs a GPU"
dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
device = torch.device("cuda", local)
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 2).cuda(), device_ids=[local])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.cuda.amp.GradScaler()
stream = torch.cuda.Stream()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.manual_seed(dist.get_rank() + 1)
for i in range(6):
    with torch.cuda.stream(stream):
        x = torch.randn(16, 8, device=device)
        y = torch.randint(2, (16,)).to(device, non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    start.record()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    end.record()
    torch.cuda.synchronize()
dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
g = torch.Generator(device="cuda").manual_seed(1)
print(loss.item(), start.elapsed_time(end) >= 0, torch.cuda.get_device_name(), x.is_cuda)
dist.destroy_process_group()
