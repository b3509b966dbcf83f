"""Settings that contradict each other, each with the reason and what to type."""

from __future__ import annotations

from typing import Any

from stepladder.core.errors import InputError


def validate_no_conflict(settings: Any) -> None:
    """Raise InputError for the first two settings that contradict each other."""
    for is_conflict, problem, fix in _list_conflicts(settings):
        if is_conflict:
            raise InputError(problem, fix)


def _list_conflicts(settings: Any) -> list[tuple[bool, str, str]]:
    """Return all conflicts: whether there is one, the reason why it is one, and what to type."""
    recomputes_blocks = settings.checkpoint_blocks
    replays = settings.replay_every is not None
    return [
        (
            replays and settings.sync != "exact",
            f"--replay-every {settings.replay_every} with --sync {settings.sync}: a microbatch has"
            " the same bits on every process with --sync exact only",
            "--sync exact, or leave --replay-every out",
        ),
        (
            not settings.has_layout,
            f"--shard-copies {settings.shard_copies} with --shard {settings.shard}, which makes no"
            " slices to copy",
            "--shard optimizer, or leave --shard-copies out",
        ),
        *_list_full_shard_conflicts(settings),
        (
            recomputes_blocks and settings.compile,
            "--compile with --checkpoint-blocks: the compiler decides by itself what is computed"
            " again",
            "one of the two",
        ),
        (
            recomputes_blocks and settings.capture,
            "--capture with --checkpoint-blocks, which draws a block's random numbers again",
            "one of the two",
        ),
        (
            settings.lr_scale != "none" and settings.batch_per_rank is None,
            f"--lr-scale {settings.lr_scale} without --batch-per-rank: the global batch does not"
            " grow with the number of processes, so the learning rate need not",
            "--batch-per-rank B, or leave --lr-scale out",
        ),
    ]


def _list_full_shard_conflicts(settings: Any) -> list[tuple[bool, str, str]]:
    """Return the conflicts of --shard full, in the form of `_list_conflicts`."""
    is_full = settings.shard == "full"
    return [
        (
            is_full and settings.sync == "manual",
            "--shard full with --sync manual, whose gradients are whole",
            "--sync ddp, or exact",
        ),
        (
            is_full and settings.replay_every is not None,
            "--replay-every with --shard full: no process has a whole gradient to compare",
            "--shard optimizer, or leave --replay-every out",
        ),
        (
            is_full and settings.precision == "fp16",
            "--shard full with --precision fp16, whose scale needs whole gradients",
            "--precision bf16",
        ),
        (
            is_full and settings.compile,
            "--compile with --shard full, whose weights are slices",
            "leave --compile out",
        ),
        (
            is_full and settings.capture,
            "--capture with --shard full, whose weights come and go",
            "leave --capture out",
        ),
        (
            is_full and settings.guard_every is not None,
            "--guard-every with --shard full: no two processes have the same weights",
            "leave --guard-every out",
        ),
    ]
