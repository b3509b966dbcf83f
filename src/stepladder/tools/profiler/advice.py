"""What is worth doing about a profile: a rule for each thing that can be wrong, with a number and a
remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from stepladder.tools.profiler.parts import Operator, RankProfile

MOST = 3
COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::cat", "Memcpy")
OTHER_PROGRAMS = "what else runs on its cores or GPU (stepladder doctor)"
OWN_WORK = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Advice:
    """share: of the step's time that it is about."""

    rule: str
    share: float
    text: str


@dataclass(frozen=True)
class Profile:
    """All ranks, and their mean top operators."""

    ranks: Sequence[RankProfile]
    operators: Sequence[Operator]

    def share(self, part: str) -> float:
        """Of a part, the ranks' mean."""
        return mean(rank.share(part) for rank in self.ranks)

    @property
    def seconds(self) -> float:
        return mean(rank.seconds for rank in self.ranks)

    @property
    def on_gpu(self) -> bool:
        return any(rank.on_gpu for rank in self.ranks)


def slow_parts(profile: Profile) -> Iterator[Advice]:
    """What the ranks do for too long, each by itself."""
    data, other, optimizer, python = map(profile.share, ("data", "other", "optimizer", "python"))
    copies = [operator for operator in profile.operators if operator.name.startswith(COPIES)]
    copying = sum(operator.seconds for operator in copies) / profile.seconds
    if data >= 0.15:
        remedy = "read ahead in worker processes (num_workers), or bring it into shards (stepladder data shard)"
        yield Advice("slow_data", data, f"Reading data takes {data:.0%} of a step: {remedy}.")
    if python >= 0.3 and not profile.on_gpu:
        what = (
            f"For {python:.0%} of a step Python runs between operators: fewer and larger operators"
        )
        remedy = "a larger batch, torch.compile, optimizers with foreach=True or fused=True"
        yield Advice("python", python, f"{what}: {remedy}.")
    if other >= 0.3 and profile.on_gpu:
        remedy = "a larger batch, torch.compile, or CUDA graphs; no .item() and no print of a loss in each step"
        yield Advice(
            "idle_gpu", other, f"The GPU has nothing to do for {other:.0%} of a step: {remedy}."
        )
    if optimizer >= 0.2:
        remedy = "an optimizer with fused=True, or a larger batch, because its time does not grow with it"
        yield Advice(
            "slow_optimizer", optimizer, f"The optimizer takes {optimizer:.0%} of a step: {remedy}."
        )
    if copying >= 0.15:
        named = ", ".join(operator.name for operator in copies)
        remedy = (
            "keep tensors in the type, layout and place in which they are needed; allocate once"
        )
        yield Advice(
            "many_copies", copying, f"Copies ({named}) take {copying:.0%} of a step: {remedy}."
        )


def waiting_ranks(profile: Profile) -> Iterator[Advice]:
    """One rank hardly waits, the others wait for it; or now this one comes last, now that."""
    last, *others = sorted(profile.ranks, key=lambda rank: rank.share("waiting"))
    share = profile.share("waiting")
    if others and last.share("waiting") <= others[0].share("waiting") / 2:
        waited = mean(rank.share("waiting") for rank in others)
        if waited >= 0.1:
            yield Advice("late_rank", waited, late(last, others, waited))
            return
    if share >= 0.1:
        text = f"Ranks wait for each other for {share:.0%} of a step, and another one comes last each time"
        remedy = "make batches equally long, and leave a core to each process (stepladder doctor)"
        yield Advice("uneven_ranks", share, f"{text}: {remedy}.")


def late(last: RankProfile, others: list[RankProfile], waited: float) -> str:
    """waited: the share of a step that the others wait for the last."""
    more = {
        part: (last.parts[part] or 0.0) - median(rank.parts[part] or 0.0 for rank in others)
        for part in OWN_WORK
    }
    part = max(more, key=lambda name: more[name])
    text = f"Rank {last.rank} comes last, the others wait for {waited:.0%} of a step"
    if more[part] < 0.25 * waited * mean(rank.seconds for rank in [last, *others]):
        return f"{text}; no part of it is longer, so it is held up by {OTHER_PROGRAMS}."
    what = f"{part} takes {1e3 * more[part]:.3g} ms longer there"
    return f"{text}: {what}. Look at its share of the work, and at {OTHER_PROGRAMS}."


def slow_communication(profile: Profile) -> Iterator[Advice]:
    share, hidden = profile.share("communication"), mean(rank.overlapped for rank in profile.ranks)
    if share < 0.15:
        return
    text = f"Communication that nothing hides takes {share:.0%} of a step"
    remedy = "reduce gradients while backward goes on (--sync ddp, DistributedDataParallel)"
    if any(rank.early for rank in profile.ranks):
        hidden /= hidden + share * profile.seconds
        text += f" ({hidden:.0%} of all is hidden behind backward)"
        remedy = "a larger batch per process, or fewer processes"
    yield Advice("slow_communication", share, f"{text}: {remedy}.")


def findings(profile: Profile) -> list[Advice]:
    return [*slow_parts(profile), *waiting_ranks(profile), *slow_communication(profile)]


def advise(profile: Profile) -> list[Advice]:
    """The few that are about most of the time; where nothing is wrong, what the time is spent on."""
    if found := findings(profile):
        return sorted(found, key=lambda one: -one.share)[:MOST]
    share = profile.share("forward") + profile.share("backward")
    most = f", most of it in {profile.operators[0].name}" if profile.operators else ""
    text = f"Nothing stands out: forward and backward take {share:.0%} of a step{most}"
    return [
        Advice(
            "nothing", share, f"{text}. More processes, or a lower precision, would make it faster."
        )
    ]
