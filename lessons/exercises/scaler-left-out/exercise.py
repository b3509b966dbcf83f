"""Exercise scaler-left-out: a resumed run in half precision that begins with another loss scale.

    python exercise.py          (or: stepladder learn check scaler-left-out)

A gradient scaler multiplies the loss by a scale that it adapts while it trains. The snapshot leaves
it out. The resumed run begins with the first scale again: gradients overflow, steps are skipped."""

import sys
import tempfile
from pathlib import Path

import torch


def save(path, model, optimizer, scaler, next_step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "next_step": next_step}, path)


def load(path, model, optimizer, scaler):
    """Restore what `save` wrote, and return the step to continue with."""
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["next_step"]


# -- the check: leave it as it is ------------------------------------------------------------------


class Scaler:
    """A gradient scaler for any device: half the scale after an overflow, double after 4 steps."""

    scale = 65536.0
    good_steps = 0
    skipped = 0

    def state_dict(self):
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state):
        vars(self).update(state)

    def step(self, optimizer, parameters):
        if not all(parameter.grad.half().isfinite().all() for parameter in parameters):
            self.load_state_dict({"scale": self.scale / 2, "good_steps": 0})
            self.skipped += 1
            return
        for parameter in parameters:
            parameter.grad = parameter.grad.half().float() / self.scale
        optimizer.step()
        self.good_steps += 1
        self.scale *= 1 + (self.good_steps % 4 == 0)


def train(path, stop_after=12):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = Scaler()
    first = load(path, model, optimizer, scaler) if path.exists() else 0
    for step in range(first, stop_after):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        error = model(x) - 5 * x.sum(1, keepdim=True)
        (error.square().mean() * scaler.scale).backward()
        scaler.step(optimizer, list(model.parameters()))
        save(path, model, optimizer, scaler, step + 1)
    return model.weight.detach(), scaler


def main():
    with tempfile.TemporaryDirectory() as folder:
        expected, unbroken = train(Path(folder) / "unbroken.pt")
        train(Path(folder) / "snapshot.pt", stop_after=7)
        weights, resumed = train(Path(folder) / "snapshot.pt")
    if resumed.skipped >= 3:
        sys.exit(
            f"not yet: the resumed run skipped {resumed.skipped} steps, for gradients overflow"
        )
    if (resumed.scale, resumed.good_steps) != (unbroken.scale, unbroken.good_steps):
        sys.exit("not yet: the resumed run has another loss scale, or counts its good steps anew")
    if not torch.equal(weights, expected):
        sys.exit("not yet: the resumed run ends with other weights")
    print("passed: the resumed run has the loss scale and the weights of the unbroken one")


if __name__ == "__main__":
    main()
