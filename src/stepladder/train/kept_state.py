"""What a job's loss keeps between calls, which other numbers of ranks have otherwise."""

from __future__ import annotations

from typing import Any

from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.train.job import Job
from stepladder.train.reached_values import Reached, find_saved, outline, read_own_attributes


class KeptState:
    """What a job's loss keeps between calls: such a count is another one on each number of ranks.

    It may be for a log, or act in a later call, as a penalty in each sixteenth: a message names it.
    """

    def __init__(self, job: Job) -> None:
        self.saved = find_saved(job)
        self.modules = dict(job.model.named_modules())
        hooks = [
            hook
            for each in self.modules.values()
            for table in (each._forward_pre_hooks, each._forward_hooks)
            for hook in table.values()
        ]
        self.reached = Reached((job.loss, *hooks, *self.modules.values()), [])
        self.is_told = False

    def read(self) -> dict[str, Any]:
        """Return what changes with each variable and each attribute of a layer, but for tensors.

        A pass makes tensors anew, with the same values.
        """
        values = self.reached.read()
        for path, module in self.modules.items():
            for name, value in read_own_attributes(module).items():
                values[f"attribute {name} of the layer {path or 'that is the model'}"] = value
        return {
            name: [part for part in outline(value, self.saved) if not isinstance(part, tuple)]
            for name, value in values.items()
        }

    def tell_changed(self, before: dict[str, Any]) -> None:
        """Print a line, once, if something is not as it was before passes of one microbatch."""
        changed = [name for name, value in self.read().items() if value != before.get(name)]
        if changed and not self.is_told:
            self.is_told = True
            problem = f"--sync exact: each call of the loss changes the {changed[0]}, which is"
            problem = f"{problem} another one on other numbers of ranks and after a resume"
            hint = "make sure that the loss does not depend on it, as a log does not"
            print_message(str(InputError(problem, hint)))
