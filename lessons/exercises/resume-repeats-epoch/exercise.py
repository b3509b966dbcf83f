"""Exercise resume-repeats-epoch: the snapshot says which epoch was done, the resume does it again.

    python exercise.py          (or: stepladder learn check resume-repeats-epoch)

A run of six epochs is stopped after the third and started again. It should go on with the fourth,
and end with the weights of a run that was never stopped."""

import sys
import tempfile
from pathlib import Path

import torch

EPOCHS = 6


def train(path, stop_after=EPOCHS):
    """Train from the snapshot in `path`, if there is one; return the new epochs and the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = 0
    if path.exists():
        snapshot = torch.load(path)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first = snapshot["epoch"]
    done = []
    for epoch in range(first, stop_after):
        train_epoch(model, optimizer, epoch)
        done.append(epoch)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, path)
    return done, model.weight.tolist()


def train_epoch(model, optimizer, epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(4):
        x = torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


# -- the check: leave it as it is ------------------------------------------------------------------


def main():
    with tempfile.TemporaryDirectory() as folder:
        unbroken, expected = train(Path(folder) / "unbroken.pt")
        before, _ = train(Path(folder) / "snapshot.pt", stop_after=3)
        after, weights = train(Path(folder) / "snapshot.pt")
    print(f"unbroken {unbroken}   stopped {before}, resumed {after}")
    twice = sorted(set(before) & set(after))
    if twice:
        sys.exit(f"not yet: trained twice: epochs {twice}")
    if before + after != list(range(EPOCHS)):
        sys.exit(f"not yet: six epochs, each once, in order; done were {before + after}")
    if weights != expected:
        sys.exit("not yet: the weights differ from those of the unbroken run")
    print("passed: each epoch once, and the weights of the unbroken run")


if __name__ == "__main__":
    main()
