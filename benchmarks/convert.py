"""How far does `stepladder convert` get with published scripts? On copies that you have fetched.

    python benchmarks/convert.py COPIES [--only NAME,...] [--stored FOLDER] [--write]

COPIES holds a folder OWNER+NAME for each repository, at the commit that convert.toml names. No script is changed: each runs in a
copy, with arguments alone, and with random data in place of its own. convert.toml also holds the judgement of a person who has read
the rungs that were offered, and the first run of each script that was chosen apart from the writing of the code. The scripts use torchvision (which must take files of another checksum for a data set), tqdm, wandb,
tensorboardX, h5py and scikit-image; disvae needs numpy 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from check_field import BAD_INPUT, list_variables
from convert_data import DATA
from report import Report, table

FOLDER = Path(__file__).parent
GOAL = "f"  # the rung that the bar asks for
MIN_SHARE = 0.8
MAX_SECONDS = 180
MAX_SECONDS_OF_RUN = 400  # on a machine that others use, too
READING = """\
A relation that holds is counted at the last rung. "Rungs that change it" leaves out those with nothing to change. The list below is what a
person says who has read each diff: whether it would be merged, and what is wrong that no relation has found."""
SECOND_SET = """\
A second set of ten scripts was sealed like the first (2026-11-29): soapisnotfat/pytorch-cifar10, ebrahimpichka/lstm-language-model, YannDubs/disentangling-vae, France1/unet-multiclass-pytorch, rixwew/pytorch-fm,
zhouhaoyi/Informer2020, bknyaz/graph_nn, sohaib023/siamese-pytorch, xXBricksquadXx/resnet18-transfer-learning-pytorch, gordicaleksa/pytorch-GANs. The bars speak of scripts that train, so its first five have taken the places of five of the first set:
word_language_model of pytorch/examples, pytorch-template and KnowledgeGraphEmbedding fail by themselves with the libraries of today; SimCLR and pytorch-cifar100 were not run to an end here. First run on frozen code:

- At rung f 5 of 10, 4 of them changed by it; in 28 to 182 s beside other jobs.
- **Wrong in silence 3 of 10**: a printed tuple and a printed dict were not judged, and showed a doubled loss and one share's; a language model that keeps its LSTM's state from step to step was shared; one line
  makes the loaders for training and for evaluation, so that test samples counted twice. A fourth added predictions up twice, and of a fifth the folder lacked a file that did not change.
- Not offered: batch sizes that a GAN's loop repeats; a name that the model gets after its optimizer; a folder that each process makes anew; checkpoints that all processes write before rung f; a stream.

What became of the last five since: at rung f were resnet18-transfer-learning, pytorch-GANs and graph_nn, before losses were compared. Informer2020 is refused, since a line that makes loaders for training and for
evaluation shuffles both, and siamese-pytorch, since it draws its pairs by the time of day, other ones in each process.

A fault that these repairs have found: a model that was wrapped under another name than the one that training calls averaged no gradients, and the proof did not see it. Each step must have the same gradients on all processes now.
A loss over the pairs of a batch passed beside noise in the data, and a number that is summed in each batch of an evaluation could wait without end: both are seen.

All rows are of the code of commit 5511a198, two scripts at once on the two cores, so seconds are high."""
THIRD_SET = """\
A third set of ten scripts was sealed like the others (2026-11-30): cs230-stanford/cs230-code-examples, yjn870/SRCNN-pytorch, zamaex96/ML-LSTM, SUNGBEOMCHOI/pytorch-VAE-MNIST, 649453932/Chinese-Text-Classification-Pytorch,
chenxijun1029/DeepFM_with_PyTorch, WZMIAOMIAO/deep-learning-for-image-processing, stante/dcgan-mnist, cosmic-cortex/pytorch-UNet, hawkeoni/Shakespeare_TinyLMs. First run on frozen code:

- At rung f 3 of 10, all changed by it; in 14 to 340 s beside other jobs.
- **Wrong in silence 1 of 10**: SRCNN kept the weights of the epoch that was the best by one process's share of the evaluation, and showed the mean of shares that are not equal.
- Rightly not offered 3 of 10: two cut their batches by hand, and an LSTM takes a batch as one sequence; the reason that was said of the last was another one: a plot over all epochs, in runs of two.
- Not offered 4 of 10: a model that is trained by its parts, or by a method of its own; a batch size that its caller does not give; a helper whose import hid the script's `time`.

These repairs came of it: the number by which a script decides may be an attribute; a number of an evaluation is the mean over all batches, of which the proof has an odd number, also of batches of one sample; hooks average the gradients
where no wrapper sees the calls; the number of batches after a loop may be its index plus 1; each process may make a folder that another one has made; runs of few epochs lower the number that later lines use."""
FOURTH_SET = """\
A fourth set of ten scripts was sealed like the others (2026-11-30): davda54/sam, kentaroy47/vision-transformers-cifar10, codertimo/BERT-pytorch, songyouwei/ABSA-PyTorch, MishaLaskin/vqvae, mateuszbuda/brain-segmentation-pytorch,
yihong-chen/neural-collaborative-filtering, zhykoties/TimeSeries, znxlwm/pytorch-generative-model-collections, NitinNanjeGowda00/ai-expert-labs. First run on frozen code:

- At rung f 3 of 10, all changed by it; in 59 to 712 s beside other jobs.
- **Wrong in silence 2 of 10**: the accuracy of one share, which was shown once in the runs, and the F1 score of joined tensors as a mean over processes; a loader that is only read, for a mean of all pixels, was shared.
- Rightly not offered 1 of 10: a Dice loss. Not offered 5 of 10: files that each process appends to, an encoder called before the processes join, another class's batch size, a loss of nan (a traceback), data that are drawn
  anew in each epoch. One folder lacked modules that a package imports from the script's folder, and did not start.

These repairs came of it: the calls that led to a loader are recorded; modules are looked for in the script's folder; arrays that a loop makes longer are joined; appending counts as writing; a line that prints now and then must show some numbers;
shares count by the weights of their targets. After them 6 of 10 are at rung f: ABSA-PyTorch, whose numbers
on two processes are those of one, BERT-pytorch, vision-transformers-cifar10 and vqvae, too. sam is refused at e, the recommender and the segmentation at c; the GAN was at d when it was ended after eight minutes beside other jobs.
Eleven small scripts that were written for it on the same day (class weights, padding, folds, phases, statements of one line, an open log) found these, and a snapshot of one fold that the next one went on with: a loop around the loop over epochs is refused now.

A fifth set, of eight scripts without a loader, was chosen before any run (2026-11-30): karpathy/ng-video-lecture (gpt), rtqichen/torchdiffeq (ode_demo), spro/char-rnn.pytorch, graykode/nlp-tutorial (skip-gram), krrish94/nerf-pytorch (tiny),
seungeunrho/minimalRL (dqn), ShotaDeguchi/PINN_Torch (Burgers), caogang/wgan-gp (toy data). Constants were made small, and two were ported to today's Python and torch. First run on frozen code:

- At rung h 2 of 8, gpt and skip-gram. **Wrong in silence**: in gpt a text that is generated, of more than one prompt, was shared, too.
- Rightly not offered 3 of 8: the size of the batch in a hidden state, a picture that is rendered after the model, parts of three sets at once. Needlessly 3 of 8: a batch in dimension 1, a memory that two episodes do not fill, a loop of steps in another one (the shortened script did not parse).

Reading the refused ones found more: rows that were shared twice, and a model whose gradient was lost, which the proof passed. Rows are shared for steps alone now, shares of shares and a lost gradient break a rung, and
a refusal quotes the line that failed. The same 2 of 8 are at h, none wrong in silence as read; ode, dqn and wgan-gp are still refused. Ten small scripts that were written for it (windows of a text, permutations, slices,
full batches, dicts, generators of their own, gradients of several batches) are at h; the two that were run to their end print the numbers of one process on two processes.

A sixth set, of fourteen scripts of other kinds, was chosen before any run (2026-11-30): musikalkemist/pytorchforaudio (audio), Bjarten/early-stopping-pytorch (a notebook), pytorch/examples (siamese_network), thealper2/mnist-gradient-accumulation, DavidBatoDev/house-price-prediction-pytorch,
jinglescode/time-series-forecasting-pytorch, devnag/pytorch-generative-adversarial-networks, ahmedbesbes/character-based-cnn, rasbt/LLMs-from-scratch (gpt_train), sthalles/SimCLR, nikhilroxtomar/Retina-Blood-Vessel-Segmentation-in-PyTorch, GitYCC/crnn-pytorch,
FernandoLpz/Text-Classification-CNN-PyTorch, locuslab/TCN (pmnist). Two that do not run on a CPU were replaced after they were read. First run on frozen code:

- At rung h 2 of 14, at f 7 more, in 11 to 309 s beside other jobs.
- **Wrong in silence 3 of 14**: weights that each process drew for itself, before it joined the others; a third training that no run came to; a loss over pairs, of the pairs of a share. Four more scripts, that were added later, had one with five trainings, of which one was converted. A small script beside them compared lists that were joined in another order.
- Rightly not offered 3 of 14: a loss that is divided by the batch size, reports that are made as texts, moments of a batch of one sample. The other refusals, six of them at rung g alone, were faults: data above the working folder, a schedule that makes no step in the runs, a finding about the script as it was.

These repairs came of it: a loss that compares samples (pairs, Dice) is told by its second derivative to outputs of other samples, and gets the rows of all processes, so that the numbers of two processes are those of one; runs go on until no further loop trains; hooks begin with the weights of
process 0, and processes with different weights break a rung; lists are joined in the order of the batches; counts by class are added up; where no numbers of shares are right, the evaluation stays on each process; the resume is checked in the script's own folder.

After them 11 of 14 are at rung f or further, 7 of them at h in a run of the new code (earlystop, llm, SimCLR, audio, textcnn, tcn, gradacc); house is at f, rightly no further; retina and siamese were at f when 420 s beside other jobs were over;
crnn, charcnn and the moments of one sample were not run again. The script with five trainings is refused now: one of them has batches of its own. A Dice loss of the fourth set was not offered; a small one like it shows the numbers of one process on two processes."""
VARIABLES = {"MPLBACKEND": "Agg", "WANDB_MODE": "disabled"}  # no window, no account


@dataclass(frozen=True)
class ConvertedScript:
    """A script, and how far it was converted.

    Args:
        entry: Its table in convert.toml.
        report: The JSON of the command; `failure` where it was bad input.
        seconds: How long it took.
    """

    entry: dict[str, Any]
    report: dict[str, Any]
    seconds: float

    @property
    def has_run(self) -> bool:
        """Whether it trains as it is, with today's libraries."""
        return "failure" not in self.report

    @property
    def changed(self) -> str:
        """The letters of the rungs that hold and change something."""
        return "".join(rung["rung"] for rung in self.report.get("rungs", []) if rung["diffs"])

    @property
    def reached(self) -> str:
        """The letter of the last rung that holds; empty if none does."""
        rungs = self.report.get("rungs", [])
        return str(rungs[-1]["rung"]) if rungs else ""

    @property
    def held(self) -> int:
        """How many relations hold at the last rung."""
        rungs = self.report.get("rungs", [])
        return len(rungs[-1]["held"]) if rungs else 0


TO_GOAL = ("--rung", GOAL)


def convert_script(
    entry: dict[str, Any], copies: Path, flags: Sequence[str] = TO_GOAL
) -> ConvertedScript:
    """Convert one script in a copy of its repository."""
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / entry["repository"].rpartition("/")[2]
        shutil.copytree(copies / entry["repository"].replace("/", "+"), repository, symlinks=True)
        (repository / ".git").mkdir(exist_ok=True)  # its root is found by it, as in a clone
        folder = repository / entry["folder"]
        for kind, paths in entry.get("data", {}).items():
            for path in paths:
                DATA[kind](folder / path)
        command = [sys.executable, "-m", "stepladder", "convert", "--json"]
        command += [*flags, "--timeout", str(MAX_SECONDS_OF_RUN)]
        begin = time.monotonic()
        ran = subprocess.run(
            [*command, *entry.get("flags", []), *shlex.split(entry["command"])],
            cwd=folder,
            env=os.environ | VARIABLES | list_variables(entry),
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - begin
    print(f"{entry['name']}: exit code {ran.returncode}, {seconds:.0f} s", file=sys.stderr)
    return ConvertedScript(entry, read_report(ran), seconds)


def read_report(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if ran.returncode == BAD_INPUT or not ran.stdout:
        return {"failure": (ran.stderr.strip() or "no output").splitlines()[0]}
    report: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return report


def find_result(entry: dict[str, Any], args: argparse.Namespace) -> ConvertedScript:
    """Return how far a script was converted, now or in a run that is stored."""
    path = args.stored / f"{entry['name']}.json" if args.stored else None
    if path is not None and path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        return ConvertedScript(entry, stored["report"], stored["seconds"])
    script = convert_script(entry, args.copies)
    if path is not None:
        path.write_text(json.dumps({"report": script.report, "seconds": script.seconds}))
    return script


def make_row(script: ConvertedScript) -> list[str]:
    entry = script.entry
    return [
        entry["name"],
        f"{entry['repository']} {entry['folder']}: `{entry['command']}`",
        entry["commit"][:8],
        entry["kind"],
        script.reached or "-",
        script.changed or "-",
        str(script.held),
        f"{script.seconds:.0f}",
        entry.get("first_run", ""),
    ]


def list_readings(script: ConvertedScript) -> str:
    entry = script.entry
    reason = " ".join(
        (script.report.get("failure") or script.report.get("not_offered", "")).split()
    )
    texts = [f"- **{entry['name']}**: {entry.get('reading', 'not read')}."]
    return "\n".join([*texts, *[f"  No further: {reason}"] * bool(reason)])


def list_bars(scripts: list[ConvertedScript], count: int) -> str:
    """Return a line for each bar; those of all chosen scripts that did not run do not meet it."""
    changed = [script for script in scripts if GOAL in script.changed]
    wrong = [script for script in scripts if script.entry.get("wrong")]
    slow = [script for script in scripts if script.seconds > MAX_SECONDS]
    sealed = [script for script in scripts if "first_run" in script.entry]
    first = [script for script in sealed if script.entry["first_run"] == GOAL]
    bars = [
        (
            f"at rung {GOAL}, and changed by it",
            len(changed) >= MIN_SHARE * count,
            len(changed),
            f"{MIN_SHARE:.0%}",
        ),
        ("wrong in silence, as read", not wrong, len(wrong), "none"),
        (f"longer than {MAX_SECONDS} s", not slow, len(slow), "none"),
    ]
    lines = [
        f"- {'PASS' if is_met else 'FAIL'}: scripts {what}: {found} of {count} (bar: {limit})"
        for what, is_met, found, limit in bars
    ]
    first_runs = f"{len(first)} of {len(sealed)}"
    return "\n".join([*lines, f"- Sealed scripts at rung {GOAL} in the first run: {first_runs}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("copies", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--stored", type=Path, help="A folder of reports: what is there is not run again"
    )
    args = parser.parse_args()
    report = Report(
        "convert.py", "Published scripts under `stepladder convert`", ["torch", "stepladder"], "2"
    )
    entries = tomllib.loads((FOLDER / "convert.toml").read_text(encoding="utf-8"))["script"]
    chosen = args.only.split(",") if args.only else [entry["name"] for entry in entries]
    scripts = [find_result(entry, args) for entry in entries if entry["name"] in chosen]
    not_run = ", ".join(entry["name"] for entry in entries if entry["name"] not in chosen)
    header = [
        "name",
        "script and arguments",
        "commit",
        "kind",
        "last rung",
        "rungs that change it",
        "relations",
        "seconds",
        "first run, if sealed",
    ]
    runs = [script for script in scripts if script.has_run]
    goal = [script for script in runs if script.reached >= GOAL]
    texts = [
        table(header, [make_row(script) for script in scripts]),
        f"Run: {len(scripts)} of {len(entries)}. Not run: {not_run or 'none'}. Trained as they are: {len(runs)}. Rung {GOAL} holds,"
        f" with or without a change: {len(goal)}.",
        list_bars(scripts, len(entries)),
        READING,
        "\n".join(map(list_readings, scripts)),
        SECOND_SET,
        THIRD_SET,
        FOURTH_SET,
    ]
    report.finish(texts, args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
