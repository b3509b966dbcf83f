"""Advise what to do about a profile: each rule finds a problem and gives a number and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from stepladder.core.numbers import format_count
from stepladder.tools.profiler.breakdown import MIN_UNDISTURBED_STEPS, Operator, RankProfile

MAX_ADVICE = 3
MIN_DISTURBED_SHARE = 0.1  # of the steps: fewer are what any machine has
COPY_OPERATORS = (
    "aten::copy_",
    "aten::clone",
    "aten::contiguous",
    "aten::_to_copy",
    "aten::cat",
    "Memcpy",
)
COMPETING_PROGRAMS = "what else runs on its cores or GPU (stepladder doctor)"
LOCAL_PARTS = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Advice:
    """A rule that applies, and the fraction of the step's time that its problem takes."""

    rule: str
    share: float
    text: str


@dataclass(frozen=True)
class Profile:
    """The profiles of all ranks, and the top operators in their mean.

    `step_range` is the shortest and the longest time of the steps that count, in seconds. In
    `disturbed_steps` of the recorded ones a rank was ready to compute and had no core; `crowded`
    says it if the ranks alone have more threads than cores.
    """

    ranks: Sequence[RankProfile]
    operators: Sequence[Operator]
    step_range: tuple[float, float] = (0.0, 0.0)
    disturbed_steps: int = 0
    crowded: str | None = None

    def share(self, part: str) -> float:
        """Return the fraction of the step's time that a part takes, in the mean of the ranks."""
        return mean(rank.share(part) for rank in self.ranks)

    @property
    def seconds(self) -> float:
        return mean(rank.seconds for rank in self.ranks)

    @property
    def undisturbed_seconds(self) -> float:
        return mean(rank.undisturbed_seconds for rank in self.ranks)

    @property
    def on_gpu(self) -> bool:
        return any(rank.on_gpu for rank in self.ranks)


def _find_slow_parts(profile: Profile) -> Iterator[Advice]:
    """Find the parts that take too long on each rank by itself."""
    data = profile.share("data")
    if data >= 0.15:
        text = (
            f"Reading data takes {data:.0%} of a step: read ahead in worker processes"
            " (num_workers), or convert it to shards (stepladder data shard)."
        )
        yield Advice("slow_data", data, text)
    python = profile.share("python")
    if python >= 0.3 and not profile.on_gpu:
        text = (
            f"For {python:.0%} of a step Python runs between operators: fewer and larger operators:"
            " a larger batch, torch.compile, optimizers with foreach=True or fused=True."
        )
        yield Advice("python", python, text)
    idle = profile.share("other")
    if idle >= 0.3 and profile.on_gpu:
        text = (
            f"The GPU has nothing to do for {idle:.0%} of a step: a larger batch, torch.compile, or"
            " CUDA graphs; no .item() and no print of a loss in each step."
        )
        yield Advice("idle_gpu", idle, text)
    optimizer = profile.share("optimizer")
    if optimizer >= 0.2:
        text = (
            f"The optimizer takes {optimizer:.0%} of a step: an optimizer with fused=True, or a"
            " larger batch, because its time does not grow with it."
        )
        yield Advice("slow_optimizer", optimizer, text)
    yield from _find_copies(profile)


def _find_copies(profile: Profile) -> Iterator[Advice]:
    copies = [
        operator for operator in profile.operators if operator.name.startswith(COPY_OPERATORS)
    ]
    share = sum(operator.seconds for operator in copies) / profile.undisturbed_seconds
    if share >= 0.15:
        names = ", ".join(operator.name for operator in copies)
        text = (
            f"Copies ({names}) take {share:.0%} of a step: keep tensors in the type, layout and"
            " device in which they are needed; allocate once."
        )
        yield Advice("many_copies", share, text)


def _find_waiting_ranks(profile: Profile) -> Iterator[Advice]:
    """Find one rank that is always late, or ranks of which a different one is late each time."""
    late_rank, *waiting_ranks = sorted(profile.ranks, key=lambda rank: rank.share("waiting"))
    late_share = late_rank.share("waiting")
    if waiting_ranks and late_share <= waiting_ranks[0].share("waiting") / 2:
        waited = mean(rank.share("waiting") for rank in waiting_ranks)
        if waited >= 0.1:
            text = _describe_late_rank(late_rank, waiting_ranks, waited)
            yield Advice("late_rank", waited, text)
            return
    share = profile.share("waiting")
    if share >= 0.1:
        text = (
            f"Ranks wait for each other for {share:.0%} of a step, and a different one comes last"
            " each time: make batches equally long, and leave a core to each process"
            " (stepladder doctor)."
        )
        yield Advice("uneven_ranks", share, text)


def _describe_late_rank(
    late_rank: RankProfile, waiting_ranks: list[RankProfile], waited: float
) -> str:
    """Return the text about a late rank, for which others wait a fraction `waited` of a step."""
    excess_s = {
        part: (late_rank.parts[part] or 0.0)
        - median(rank.parts[part] or 0.0 for rank in waiting_ranks)
        for part in LOCAL_PARTS
    }
    part = max(LOCAL_PARTS, key=lambda name: excess_s[name])
    mean_step_s = mean(rank.undisturbed_seconds for rank in [late_rank, *waiting_ranks])
    text = f"Rank {late_rank.rank} comes last, and the wait for it takes {waited:.0%} of a step"
    if excess_s[part] < 0.25 * waited * mean_step_s:
        return f"{text}; no part of it is longer, so it is held up by {COMPETING_PROGRAMS}."
    return (
        f"{text}: {part} takes {1e3 * excess_s[part]:.3g} ms longer there."
        f" Look at its share of the work, and at {COMPETING_PROGRAMS}."
    )


def _find_slow_communication(profile: Profile) -> Iterator[Advice]:
    share = profile.share("communication")
    if share < 0.15:
        return
    text = f"Communication that nothing hides takes {share:.0%} of a step"
    remedy = "reduce gradients during backward (--sync ddp, DistributedDataParallel)"
    if any(rank.early for rank in profile.ranks):
        hidden_s = mean(rank.overlapped for rank in profile.ranks)
        hidden_share = hidden_s / (hidden_s + share * profile.undisturbed_seconds)
        text += f" ({hidden_share:.0%} of all is hidden behind backward)"
        remedy = "a larger batch per process, or fewer processes"
    yield Advice("slow_communication", share, f"{text}: {remedy}.")


def find_all_advice(profile: Profile) -> list[Advice]:
    return [
        *_find_slow_parts(profile),
        *_find_waiting_ranks(profile),
        *_find_slow_communication(profile),
    ]


def advise(profile: Profile) -> list[Advice]:
    """Return the advice about the largest shares of a step, or if no rule applies, a summary."""
    advice = sorted(find_all_advice(profile), key=lambda item: -item.share)
    return advice[:MAX_ADVICE] or [_summarize(profile)]


def describe_disturbance(profile: Profile) -> str | None:
    """Say whether programs took the cores from ranks that were ready to compute.

    Returns:
        A sentence for the reader of the advice, or None if nearly all steps were undisturbed.
    """
    steps = profile.ranks[0].steps
    if profile.disturbed_steps < MIN_DISTURBED_SHARE * steps:
        return None
    cause = profile.crowded or "Other programs used the cores"
    consequence = "those steps do not count above"
    if profile.crowded:
        consequence = "the shares above include it"
    elif steps - profile.disturbed_steps < MIN_UNDISTURBED_STEPS:
        consequence = "of waiting and communication, the shares above leave out what that explains"
    disturbed = f"{profile.disturbed_steps} of {format_count(steps, 'step')}"
    return (
        f"{cause}: in or just before {disturbed} a rank was ready to compute and had no core;"
        f" {consequence}."
    )


def _summarize(profile: Profile) -> Advice:
    share = profile.share("forward") + profile.share("backward")
    text = f"Nothing stands out: forward and backward take {share:.0%} of a step"
    if profile.operators:
        text += f", most of it in {profile.operators[0].name}"
    text += ". More processes, or a lower precision, would make it faster."
    return Advice("nothing", share, text)
