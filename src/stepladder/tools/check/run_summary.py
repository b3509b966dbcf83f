"""What has run, in one line, and why a run without training proves nothing."""

from __future__ import annotations

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import EnoughPasses, OptimizerStep
from stepladder.tools.check.failure import NotChecked
from stepladder.tools.check.script_runs import ScriptRun


def summarize_run(run: ScriptRun) -> str:
    ranks = run.recording.ranks
    # All ranks have made as many; one that was ended may have made more.
    steps = min((len(log.select(OptimizerStep)) for log in ranks), default=0)
    epochs = min((len(log.training_passes) for log in ranks), default=0)
    if run.stood_still:
        end = "then it stood still"
    elif run.outcome.failed:
        end = "then it failed"
    elif run.recording.select(EnoughPasses):
        end = "then the check ended it"
    else:
        end = "to its end"
    counted = format_count(len(ranks), "rank")
    if run.recording.is_single_process and not run.launch.is_alone:
        counted = f"the first of {run.launch.nproc} ranks"
    return f"{counted}, {format_count(epochs, 'epoch')}, {steps} steps on each, {end}"


def no_training(run: ScriptRun) -> NotChecked:
    was_ended = run.outcome.late or run.outcome.has_stalled
    end = "was ended" if was_ended else "ended"
    line = (
        f"no training was seen: the script {end} without an optimizer step and without a backward "
        f"pass"
    )
    return NotChecked("no training", line, run.last_output)
