"""Exercise sum-that-stops: a sum in bfloat16 grows no more after some hundred numbers.

    python exercise.py          (or: stepladder learn check sum-that-stops)

Under autocast the losses of a test set are numbers in bfloat16, of 8 binary digits. Their mean gets
the better the more there are."""

import sys

import torch


def mean_loss(losses):
    """Return the mean of the losses, which come one by one."""
    total = torch.zeros((), dtype=torch.bfloat16)
    count = 0
    for loss in losses:
        total += loss
        count += 1
    return (total / count).item()


# -- the check: leave it as it is ------------------------------------------------------------------


def main():
    generator = torch.Generator().manual_seed(0)
    for count in (100, 4000):
        losses = (0.05 + 0.1 * torch.rand(count, generator=generator)).bfloat16()
        expected = losses.double().mean().item()
        mean = mean_loss(iter(losses))
        print(f"{count} losses: {mean:.5f}, expected {expected:.5f}")
        if abs(mean - expected) > 0.02 * expected:
            sys.exit(f"not yet: the mean of {count} losses is {expected:.5f}, not {mean:.5f}")
    print("passed: the mean does not depend on how many losses there are")


if __name__ == "__main__":
    main()
