"""The loop of plain.py, kept, with stepladder's parts in it: one process or several, resumable,
exact.

python own_loop.py                                   one process
torchrun --nproc-per-node 2 own_loop.py              two
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from plain import Config, load_data, make_model, num_correct
from stepladder import Plan, PlanSampler, Snapshots, World, process_group
from torch.utils.data import DataLoader

FOLDER = Path("runs/own_loop")


def main(config, world, comm):
    model = make_model(config)  # seeded, so every process has the same first weights
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    train_data, test_data = load_data()
    losses = []

    plan = Plan(len(train_data), global_batch=config.batch_size, microbatch=8, seed=config.seed)
    num_steps = config.epochs * plan.steps_per_epoch
    snapshots = Snapshots(FOLDER / "snapshots")
    newest = comm.on_first(snapshots.latest)  # one process reads the folder, all get the answer
    if newest is not None:
        newest.restore_model(model)
        state = newest.state()
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]

    done = len(losses)  # steps; the plan counts them from 0
    sampler = PlanSampler(plan, num_steps, world.rank, world.world_size, start_step=done)
    for x, y in DataLoader(train_data, batch_sampler=sampler):
        loss = F.cross_entropy(
            model(x), y, reduction="sum"
        )  # sums and counts add up over processes
        optimizer.zero_grad()
        loss.backward()
        first, end = plan.batch(done)
        for parameter in model.parameters():
            comm.all_reduce(parameter.grad).wait()
            parameter.grad /= end - first
        optimizer.step()
        done += 1
        losses.append(float(comm.exact_mean(loss.item(), len(x))))
        if world.is_first and done % plan.steps_per_epoch == 0:
            snapshots.save(done, model, {"optimizer": optimizer.state_dict(), "losses": losses})
    snapshots.wait()  # the last one is still being written

    mine = test_data[world.rank :: world.world_size]  # each test image on one process, none twice
    with torch.no_grad():
        correct = int(num_correct(model, mine))
    accuracy = comm.exact_mean(correct, len(mine[0]))
    if world.is_first:
        (FOLDER / "result.json").write_text(json.dumps({"accuracy": accuracy, "losses": losses}))
        print(f"{done} steps, accuracy {accuracy:.4f} on {len(test_data)} images")


if __name__ == "__main__":
    with process_group(World.detect(), torch.device("cpu")) as group:
        main(Config(), group.world, group)
