"""The same changes by Accelerate: an accelerator in place of torch.distributed."""

from __future__ import annotations

import ast
import re

from stepladder.tools.check.events import NamesWhereBuilt
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.source import ENDED, Edit
from stepladder.tools.probe.events import CodeLine

# What torch.distributed does, and what does the same by an accelerator.
IN_ACCELERATE = (
    (r"dist\.get_rank\(\) == 0", "accelerator.is_main_process"),
    (r"dist\.get_rank\(\)", "accelerator.process_index"),
    (r"dist\.get_world_size\(\)", "accelerator.num_processes"),
    (r"dist\.barrier\(\)", "accelerator.wait_for_everyone()"),
    (r"dist\.destroy_process_group\(\)", "accelerator.end_training()"),
    (r"dist\.broadcast\((.*), 0\)", r"\1.copy_(broadcast(\1))"),
    (r"dist\.broadcast_object_list", "broadcast_object_list"),
    (r"dist\.all_reduce\((.*)\)", r'\1.copy_(accelerator.reduce(\1, "sum"))'),
    (r"inner_model\(", "accelerator.unwrap_model("),
    (
        r"(?m)^( *)(.*)DistributedDataParallel\(([^,\n]+), (.+)\)$",
        r"\1accelerator.ddp_handler = DistributedDataParallelKwargs(\4)"
        "\n"
        r"\1\2accelerator.prepare(\3)",
    ),
    (r"DistributedDataParallel\(", "accelerator.prepare("),
    (
        r"(?m)^( *)(?=join_processes\(\)$)",
        r"\1accelerator = Accelerator(cpu=not torch.accelerator.is_available())" "\n" r"\1",
    ),
)
IMPORTS_IN_ACCELERATE = {
    "Accelerator": "from accelerate import Accelerator",
    "DistributedDataParallelKwargs": "from accelerate import DistributedDataParallelKwargs",
    "broadcast": "from accelerate.utils import broadcast",
    "broadcast_object_list": "from accelerate.utils import broadcast_object_list",
    "gather_object": "from accelerate.utils import gather_object",
}
HELPERS_IN_ACCELERATE = {
    "join_processes": '''\
def join_processes():
    """Let all processes go on with the random numbers of process 0."""
    states = [random_states()]
    broadcast_object_list(states)
    set_random_states(states[0])''',
    "gather_objects": '''\
def gather_objects(value):
    """Return what all processes have, in the order of processes."""
    return gather_object([value])''',
    "gather_tensors": '''\
def gather_tensors(tensor):
    """Return the tensors of all processes, which have one shape."""
    return list(accelerator.gather(tensor).chunk(accelerator.num_processes))''',
}


def translate(text: str, is_main: bool) -> str:
    """Return text of a converted script as Accelerate does it.

    Args:
        text: A part of the script's text.
        is_main: Whether it is in the file that is started, which makes the accelerator.
    """
    for pattern, other in IN_ACCELERATE:
        text = re.sub(pattern, other, text)
    return text if is_main else re.sub(r"\baccelerator\.", "started_accelerator().", text)


def prepare_steps(conversion: Conversion) -> Edits:
    """Compute gradients and make steps by the accelerator, which scales both in float16."""
    if not conversion.by_accelerate:
        return
    for location in filter(conversion.is_known, conversion.facts.backwards):
        file = conversion.file(location)
        for call in conversion.calls(location, "backward")[:1]:
            if isinstance(call.func, ast.Attribute):
                start, function = file.start(call), file.end(call.func)
                begin = file.text.rindex(".", start, function)
                arguments = [*call.args, *(item.value for item in call.keywords)]
                end = file.text.index("(", function) + 1 if arguments else file.end(call)
                yield Edit(file.name, start, start, "accelerator.backward(")
                yield Edit(file.name, begin, end, ", " if arguments else ")", ENDED)
    for event in conversion.facts.log.select(NamesWhereBuilt):
        places = [conversion.facts.location(CodeLine(*line)) for *line, _ in event.places]
        for location in list(filter(conversion.is_known, places))[:1]:
            statement = conversion.statement(location)
            if isinstance(value := getattr(statement, "value", None), ast.Call):
                yield from conversion.file(location).wrap(value, "accelerator.prepare(")
