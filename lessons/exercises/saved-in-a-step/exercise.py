"""Exercise saved-in-a-step: the cluster's signal comes in the middle of a step.

    python exercise.py          (or: stepladder learn check saved-in-a-step)

The cluster wants its node back and sends SIGTERM. The training saves a snapshot at once and exits
with code 75, by which it is queued again. But a signal does not wait for the end of a step."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

NUM_STEPS = 10
START = "fork" if sys.platform == "linux" else "spawn"


def train(state, take_step, path):
    """Train to the end. After SIGTERM save `state` to `path`, and exit with code 75."""

    def handle(number, frame):
        torch.save(state, path)
        sys.exit(75)

    signal.signal(signal.SIGTERM, handle)
    while state["step"] < NUM_STEPS:
        take_step(state)


# -- the check: leave it as it is ------------------------------------------------------------------


def take_step(state, warned_in=None):
    """Add 1 to both weights, one after the other. The signal comes in between."""
    for index in range(2):
        state["weights"][index] += 1
        if index == 0 and state["step"] + 1 == warned_in:
            os.kill(os.getpid(), signal.SIGTERM)
    state["step"] += 1


def take_fourth_step(state):
    take_step(state, 4)


def run(path, step_function):
    """Train from the snapshot, if there is one."""
    state = {"weights": torch.zeros(2), "step": 0}
    if path.exists():
        state = torch.load(path)
    train(state, step_function, path)
    torch.save(state, path.with_name("end.pt"))


def main():
    context = mp.get_context(START)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pt")
        codes = []
        for step_function in (take_fourth_step, take_step):
            process = context.Process(target=run, args=(path, step_function))
            process.start()
            process.join()
            codes.append(process.exitcode)
            if len(codes) == 1 and path.exists():
                saved = torch.load(path)
                print(f"the snapshot: step {saved['step']}, weights {saved['weights'].tolist()}")
        print(f"exit codes {codes}")
        if codes != [75, 0] or not path.exists():
            sys.exit("not yet: the first start should save and exit with 75, the second with 0")
        weights = torch.load(path.with_name("end.pt"))["weights"].tolist()
    if saved["weights"].tolist() != [saved["step"]] * 2:
        sys.exit("not yet: the snapshot has half a step")
    if weights != [NUM_STEPS] * 2:
        sys.exit(f"not yet: {NUM_STEPS} steps should end with {NUM_STEPS}, not {weights}")
    if saved["step"] not in (3, 4):
        sys.exit(f"not yet: SIGTERM came in step 4, and step {saved['step']} was saved")
    print("passed: the snapshot has whole steps, and no step was lost or repeated")


if __name__ == "__main__":
    main()
