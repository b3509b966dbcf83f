"""What has run, in one line, and why a run without training proves nothing."""

from __future__ import annotations

import ast
import sys

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import EnoughPasses, OptimizerStep
from stepladder.tools.check.failure import NotChecked
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.script_runs import ScriptRun
from stepladder.tools.check.script_source import ScriptSource, imported_modules

DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


def summarize_run(run: ScriptRun) -> str:
    ranks = run.recording.ranks
    # All ranks have made as many; one that was ended may have made more.
    steps = min(filter(None, (len(log.select(OptimizerStep)) for log in ranks)), default=0)
    epochs = min((len(log.training_passes) for log in ranks), default=0)
    if run.stood_still or run.outcome.failed:
        end = "then it stood still" if run.stood_still else "then it failed"
        epochs = min(map(count_complete_epochs, ranks), default=0)
        if any(len(log.training_passes) > epochs for log in ranks):
            end += f" in epoch {epochs + 1}"
    elif run.recording.select(EnoughPasses):
        end = "then the check ended it"
    elif run.outcome.late:
        end = "until its time was over"
    else:
        end = "to its end"
    counted = format_count(len(ranks), "rank")
    if run.recording.is_single_process and not run.launch.is_alone:
        counted = f"the first of {run.launch.nproc} ranks"
    parts = [counted, f"{format_count(steps, 'step')} on each", end]
    if epochs:  # there are none without a loader, or where the first was not finished
        parts.insert(1, format_count(epochs, "epoch"))
    return ", ".join(parts)


def count_complete_epochs(log: RankLog) -> int:
    """Return the number of training passes, without a last one that was cut short."""
    passes = log.training_passes
    if passes and not passes[-1].is_complete:
        return len(passes) - 1
    return len(passes)


def no_training(run: ScriptRun) -> NotChecked:
    end = "no training was seen: the script ended"
    if run.outcome.has_stalled:
        end = "the script hung before it trained: it was ended"
    elif run.outcome.late:
        end = "no training was seen: the script was ended"
    line = f"{end} without an optimizer step and without a backward pass"
    return NotChecked("no training", line, run.last_output)


def no_training_in_source(source: ScriptSource) -> NotChecked | None:
    """Return why no training can be in a source, so that rules which read it prove nothing."""
    script = source.files[0]
    modules = [name for file in source.files for name in imported_modules(file.tree)]
    names = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {""}
    names -= {file.path.stem for file in source.files}
    if not names:
        reason = "it imports no torch, nor any other package"
    elif not any(may_call(statement) for statement in script.tree.body):
        reason = "it defines functions and classes, and calls none, as a job file does"
    else:
        return None
    line = f"no training was seen in the source of {script.name}: {reason}"
    return NotChecked("no training", line)


def may_call(statement: ast.stmt) -> bool:
    """Return whether a statement of a module does more than to import, to define and to assign."""
    if isinstance(statement, (*DEFINITIONS, ast.Import, ast.ImportFrom)):
        return False
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
        return any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return True
