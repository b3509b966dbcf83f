"""Exercise one-class: the loss is 0 from the first step on, and the model learns nothing.

    python exercise.py          (or: stepladder learn check one-class)

A line with three slopes is to be learned. The loop is right, and so are the data. Look at the loss.
"""

import sys

import torch
import torch.nn.functional as F

SLOPES = torch.tensor([[2.0], [-1.0], [0.5]])


def loss_of(model, x, y):
    """Return what the optimizer makes smaller. y has a number for each row of x."""
    return F.cross_entropy(model(x), y)


# -- the check: leave it as it is ------------------------------------------------------------------


def main():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 3, generator=generator)
    y = x @ SLOPES
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(50):
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    slopes = model.weight.detach().T
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; slopes {slopes.flatten().tolist()}")
    if losses[0] == 0:
        sys.exit("not yet: the loss is 0 before the first step, so no weight has moved")
    if not torch.allclose(slopes, SLOPES, atol=0.05):
        sys.exit(f"not yet: the slopes are {SLOPES.flatten().tolist()}")
    print("passed: the loss falls, and the slopes are found")


if __name__ == "__main__":
    main()
