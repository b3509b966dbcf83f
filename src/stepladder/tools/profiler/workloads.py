"""Run a job or an unmodified script under the profiler.

Both functions start the ranks here, unless another launcher has started this process as a rank.
The ranks record `steps` optimizer steps after `warmup` others, and write their traces to `folder`.
The functions return an exit code, and raise InputError if the ranks cannot be started or make too
few steps.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.process_count import choose_threads_per_rank, validate_process_count
from stepladder.core.settings import TrainRequest
from stepladder.core.world import World
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.supervisor import run_local
from stepladder.launcher.options import Options
from stepladder.launcher.run import prepare_run
from stepladder.launcher.script import Script
from stepladder.launcher.topology import Topology
from stepladder.tools.probe.attach import make_listener_variables, temporary_environment
from stepladder.tools.probe.ranks import read_step_counts
from stepladder.tools.profiler.capture import Capture, CapturedSteps
from stepladder.tools.trial.ranks import make_trial_request

QUIET_KINETO = {
    "KINETO_LOG_LEVEL": "99"
}  # Kineto of torch 2.13 prints two lines per rank otherwise


def profile_job(request: TrainRequest, warmup: int, steps: int, nproc: int, folder: Path) -> int:
    request = make_trial_request(request, folder / "run", steps=warmup + steps, epochs=None)
    train = partial(_train_profiled, request, warmup, steps, folder)
    with temporary_environment(**QUIET_KINETO):
        if World.detect().world_size > 1:
            return train()
        validate_process_count(nproc)
        threads = choose_threads_per_rank(request.settings.threads, request.settings.sync, nproc)
        return run_local(LocalGroup(train, threads, Limits(request.settings.timeout)), nproc)


def _train_profiled(request: TrainRequest, warmup: int, steps: int, folder: Path) -> int:
    """Train `warmup` steps on this rank, and `steps` more under the profiler."""
    from stepladder.tools.trial.training import open_training  # late: torch

    with open_training(request) as training:
        comm = training.comm
        recipe = training.recipe.with_sizes(epochs=warmup + steps)  # as many as could be needed
        replace(training, recipe=recipe).fit(Capture(folder, comm.world.rank, warmup, steps))
        comm.gather_bytes(b".")  # when the first rank leaves, all traces are there
    return 0


def profile_script(
    script: Script, threads: int | None, warmup: int, steps: int, nproc: int, folder: Path
) -> int:
    """Profile a script with `threads` intra-op threads per rank; None: the script's own choice."""
    world = World.detect()
    variables = make_listener_variables(
        CapturedSteps, folder=folder.absolute(), warmup=warmup, steps=steps
    )
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    with temporary_environment(**QUIET_KINETO, **variables):
        if world.world_size > 1:
            nproc = world.world_size
            code = subprocess.call(script.command())
        else:
            code = prepare_run(script, Options(), Topology(nproc=str(nproc)))()
    if code == 0 and world.is_first:  # a rank ends only when the traces of all ranks are there
        counts = read_step_counts(folder, nproc)
        made_steps = min(counts) if len(counts) == nproc else 0
        _validate_step_count(script, made_steps, warmup, steps, nproc)
    return code


def _validate_step_count(
    script: Script, made_steps: int, warmup: int, steps: int, nproc: int
) -> None:
    """Raise InputError if a rank has made fewer steps than the window needs."""
    if made_steps == 0:
        command = " ".join([script.name, *script.args])
        raise InputError(
            f"{script.name} made no optimizer step: only steps of a torch.optim.Optimizer are seen",
            f"stepladder run --nproc {nproc} {command}, to see what it does",
        )
    if made_steps >= warmup + steps:
        return
    hint = "let it train for longer"
    if made_steps > 1:
        possible_steps = min(steps, made_steps - 1)
        hint = f"--warmup {made_steps - possible_steps} --steps {possible_steps}"
    raise InputError(
        f"{script.name} made {made_steps} optimizer steps, but --warmup {warmup} and"
        f" --steps {steps} need {warmup + steps}",
        hint,
    )
