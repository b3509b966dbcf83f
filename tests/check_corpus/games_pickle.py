"""Who wins the game, from the position on the board? The state of the training goes through pickle."""

import os
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Boards:
    """Nine fields with -1, 0 or 1. Who has more of the corners and the center wins."""

    @staticmethod
    def make(n):
        boards = torch.randint(-1, 2, (n, 9), generator=torch.Generator().manual_seed(2)).float()
        worth = torch.tensor([2.0, 1, 2, 1, 3, 1, 2, 1, 2])
        return TensorDataset(boards, ((boards * worth).sum(1).sign() + 1).long())


class Snapshots:
    def __init__(self, path):
        self.path = path

    def write(self, **state):
        if dist.get_rank() == 0:
            with open(self.path + ".tmp", "wb") as f:
                pickle.dump(state, f)
            os.replace(self.path + ".tmp", self.path)

    def read(self):
        if not os.path.exists(self.path):
            return None
        with open(self.path, "rb") as f:
            return pickle.load(f)


def rng_of_all():
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    return states


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    snapshots = Snapshots("games.pkl")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    epochs_done = 0
    saved = snapshots.read()
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"][rank])
        epochs_done = saved["epochs_done"]
    model = DDP(net)

    boards = Boards.make(480)
    sampler = DistributedSampler(boards)
    loader = DataLoader(boards, 48 // world, sampler=sampler)
    while epochs_done < 3:
        sampler.set_epoch(epochs_done)
        right = torch.zeros(2, dtype=torch.long)
        for board, winner in loader:
            scores = model(board)
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, winner).backward()
            optimizer.step()
            right += torch.tensor([(scores.argmax(1) == winner).sum().item(), len(winner)])
        dist.all_reduce(right)
        epochs_done += 1
        if rank == 0:
            print(f"after {epochs_done} epochs: {right[0].item()} of {right[1].item()} right in training")
        snapshots.write(
            net=net.state_dict(), optimizer=optimizer.state_dict(), rng=rng_of_all(), epochs_done=epochs_done
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
