"""`stepladder convert --to job`: the script as a job, with its proof."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import chain

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import Backward, Print
from stepladder.tools.check.isolation.sandbox import Sandbox
from stepladder.tools.check.relations.frozen_runs import FrozenRuns
from stepladder.tools.convert.conversion import Conversion
from stepladder.tools.convert.job import IMPORT_OF_JOB, JobWriter
from stepladder.tools.convert.ladder import Rung, last_import
from stepladder.tools.convert.proof import RungProof, compare_run, why_failed
from stepladder.tools.convert.source import CannotConvert, Edit
from stepladder.tools.convert.starts import ScriptStarter, Start, Started

JOB = Rung(
    "job",
    "train it as a job",
    "The lines that make the model, the data and the loss become a file that `stepladder train` "
    "trains with its own loop.",
    "Results would depend on the number of processes, and a kill would cost the run.",
    (),
)
EPOCHS = "epochs of the job:"
SHOWN_OF_SUM = "loss is sum"
SEED = "; ".join(
    f'__import__("{name}").{call}(0)'
    for name, call in (("random", "seed"), ("numpy", "random.seed"), ("torch", "manual_seed"))
)
SAME_LOSS = 1e-4
SAME_SUM = 1e-3
STEPS = 4


def write_job(
    conversion: Conversion, original: FrozenRuns, starter: ScriptStarter
) -> tuple[str, RungProof, list[str]]:
    """Return a job of a script, what proves it, and what is not in it.

    Args:
        conversion: The script.
        original: The runs of the script as it is.
        starter: Starts it.

    Raises:
        CannotConvert: The script has no such job, or the job is not what the script is.
    """
    writer = JobWriter(conversion, starter.args, starter.epochs or 2)
    counting = {name: file.text for name, file in conversion.files.items()}
    counting[conversion.main] = writer.file.apply(list(_count_epochs(writer))).text
    starts = {
        "script": Start(counting, frozen=""),
        "whole": Start({conversion.main: _seed(writer.write_proof())}, frozen=""),
        "sliced": Start({conversion.main: _seed(writer.write_proof(is_whole=False))}, frozen=""),
    }
    started = starter.run(starts)
    if any(words == SHOWN_OF_SUM.split() for words in _shown_words(started["whole"])):
        writer.take_sum()
    halved = Start({conversion.main: writer.write_proof(is_halved=True)})
    started |= starter.run({"halved": halved})
    proof = _prove(original, writer, started)
    shown = _shown_words(started["script"])
    lengths = [int(words[-1]) for words in shown if words[:-1] == EPOCHS.split()]
    words_shown = chain(*(_shown_words(started[name]) for name in ("whole", "halved")))
    paths = [words[1:] for words in words_shown if words[:1] == ["samples"]]
    for loop, path in zip(writer.loops, paths, strict=True):
        loop.count_by(" ".join(path))
    means, others = _find_means(writer, started["halved"])
    writer.leave_out_metrics(others)
    text = writer.write(max(lengths, default=1), means)
    proof.holds.append(_verify(starter, conversion.main, text))
    left_out = ", ".join(map(str, writer.left_out()))
    not_judged = [f"{conversion.main}: lines {left_out} are not in the job"] * bool(left_out)
    if not writer.start.shuffle:
        not_judged.append("a job shuffles the samples, and the script does not")
    if writer.start.drop_last:
        not_judged.append("a job trains the smaller last batch, too, and the script drops it")
    if _first_losses(started["sliced"]) != _first_losses(started["whole"]):
        not_judged.append("lines before the training that the job leaves out draw random numbers")
    return text, proof, not_judged


def _seed(text: str) -> str:
    return text.replace(IMPORT_OF_JOB, f"{IMPORT_OF_JOB}\n{SEED}", 1)


def _count_epochs(writer: JobWriter) -> Iterator[Edit]:
    """Yield the edits that show the number of epochs, and seed what is drawn."""
    yield writer.file.insert_after(last_import(writer.file), SEED)
    loop = writer.training.epoch_loop
    if loop:
        text = writer.file.text_of(loop.iter)
        yield writer.file.insert_before(
            loop, f'print("{EPOCHS}", len({text}) if hasattr({text}, "__len__") else 1)'
        )


def _shown_words(started: Started) -> list[list[str]]:
    return [event.text.split() for event in started.recording.ranks[0].select(Print)]


def _prove(original: FrozenRuns, writer: JobWriter, started: Mapping[str, Started]) -> RungProof:
    """Compare the losses of the job with those of the script, and the mean of two parts of a batch.

    Raises:
        CannotConvert: They differ.
    """
    for name, item in started.items():
        if reason := why_failed(item):
            raise CannotConvert(f"the {name} job {reason}")
    script, whole = [_first_losses(started[name]) for name in ("script", "whole")]
    pairs = list(zip(script, whole, strict=False))
    different = [pair for pair in pairs if not math.isclose(*pair, rel_tol=SAME_LOSS)]
    if different or not pairs:
        reason = f"its losses are {_show(whole)}, and those of the script {_show(script)}"
        if pairs and pairs[0] not in different:
            reason += ": what the loop does besides, which is not in the job, changes them"
        raise CannotConvert(reason)
    proof = RungProof()
    proof.holds.append(f"losses: those of the script in {format_count(len(pairs), 'step')}")
    if writer.facts.models_with_batch_norm:
        proof.holds.append("batch norm sees a microbatch: its size is --microbatch")
        return proof
    runs = replace(original, compared=started["halved"].recording)
    compare_run(proof, runs, frozenset({"samples", "gradients"}), "where batches are halved", None)
    if proof.broken:
        raise CannotConvert(
            f"{'; '.join(proof.broken)}: the loss is neither a mean nor a sum over samples"
        )
    return proof


def _first_losses(started: Started) -> list[float]:
    passes = started.recording.ranks[0].training_passes[:1]
    events = [event for item in passes for event in item.select(Backward)]
    return [event.loss for event in events if event.loss is not None]


def _show(losses: list[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses[:3]) or "none"


def _find_means(writer: JobWriter, started: Started) -> tuple[set[str], set[str]]:
    """Return the metrics of a batch that are the mean of those of its parts.

    Those that are neither the mean nor the sum come second.
    """
    parts: dict[str, list[list[float]]] = {name: [] for name in writer.metrics}
    for words in _shown_words(started):
        match words:
            case ["part", name, *numbers] if name in parts:
                parts[name].append([float(number) for number in numbers])
    means = set[str]()
    others = set[str]()
    for name, rows in parts.items():
        wholes = [whole for _, _, whole in rows]
        whole = max(wholes, default=math.nan)
        if math.isclose(sum(value for _, value, _ in rows), whole, rel_tol=SAME_SUM):
            continue
        is_mean = math.isclose(sum(s * value for s, value, _ in rows), whole, rel_tol=SAME_SUM)
        if is_mean:
            means.add(name)
        else:
            others.add(name)
    return means, others


def _verify(starter: ScriptStarter, main: str, text: str) -> str:
    """Train the job on one and two processes, with a stop and a resume, and compare all bits.

    Raises:
        CannotConvert: They differ, or the job is refused.
    """
    style = starter.style
    folders = starter.folders_of(starter.scratch / "job", {main: text})
    with closing(Sandbox(folders)) as sandbox:
        has_namespace = sandbox.mechanism == "namespace"
        folder = (style.root if has_namespace else folders.copy) / style.subfolder
        job = os.path.relpath(style.script, style.root / style.subfolder)
        command = [sys.executable, "-m", "stepladder", "verify", job]
        command += ["--nproc", "1,2", "--steps", str(STEPS), "--device", "cpu"]
        try:
            done = subprocess.run(
                sandbox.command(command, folder),
                env=os.environ | sandbox.variables(),
                pass_fds=sandbox.descriptors,
                capture_output=True,
                text=True,
                timeout=starter.timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise CannotConvert("verify takes longer than --timeout allows") from error
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        errors = [line for line in lines if "Error" in line or line.startswith("error")]
        raise CannotConvert(f"verify: {[*errors, *lines[-1:]][0]}")
    return f"weights: the same bits on 1 and 2 processes in {STEPS} steps, and after a resume"
