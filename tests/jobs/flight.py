"""One of two ranks that make collectives over gloo, the third by rank 0 alone: RANK STORE OUT.

It leaves what torch's flight recorder saw in OUT.flight-RANK, and as JSON in OUT.json-RANK. Then it
waits to be killed, for gloo ends a rank whose peer has gone."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # read when torch's library is loaded

import torch
import torch.distributed as dist


def main(rank: int, store: str, out: Path) -> None:
    from torch._C import _distributed_c10d as c10d

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for _ in range(2):
        dist.all_reduce(torch.zeros(3))
    while not all(entry["retired"] for entry in json.loads(c10d._dump_fr_trace_json())["entries"]):
        time.sleep(0.01)  # the recorder learns of an end a moment after the caller does
    if rank == 0:
        dist.all_reduce(torch.zeros(3), async_op=True)
    for form, dump in (("json", c10d._dump_fr_trace_json()), ("flight", c10d._dump_fr_trace())):
        aside = out.with_name(f"aside-{form}-{rank}")
        aside.write_bytes(dump)
        aside.rename(out.with_name(f"{out.name}.{form}-{rank}"))
    time.sleep(200)


main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
