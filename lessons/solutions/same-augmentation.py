"""Exercise same-augmentation: every process draws the same noise.

    python exercise.py          (or: stepladder learn check same-augmentation)

The same seed on every process gives all of them the same first weights, as it should. It also gives all of
them the same random crops and the same noise for different images: half as much variety on two processes.
The processes are played one after the other here, for a seed needs no other process.
"""

import sys

import torch

NUM_RANKS, SEED = 2, 7


def set_up(rank):
    """Returns the model, and the generator that augmentation draws from."""
    torch.manual_seed(SEED)
    model = torch.nn.Linear(4, 1)
    return model, torch.Generator().manual_seed(SEED + 1 + rank)


def augment(images, generator):
    return images + 0.1 * torch.randn(images.shape, generator=generator)


# -- the check: leave it as it is -------------------------------------------------------------------------


def play(rank):
    """The first weights of this process, and what augmentation added to three batches of images."""
    model, generator = set_up(rank)
    images = torch.zeros(5, 4)
    noise = torch.stack([augment(images, generator) for _ in range(3)])
    return model.weight.detach().clone(), noise


def main():
    weights, noise = zip(*(play(rank) for rank in range(NUM_RANKS)), strict=True)
    for rank in range(NUM_RANKS):
        print(
            f"rank {rank}: first weights {weights[rank][0, :2].tolist()}, noise {noise[rank][0, 0, :2].tolist()}"
        )
    if not torch.equal(weights[0], weights[1]):
        sys.exit("not yet: the first weights must be the same on every process")
    if torch.equal(noise[0], noise[1]):
        sys.exit("not yet: both processes add the same noise to different images")
    if not all(torch.equal(play(rank)[1], noise[rank]) for rank in range(NUM_RANKS)):
        sys.exit("not yet: a second run draws other noise, so that no run can be repeated")
    print("passed: the same weights, each process its own noise, and a second run repeats both")


if __name__ == "__main__":
    main()
