"""Exercise kept-graphs: an evaluation whose memory grows with each batch.

    python exercise.py          (or: stepladder learn check kept-graphs)

The loss of a batch knows how it was computed: its graph holds the activations of each layer. Where
losses are added up, the graphs of all batches stay until the sum is gone."""

import sys
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


def evaluate(model, batches):
    """Return the mean loss over all batches, as a number or a tensor."""
    total = torch.zeros(())
    for x, y in batches:
        total = total + F.mse_loss(model(x), y)
    return total / len(batches)


# -- the check: leave it as it is ------------------------------------------------------------------


NUM_BATCHES = 20


class Activation:
    """What a graph holds of a layer."""

    def __init__(self, tensor):
        self.tensor = tensor


def count_kept(function, *args):
    """Return the function's value, and how many activations were held at once."""
    held = weakref.WeakSet()
    most = 0

    def keep(tensor):
        nonlocal most
        activation = Activation(tensor)
        held.add(activation)
        most = max(most, len(held))
        return activation

    with saved_tensors_hooks(keep, lambda activation: activation.tensor):
        return function(*args), most


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    batches = [(torch.randn(16, 4), torch.randn(16, 1)) for _ in range(NUM_BATCHES)]
    expected = sum(F.mse_loss(model(x), y).item() for x, y in batches) / NUM_BATCHES
    _, of_one_batch = count_kept(lambda: F.mse_loss(model(batches[0][0]), batches[0][1]))
    loss, most = count_kept(evaluate, model, batches)
    loss = torch.as_tensor(loss).detach().item()
    print(f"mean loss {loss:.6f}; activations: {most} held, of one batch {of_one_batch}")
    if abs(loss - expected) > 1e-5:
        sys.exit(f"not yet: the mean loss is {expected:.6f}")
    if most > 2 * of_one_batch:  # the last batch's may go when the next one's come
        sys.exit(f"not yet: the activations of {most // of_one_batch} batches are held at once")
    if not torch.is_grad_enabled() or not model(batches[0][0]).requires_grad:
        sys.exit("not yet: after the evaluation the model cannot be trained")
    print("passed: one batch's memory, however many there are")


if __name__ == "__main__":
    main()
