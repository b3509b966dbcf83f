"""Exercise same-augmentation: every process draws the same noise.

    python exercise.py          (or: stepladder learn check same-augmentation)

The same seed on every process gives all of them the same first weights, as it should. It also gives
all of them the same random crops and the same noise for different images: half as much variety on
two processes."""

import sys

import torch
import torch.multiprocessing as mp

NUM_RANKS = 2
SEED = 7
START = "fork" if sys.platform == "linux" else "spawn"


def set_up(rank):
    """Return the model, and the generator that augmentation draws from."""
    torch.manual_seed(SEED)
    model = torch.nn.Linear(4, 1)
    return model, torch.Generator().manual_seed(SEED + 1 + rank)


def augment(images, generator):
    return images + 0.1 * torch.randn(images.shape, generator=generator)


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, results):
    """Report the first weights, and what augmentation added to three batches of images."""
    model, generator = set_up(rank)
    noise = [augment(torch.zeros(5, 4), generator).flatten().tolist() for _ in range(3)]
    results.put((rank, model.weight.flatten().tolist(), noise))


def run():
    results = mp.get_context(START).SimpleQueue()
    mp.start_processes(rank_main, (results,), nprocs=NUM_RANKS, start_method=START)
    return sorted(results.get() for _ in range(NUM_RANKS))


def main():
    first = run()
    for rank, weights, noise in first:
        print(f"rank {rank}: first weights {weights[:2]}, noise {noise[0][:2]}")
    (_, weights, noise), (_, other_weights, other_noise) = first
    if weights != other_weights:
        sys.exit("not yet: the first weights must be the same on every process")
    if noise == other_noise:
        sys.exit("not yet: both processes add the same noise to different images")
    if run() != first:
        sys.exit("not yet: a second run draws other noise, so that no run can be repeated")
    print("passed: the same weights, each process its own noise, and a second run repeats both")


if __name__ == "__main__":
    main()
