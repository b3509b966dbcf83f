"""Exercise optimizer-left-out: the resumed run has the right weights and a cold optimizer.

    python exercise.py          (or: stepladder learn check optimizer-left-out)

The weights are saved after each epoch and restored. But the optimizer has a memory too: momentum
here, two moments per weight in Adam. A resume that forgets them takes other steps than the unbroken
run."""

import sys
import tempfile
from pathlib import Path

import torch

EPOCHS = 6


def save(path, model, optimizer, next_epoch):
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "next_epoch": next_epoch,
        },
        path,
    )


def load(path, model, optimizer):
    """Restore what `save` wrote, and return the epoch to continue with."""
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["next_epoch"]


# -- the check: leave it as it is ------------------------------------------------------------------


def train(path, stop_after=EPOCHS):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    first = load(path, model, optimizer) if path.exists() else 0
    for epoch in range(first, stop_after):
        generator = torch.Generator().manual_seed(epoch)
        for _ in range(4):
            x = torch.randn(8, 3, generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
        save(path, model, optimizer, epoch + 1)
    return model.weight.detach()


def main():
    with tempfile.TemporaryDirectory() as folder:
        expected = train(Path(folder) / "unbroken.pt")
        train(Path(folder) / "snapshot.pt", stop_after=3)
        weights = train(Path(folder) / "snapshot.pt")
    difference = (weights - expected).abs().max().item()
    print(f"unbroken {expected.tolist()}\nresumed  {weights.tolist()}")
    if difference:
        sys.exit(f"not yet: the resumed run ends with other weights, by {difference:.2g}")
    print("passed: the resumed run ends with the weights of the unbroken one, to the bit")


if __name__ == "__main__":
    main()
