"""What is worth doing about a profile: a rule for each thing that can be wrong, with a number and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


Rule = Callable[[Profile], Advice | None]


def slow_data(profile: Profile) -> Advice | None:
    share = profile.share("data")
    if share < 0.15:
        return None
    remedy = "read ahead in worker processes (num_workers), or bring it into shards (stepladder data shard)"
    return Advice("slow_data", share, f"Reading data takes {share:.0%} of a step: {remedy}.")


def late_rank(profile: Profile) -> Advice | None:
    """One rank hardly waits, the others wait for it."""
    last, *others = sorted(profile.ranks, key=lambda rank: rank.share("waiting"))
    if not others or last.share("waiting") > others[0].share("waiting") / 2:
        return None
    share = mean(rank.share("waiting") for rank in others)
    if share < 0.1:
        return None
    more = {
        part: (last.parts[part] or 0.0) - median(rank.parts[part] or 0.0 for rank in others) for part in OWN_WORK
    }
    part = max(more, key=lambda name: more[name])
    text = f"Rank {last.rank} comes last, the others wait for {share:.0%} of a step"
    if more[part] < 0.25 * share * profile.seconds:
        return Advice(
            "late_rank", share, f"{text}; no part of it is longer, so it is held up by {OTHER_PROGRAMS}."
        )
    what = f"{part} takes {1e3 * more[part]:.3g} ms longer there"
    return Advice("late_rank", share, f"{text}: {what}. Look at its share of the work, and at {OTHER_PROGRAMS}.")


def uneven_ranks(profile: Profile) -> Advice | None:
    share = profile.share("waiting")
    if share < 0.1 or late_rank(profile) is not None:
        return None
    text = f"Ranks wait for each other for {share:.0%} of a step, now this one comes last and now that one"
    remedy = "make batches equally long, and leave a core to each process (stepladder doctor)"
    return Advice("uneven_ranks", share, f"{text}: {remedy}.")


def slow_communication(profile: Profile) -> Advice | None:
    share, hidden = profile.share("communication"), mean(rank.overlapped for rank in profile.ranks)
    if share < 0.15:
        return None
    all_of_it = hidden + share * profile.seconds
    text = f"Communication that nothing hides takes {share:.0%} of a step"
    if not any(rank.early for rank in profile.ranks):
        remedy = "reduce gradients while backward goes on (--sync ddp, DistributedDataParallel)"
        return Advice("slow_communication", share, f"{text}: {remedy}.")
    text = f"{text} ({hidden / all_of_it:.0%} of all is hidden behind backward)"
    return Advice("slow_communication", share, f"{text}: a larger batch per process, or fewer processes.")


def python_between_operators(profile: Profile) -> Advice | None:
    share = mean(rank.python / rank.seconds for rank in profile.ranks)
    if share < 0.3 or profile.on_gpu:
        return None
    remedy = (
        "fewer and larger operators: a larger batch, torch.compile, optimizers with foreach=True or fused=True"
    )
    return Advice("python", share, f"For {share:.0%} of a step Python runs between operators: {remedy}.")


def idle_gpu(profile: Profile) -> Advice | None:
    share = profile.share("other")
    if share < 0.3 or not profile.on_gpu:
        return None
    remedy = "a larger batch, torch.compile, or CUDA graphs; no .item() and no print of a loss in each step"
    return Advice("idle_gpu", share, f"The GPU has nothing to do for {share:.0%} of a step: {remedy}.")


def slow_optimizer(profile: Profile) -> Advice | None:
    share = profile.share("optimizer")
    if share < 0.2:
        return None
    remedy = "an optimizer with fused=True, or a larger batch, for its time does not grow with it"
    return Advice("slow_optimizer", share, f"The optimizer takes {share:.0%} of a step: {remedy}.")


def many_copies(profile: Profile) -> Advice | None:
    copies = [operator for operator in profile.operators if operator.name.startswith(COPIES)]
    share = sum(operator.seconds for operator in copies) / profile.seconds
    if share < 0.15:
        return None
    named = ", ".join(operator.name for operator in copies)
    remedy = "keep tensors in the type, layout and place in which they are needed; allocate once"
    return Advice("many_copies", share, f"Copies ({named}) take {share:.0%} of a step: {remedy}.")


RULES: tuple[Rule, ...] = (
    slow_data, late_rank, uneven_ranks, slow_communication, python_between_operators, idle_gpu, slow_optimizer,
    many_copies,
)  # fmt: skip


def advise(profile: Profile) -> list[Advice]:
    """The few that are about most of the time; where nothing is wrong, what the time is spent on."""
    found = sorted(filter(None, (rule(profile) for rule in RULES)), key=lambda one: -one.share)
    if found:
        return found[:MOST]
    share = sum(profile.share(part) for part in ("forward", "backward"))
    most = f", most of it in {profile.operators[0].name}" if profile.operators else ""
    text = f"Nothing stands out: forward and backward take {share:.0%} of a step{most}"
    return [Advice("nothing", share, f"{text}. More processes, or a lower precision, would make it faster.")]
