"""A cart learns to stay in the middle. Each rank plays its own games; gradients are averaged in one flat vector."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector


class Cart:
    def __init__(self, generator):
        self.g = generator

    def reset(self):
        self.state = torch.rand(2, generator=self.g) - 0.5
        return self.state.clone()

    def step(self, push):
        x, v = self.state
        v = v + 0.1 * push + 0.02 * torch.randn((), generator=self.g)
        self.state = torch.stack([x + 0.1 * v, v])
        return self.state.clone(), -float(self.state[0].abs())


def play(policy, cart, generator, length=20):
    state, logs, rewards = cart.reset(), [], []
    for _ in range(length):
        p = torch.softmax(policy(state), -1)
        action = int(torch.multinomial(p.detach(), 1, generator=generator))
        logs.append(p[action].log())
        state, reward = cart.step(2 * action - 1)
        rewards.append(reward)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(logs), returns


def average(policy):
    flat = parameters_to_vector(p.grad for p in policy.parameters())
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    place = 0
    for p in policy.parameters():
        p.grad.copy_(flat[place : place + p.numel()].view_as(p))
        place += p.numel()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    for p in policy.parameters():
        dist.broadcast(p.data, 0)
    g = torch.Generator().manual_seed(77 + rank)
    cart, optimizer = Cart(g), torch.optim.Adam(policy.parameters(), lr=3e-3)
    for update in range(12):
        games = [play(policy, cart, g) for _ in range(4)]
        mean = torch.stack([r.mean() for _, r in games]).mean()
        loss = -torch.stack([(logs * (r - mean)).sum() for logs, r in games]).mean()
        optimizer.zero_grad()
        loss.backward()
        average(policy)
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        score = torch.stack([r[0] for _, r in games]).mean()
        dist.all_reduce(score)
        if rank == 0:
            print(f"update {update}: mean return {score.item() / dist.get_world_size():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
