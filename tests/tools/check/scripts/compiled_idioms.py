"""Compiled functions that name a GPU."""

import json
import sys
import traceback

import torch
from torch import nn


def make_and_move(x):
    device = torch.device("cuda", 0)
    noise = torch.zeros(3, device=device) + torch.ones_like(x, device="cuda")
    return x.to(device) + noise.to("cuda:1").cuda() + torch.arange(3, device=0)


def compiled_functions():
    compiled = torch.compile(make_and_move, backend=sys.argv[1], fullgraph=True)
    assert compiled(torch.zeros(3, device="cuda")).tolist() == [1.0, 2.0, 3.0]


def compiled_models():
    model = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).cuda(), backend=sys.argv[1])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda"):
            loss = model(torch.ones(2, 3, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
    assert loss.item() >= 0


def compiled_autocast():
    @torch.compile(backend=sys.argv[1])
    def double(x):
        with torch.autocast("cuda", dtype=torch.float16):
            return (x @ x).to("cuda") if torch.is_autocast_enabled() else x

    assert double(torch.ones(2, 2, device="cuda")).dtype == torch.bfloat16


def main():
    results = {}
    for example in (compiled_functions, compiled_models, compiled_autocast):
        try:
            example()
            results[example.__name__] = ""
        except Exception:
            results[example.__name__] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
