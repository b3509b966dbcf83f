"""Ways to wrap models whose loss is no mean over the samples of a share."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial

from stepladder.tools.check.script_source import last_name, locations_of, stored_names
from stepladder.tools.convert.conversion import Conversion, Edits
from stepladder.tools.convert.rungs import sum_numbers_of_training, wrap_models
from stepladder.tools.convert.source import CannotConvert, SourceText

# The gradient of each share is that of its samples, however many they are.
_WRAP_ALIKE = partial(wrap_models, averages_shares=False)


def scale_summed_loss(
    conversion: Conversion, average: Callable[[Conversion], Edits] = _WRAP_ALIKE
) -> Edits:
    """Average gradients, and multiply each loss by the number of processes: it is a sum."""
    yield from average(conversion)
    for location in filter(conversion.is_known, conversion.facts.backwards):
        file = conversion.file(location)
        for call in conversion.calls(location, "backward"):
            if isinstance(call.func, ast.Attribute):
                value = call.func.value
                yield from file.wrap(value, "(", " * dist.get_world_size())")
                break


def weigh_losses(conversion: Conversion) -> Edits:
    """Wrap models, and weigh the loss of each share by the weights of its targets.

    A mean over targets with weights, or without those that are ignored, divides by another number
    in each share.
    """
    yield from _WRAP_ALIKE(conversion)
    for file, call in _calls_of_losses(conversion):
        yield file.replace_between(call.func, call.args[0], ", ")
        yield from file.wrap(call, "weigh_share(", "")


def _calls_of_losses(conversion: Conversion) -> Iterator[tuple[SourceText, ast.Call]]:
    for location in filter(conversion.is_known, conversion.facts.means_in_training):
        file = conversion.file(location)
        calls = [call for call in file.nodes_at(ast.Call, location.line) if len(call.args) > 1]
        for call in calls[-1:]:  # the outermost
            yield file, call


def keep_shown_losses(conversion: Conversion) -> Edits:
    """Let a weighed loss show the mean of its share: the script itself weighs what it adds up."""
    if conversion.ways.get("c") is not weigh_losses:
        raise CannotConvert("no loss is weighed")
    yield from sum_numbers_of_training(conversion)
    for file, call in _calls_of_losses(conversion):
        yield file.insert_in_call(call, "shows_share=True")


def divide_by_sums_of_all(conversion: Conversion) -> Edits:
    """Wrap models, and divide losses by the mean of the sums of all shares, as over a mask.

    Raises:
        CannotConvert: No loss is divided by a sum.
    """
    yield from _WRAP_ALIKE(conversion)
    sums = list(_sums_that_divide(conversion))
    if not sums:
        raise CannotConvert("no loss is divided by a sum")
    for file, node in sums:
        yield from file.wrap(node, "mean_in_training(")


def _sums_that_divide(conversion: Conversion) -> Iterator[tuple[SourceText, ast.expr]]:
    """Yield what divides, and has a sum: itself, or what is assigned to its name."""
    sums = conversion.facts.sums_in_training
    for file in conversion.files.values():
        for node in file.nodes(ast.BinOp):
            found = [node.right]
            if isinstance(node.right, ast.Name):
                assigned = file.nodes(ast.Assign, file.scope_of(node))
                found = [a.value for a in assigned if node.right.id in stored_names(a)]
            for value in found * isinstance(node.op, ast.Div):
                has_sum = any(last_name(call.func) == "sum" for call in file.nodes(ast.Call, value))
                if has_sum and locations_of(file, value) & sums:
                    yield file, value
