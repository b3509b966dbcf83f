"""The parts of `make gpu`: each runs something on the device and returns the text of its section.

With device cpu they rehearse: the smallest sizes, figures that say nothing. A part raises Skipped
where the machine lacks something, and Failed where what should have run did not."""

import importlib.util
import math
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from commands import Failed, result_of
from report import bar, table

ROOT = Path(__file__).resolve().parent.parent
SHARED_CARD = (1, 2, 4)  # processes on one GPU
COMPARES = ("09-learning-rate",)  # lessons that compare several processes with one
ONE_NODE_WILL_DO = ("16-evaluation", "17-streaming")  # of those that start two
# the well-known setting of a language model of characters on one GPU, which ends at 1.47
LARGER = {
    "layers": 6, "heads": 6, "width": 384, "block": 256, "dropout": 0.2, "global-batch": 64, "lr": 1e-3,
    "ngrams": 1, "epochs": 125, "precision": "bf16",
}  # fmt: skip
LEAST_LOSS = 1.47
MODES = {
    "ddp, one pass": ("--sync", "ddp"),
    "ddp, microbatches of 16": ("--sync", "ddp", "--microbatch", 16),
    "exact, microbatches of 16": ("--sync", "exact", "--microbatch", 16),
}


CAPTURED = {
    "ddp, one pass, captured": (*MODES["ddp, one pass"], "--capture"),
    "exact, microbatches of 16, captured": (*MODES["exact, microbatches of 16"], "--capture"),
}
MOST_FOR_EXACT = 1.10


class Skipped(Exception):
    """What is missing, by name."""


@dataclass(frozen=True)
class Machine:
    """device: cuda, or cpu for a rehearsal.  mnist and so on: folders, or None where there are
    none.
    """

    device: str
    mnist: Path | None
    movielens: Path | None
    shakespeare: Path | None = None

    @property
    def is_trial_on_cpu(self) -> bool:
        return self.device == "cpu"

    def job(self) -> tuple[object, ...]:
        """The words of `stepladder train` for MNIST, or where it is not there for the smallest
        recipe.
        """
        return ("mnist", "--data-dir", self.mnist) if self.mnist else ("mlp",)


def tests(machine: Machine) -> str:
    """`pytest tests/gpu`, and what it skipped."""
    for package in ("pytest", "pytest_timeout", "xdist", "hypothesis"):
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"{package} is not installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-n",
        "0",
    ]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        raise Failed("\n".join(lines[-40:]))
    skipped = [f"- {line.strip()}" for line in lines if line.startswith("SKIPPED")]
    return "\n".join([f"`pytest tests/gpu`: {lines[-1].strip('= ')}", *skipped])


def step(machine: Machine) -> str:
    """The MLP's step beside a hand-written loop, Accelerate, Fabric and Lightning:
    `step_overhead.py`.
    """
    from step_overhead import OTHERS, measured, sections

    rounds, epochs = (1, (1, 2)) if machine.is_trial_on_cpu else (7, (1, 11))
    return "\n\n".join(sections(measured(OTHERS, machine.device, rounds, epochs), rounds, epochs))


def mnist(machine: Machine) -> str:
    """Time to 99.0 % beside the PyTorch example's, its data on the card: `mnist_time_to_99.py`."""
    from mnist_time_to_99 import example, in_turns, read, sections, trial

    if machine.mnist is None:
        raise Skipped("no MNIST files")
    train, test = read(machine.mnist, machine.device)
    if machine.is_trial_on_cpu:
        few = (test[0][:1000], test[1][:1000])
        return trial(
            machine.mnist, partial(example, train, few, 1, 2), "--steps", 20, "--device", "cpu"
        )
    run_example = partial(example, train, test, 1, None)
    runs, history = in_turns(machine.mnist, (1,), ("--device", machine.device), run_example)
    return "\n\n".join(sections(runs, history, 1, None))


def recommender(machine: Machine) -> str:
    """Quality and training pairs a second: `movielens_quality.py` and `movielens_speed.py`."""
    from movielens_quality import as_row, ranking_table, train
    from movielens_speed import plain, recipe

    from stepladder.data.movielens.leave_one_out import read_leave_one_out

    if machine.movielens is None:
        raise Skipped("no leave-one-out split of MovieLens 1M")
    flags = ("--task", "ranking", "--device", machine.device)
    models = ("mf", "hybrid", "neumf")
    rounds = 3
    if machine.is_trial_on_cpu:
        flags = (*flags, "--epochs", 1)
        models = ("mf",)
        rounds = 1
    rows = [as_row(name, *train(machine.movielens, "--model", name, *flags)) for name in models]
    data = read_leave_one_out(machine.movielens)
    rates = []
    for _ in range(rounds):
        slow = plain(data, 0.5 if machine.is_trial_on_cpu else 4, machine.device)
        rates.append(
            (slow, recipe(machine.movielens, 1 if machine.is_trial_on_cpu else 10, machine.device))
        )
    pairs = [
        [f"round {i}", f"{a:,.0f}", f"{b:,.0f}", f"{b / a:.1f}"]
        for i, (a, b) in enumerate(rates, 1)
    ]
    return "\n\n".join(
        [
            "MovieLens 1M, leave-one-out; seconds of the whole process.",
            ranking_table(rows),
            "Training pairs a second, a plain loop over a DataLoader and the recipe in turns.",
            table(["", "plain PyTorch", "stepladder", "times faster"], pairs),
        ]
    )


def language(machine: Machine) -> str:
    """The recipe gpt in its larger setting: 6 layers, 384 wide, blocks of 256; its best validation
    loss.
    """
    if machine.shakespeare is None:
        raise Skipped("no input.txt of Shakespeare")
    flags_of_size = LARGER
    if machine.is_trial_on_cpu:
        flags_of_size = LARGER | {"layers": 1, "heads": 1, "width": 8, "epochs": 1}
    flags = [word for name, value in flags_of_size.items() for word in (f"--{name}", value)]
    job = ("gpt", "--data-dir", machine.shakespeare, "--device", machine.device)
    result, seconds = result_of("train", *job, *flags)
    best = result["best"]
    speed = result["samples_per_second"] * LARGER["block"]
    row = [
        f"{best['value']:.4f}",
        f"{best['step']:,} of {result['steps']:,}",
        f"{result['seconds']:.1f}",
    ]
    head = ["best val_loss", "after step", "seconds of training", "whole process", "tokens/s"]
    verdict = "PASS" if best["value"] <= LEAST_LOSS else "FAIL"
    return "\n\n".join(
        [
            "`" + " ".join(["gpt", *map(str, flags)]) + "`, evaluated after each epoch.",
            table(head, [[*row, f"{seconds:.1f}", f"{speed:,.0f}"]]),
            f"- {verdict}: validation loss {best['value']:.4f} (bar: at most {LEAST_LOSS})",
        ]
    )


def exact(machine: Machine) -> str:
    """Exact mode on processes that share the card, and what it costs beside ddp; all sizes and
    modes in turns.
    """
    sizes = SHARED_CARD[:2] if machine.is_trial_on_cpu else SHARED_CARD
    steps, rounds = (5, 1) if machine.is_trial_on_cpu else (40, 2)
    common = (*machine.job(), "--device", machine.device, "--global-batch", 128)
    counted = ("--nproc", ",".join(map(str, sizes)), "--rounds", 1, "--steps", steps)
    modes = dict(MODES)
    failed = []
    for name, flags in {} if machine.is_trial_on_cpu else CAPTURED.items():
        try:
            result_of("train", *common, "--steps", 2, *flags)
            modes[name] = flags
        except Failed as error:  # the others are worth their figures
            failed.append(f"- FAIL: {name}: {str(error).strip().splitlines()[-1]}")
    seconds: dict[str, list[list[float]]] = {name: [] for name in modes}  # by round and size
    for number in range(rounds):
        for name in list(modes)[:: -1 if number % 2 else 1]:
            result, _ = result_of("scale", *common, *counted, *modes[name])
            seconds[name].append([size["seconds_per_step"] for size in result["sizes"]])
    fastest = next(iter(MODES))
    rows = []
    for name, measured in seconds.items():
        cells = []
        for index in range(len(sizes)):
            ratio = median(
                duration[index] / base[index]
                for duration, base in zip(measured, seconds[fastest], strict=True)
            )
            cells += [
                f"{1e3 * median(duration[index] for duration in measured):.2f}",
                f"{ratio:.2f}",
            ]
        rows.append([name, *cells])
    hashes = {n: weights(machine, common, n, steps) for n in sizes}
    if len(set(hashes.values())) > 1:
        raise Failed(f"the weights differ with the number of processes: {hashes}")
    head = [cell for n in sizes for cell in (f"ms/step, {n}", "to ddp")]
    costs = failed + ([] if machine.is_trial_on_cpu else bars_of_exact(seconds))
    same = f"- PASS: exact mode has the same weights on {', '.join(map(str, sizes))} processes: {hashes[1][:16]}"
    return "\n\n".join(
        [
            f"`{common[0]}`, global batch 128.",
            table(["mode", *head], rows),
            "\n".join([same, *costs]),
        ]
    )


def bars_of_exact(seconds: dict[str, list[list[float]]]) -> list[str]:
    """What exact costs on one process, beside the same microbatches and beside one pass.

    seconds: per step, by mode, round and size.
    """
    passes = list(MODES)[1:]
    captured = list(CAPTURED)[::-1]
    pairs = {
        "exact against ddp in the same microbatches": passes[::-1],
        "exact against ddp in one pass, captured": captured,
    }
    bars = []
    for name, (exact, ddp) in pairs.items():
        if not {exact, ddp} <= seconds.keys():
            continue
        ratio = median(a[0] / b[0] for a, b in zip(seconds[exact], seconds[ddp], strict=True))
        tried = "passes as graphs, views cut once per bucket, hooks in the last microbatch only"
        bars.append(bar(f"one process, {name}", ratio, MOST_FOR_EXACT, True, tried))
    return bars


def weights(machine: Machine, common: tuple[object, ...], nproc: int, steps: int) -> str:
    """Their hash after some steps in exact mode."""
    mode = MODES["exact, microbatches of 16"]
    result, _ = result_of("train", *common, *mode, "--steps", steps, "--nproc", nproc)
    return result["weights_sha256"]


def roofline(machine: Machine) -> str:
    """Recipes' steps beside a loop captured by hand, three trainers and the card's own rates:
    `roofline.py`.
    """
    from roofline import sections, tasks

    parts = list(
        tasks(machine.mnist, machine.movielens, machine.shakespeare, short=machine.is_trial_on_cpu)
    )
    text = sections(parts, machine.device, rounds=1 if machine.is_trial_on_cpu else 3)
    return "\n\n".join(text).replace("\n## ", "\n### ")


def profile(machine: Machine) -> str:
    """`stepladder profile` on one process, and `scale` up to one a GPU, or two on a CPU."""
    import torch

    common = (*machine.job(), "--device", machine.device)
    result, _ = result_of("profile", *common)
    (rank,) = result["ranks"]
    parts = ("data", "forward", "backward", "communication", "waiting", "optimizer", "other")
    operators = [
        [f"`{operator['name'][:60]}`", f"{operator['calls']:.1f}", ms(operator["seconds"])]
        for operator in result["operators"]
    ]
    num_ranks = 2 if machine.is_trial_on_cpu else torch.cuda.device_count()
    sizes = ",".join(str(2**power) for power in range(int(math.log2(num_ranks)) + 1))
    steps = 5 if machine.is_trial_on_cpu else 60
    scaled, _ = result_of("scale", *common, "--nproc", sizes, "--rounds", 1, "--steps", steps)
    speeds = [
        [str(o["nproc"]), ms(o["seconds_per_step"]), f"{o['speedup']:.2f}"] for o in scaled["sizes"]
    ]
    return "\n\n".join(
        [
            f"`{common[0]}`, peak on the GPU {(rank['peak_gpu_bytes'] or 0) / 2**20:.0f} MiB.",
            table(["part of a step", "ms"], [[name, ms(rank[name])] for name in parts]),
            table(["operator or kernel", "calls a step", "ms a step"], operators[:5]),
            table(["processes", "ms/step", "speed-up"], speeds),
            *(f"- {operator['text']}" for operator in result["advice"]),
        ]
    )


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def lessons(machine: Machine) -> str:
    """Lessons with --device and no more processes than GPUs, four lessons at a time."""
    import torch

    from stepladder.tools.learn.course import load_course

    num_ranks = 1 if machine.is_trial_on_cpu else torch.cuda.device_count()
    every = load_course().lessons[: 2 if machine.is_trial_on_cpu else None]
    commands = {lesson: on_one_node(lesson.folder, lesson.command) for lesson in every}
    fit = [
        lesson
        for lesson, command in commands.items()
        if command.startswith(("python ", "torchrun "))
        and (num_ranks > 1 or lesson.folder not in COMPARES)
    ]
    with ThreadPoolExecutor(4) as pool:
        lesson_rows = list(
            pool.map(
                lambda lesson: claim_of(on_the_card(commands[lesson], num_ranks, machine)), fit
            )
        )
    rows = [
        [lesson.folder, claim or f"FAIL: {last}"]
        for lesson, (claim, last) in zip(fit, lesson_rows, strict=True)
    ]
    text = table(["lesson", "it says"], rows)
    if left_out := [lesson.folder for lesson in every if lesson not in fit]:
        text += f"\n\nNot run, for they want several nodes or GPUs: {', '.join(left_out)}."
    if not all(claim for claim, _ in lesson_rows):
        raise Failed(text)
    return text


def on_one_node(folder: str, command: str) -> str:
    """A lesson's command; where it starts two nodes but does not need them, with one torchrun."""
    if folder not in ONE_NODE_WILL_DO:
        return command
    return command.replace("bash lessons/two_nodes.sh", "torchrun --standalone --nproc_per_node=2")


def claim_of(argv: list[str]) -> tuple[str | None, str]:
    """The claim that the lesson came to, or None; and its last line."""
    from stepladder.tools.learn.check import CLAIM_PREFIX
    from stepladder.tools.learn.command import run_command

    with tempfile.TemporaryDirectory() as folder:
        done = run_command(argv, Path(folder), lambda line: print(line, file=sys.stderr), 60)
    return None if done.exit_code else done.find_last_line(CLAIM_PREFIX) or None, (
        done.output.strip().splitlines() or ["no word"]
    )[-1]


def on_the_card(command: str, num_ranks: int, machine: Machine) -> list[str]:
    """A lesson's command from an empty folder, on the device, on `most` processes at most."""
    command = re.sub(
        r"(--nproc(?:_per_node)?[ =])(\d+)",
        lambda match: match[1] + str(min(int(match[2]), num_ranks)),
        command,
    )
    data = {"data/mnist": machine.mnist}
    argv = [str(data.get(word) or word) for word in shlex.split(command)]
    return [str(ROOT / w) if w.startswith("lessons/") else w for w in argv] + [
        "--device",
        machine.device,
    ]


@dataclass(frozen=True)
class Part:
    """seconds: the most that it may take; they seldom need half of it, and the whole has a limit of
    its own.
    """

    run: Callable[[Machine], str]
    seconds: int

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def title(self) -> str:
        return (self.run.__doc__ or "").strip()


PARTS = (
    Part(tests, 120),
    Part(step, 70),
    Part(mnist, 50),
    Part(recommender, 100),
    Part(language, 150),
    Part(exact, 150),
    Part(roofline, 120),
    Part(profile, 40),
    Part(lessons, 80),
)
