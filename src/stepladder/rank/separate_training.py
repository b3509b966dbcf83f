"""Ends a start of several ranks that each train on their own, before anything is trained twice."""

from __future__ import annotations

import os
import shlex
import sys
import time
from functools import partial
from inspect import currentframe
from pathlib import Path
from types import CodeType
from typing import NoReturn

from stepladder.core.console import print_message
from stepladder.core.errors import BAD_INPUT, InputError
from stepladder.rank.error_record import RankError
from stepladder.rank.lifecycle import ERROR_FILE_VARIABLE, EXIT_TIMEOUT_S, exit_now
from stepladder.rank.torch_fixes import call_at_separate_step
from stepladder_exchange.call_frame import find_caller, is_users_file

# Set for the ranks of a start that trains one model, so that ranks which train alone are a mistake.
ONE_TRAINING_VARIABLE = "STEPLADDER_ONE_TRAINING"
FORMS_GROUP = "init_process_group"


def refuse_separate_training(flag: str) -> None:
    """End this rank at its first optimizer step outside of a process group, if it is one of many.

    A script that names the function which forms a group may first make one step, to warm up. A
    program that is no Python, and an optimizer that is none of torch's, are not seen.

    Args:
        flag: What says that each rank is meant to train alone.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1 and os.environ.get(ONE_TRAINING_VARIABLE):
        call_at_separate_step(_may_form_group, partial(_end_separate_training, num_ranks, flag))


def _end_separate_training(num_ranks: int, flag: str) -> NoReturn:
    step = find_caller()
    at = f", {Path(step.file).name}:{step.line}" if step else ""
    _end_with_bad_input(
        InputError(
            f"each of the {num_ranks} ranks trains on its own, {num_ranks} times the same: there is"
            f" no process group of several ranks at the first optimizer step{at}",
            f"stepladder convert --write {shlex.quote(sys.argv[0])} makes it train on several"
            f" together; or start one rank, or {flag} if each rank is to train alone",
        )
    )


def _end_with_bad_input(error: InputError) -> NoReturn:
    """End this rank at once: the code around might catch an exception, or save what it has."""
    rank = int(os.environ["RANK"])
    if ERROR_FILE_VARIABLE in os.environ:
        RankError.from_error(rank, error).write(Path(os.environ[ERROR_FILE_VARIABLE]))
    elif rank == 0:
        print_message(str(error))
    else:  # no launcher reads the error: srun may end the first rank when this one has ended
        time.sleep(EXIT_TIMEOUT_S)
    exit_now(BAD_INPUT)


def _may_form_group() -> bool:
    """Return whether the user's code that runs now names the function that forms a group."""
    frame = currentframe()
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename) and _names_function(code):
            return True
        frame = frame.f_back
    return False


def _names_function(code: CodeType) -> bool:
    inner_codes = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return FORMS_GROUP in code.co_names or any(map(_names_function, inner_codes))
