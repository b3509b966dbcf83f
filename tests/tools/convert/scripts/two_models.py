"""No loader, two models: one makes several steps for each step of the other."""

import torch
from torch import nn

SIZE = 32
torch.manual_seed(0)
first = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
second = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
of_first = torch.optim.SGD(first.parameters(), lr=1e-2)
of_second = torch.optim.SGD(second.parameters(), lr=1e-2)
for turn in range(200):
    for _ in range(3):
        x = torch.randn(SIZE, 2)
        of_first.zero_grad()
        output = first(x)
        loss = (output - 2 * x).square().mean()
        loss.backward()
        of_first.step()
    z = torch.randn(SIZE, 2)
    of_second.zero_grad()
    output = second(z)
    value = (output - z.sum(1, keepdim=True)).square().mean()
    value.backward()
    of_second.step()
    if turn % 100 == 99:
        print(f"turn {turn}: {loss.item():.3f} and {value.item():.3f}")
