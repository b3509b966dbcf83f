"""State that a step changes, and that no snapshot would have."""

from __future__ import annotations

import array
import ctypes
import enum
import io
import itertools
import queue
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from multiprocessing.sharedctypes import synchronized
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepladder import InputError, Job, Settings, Trainer, World
from stepladder.rank.torch_fixes import FakeStore
from stepladder.train.comm import Comm
from stepladder.train.evaluation import _compute_batch
from stepladder.train.kept_state import KeptState
from stepladder.train.layout.base import HiddenState
from stepladder.train.pretended_ranks import refuse_collectives
from stepladder.train.reached_values import MAX_ENDS, outline
from stepladder.train.sync.base import StepResult
from stepladder.train.unsaved_state import UnsavedState


def make_job() -> Job:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return Job(model, optimizer, lambda model, x: (model(x).square().sum(), len(x)), x)


def step(job: Job) -> None:
    """Take a step, before and after which the state is compared."""
    unsaved = UnsavedState(job, covers_hooks=True)
    job.model(job.train_data).sum().backward()
    job.optimizer.step()
    unsaved.after_gather()


def register(job: Job, hook: Callable[..., Any]) -> None:
    job.optimizer.register_step_post_hook(hook)


def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Change a weight, without which what a hook keeps has no effect."""
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].clamp_(-1, 1)


class History:
    """What a job keeps; a method or a call of it is the hook."""

    total = 0

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.inner: dict[str, Slots] = {"slots": Slots()}

    def note(self, *args: Any) -> None:
        self.norms.append(1.0)
        if args:
            clip(*args)

    def note_inside(self, *args: Any) -> None:
        self.inner["slots"].count += 1
        if args:
            clip(*args)

    def note_in_class(self, *args: Any) -> None:
        History.total += 1
        clip(*args)

    __call__ = note


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def count_on() -> Iterator[int]:
    count = 0
    while True:
        count += 1
        yield count


KEEPERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "list": ([], lambda kept: kept.append(1)),
    "end of a long list": ([0] * 1000, lambda kept: kept.__setitem__(-1, 5)),
    "full deque": (deque([0.0] * 3, maxlen=3), lambda kept: kept.append(1.0)),
    "dict": ({"mean": 0.0}, lambda kept: kept.update(mean=1.0)),
    "dict of tensors": ({"mean": torch.zeros(2)}, lambda kept: kept["mean"].add_(1)),
    "array": (np.zeros(4), lambda kept: kept.__setitem__(2, 1.0)),
    "counter": (itertools.count(), next),
    "generator of NumPy": (np.random.default_rng(0), lambda kept: kept.random()),
    "generator of Python": (random.Random(0), lambda kept: kept.random()),
    "generator of torch": (torch.Generator(), lambda kept: torch.rand(1, generator=kept)),
    "teacher": (nn.Linear(4, 2), lambda kept: kept.weight.detach().mul_(2)),
    "cycle": (itertools.cycle(range(5)), next),
    "iterator of a list": (iter([1, 2, 3]), next),
    "map": (map(abs, range(9)), next),
    "queue": (queue.Queue(), lambda kept: kept.put(1)),
    "typed array": (array.array("d", [0.0]), lambda kept: kept.__setitem__(0, 1.0)),
    "namespace": (SimpleNamespace(count=0), lambda kept: vars(kept).update(count=1)),
    "attribute of a layer": (nn.Identity(), lambda kept: setattr(kept, "count", 1)),
    "functions in a dict": ({"note": History().note}, lambda kept: kept["note"]()),
    "array of a megabyte": (np.zeros(1 << 17), lambda kept: kept.__setitem__(1 << 16, 1.0)),
    "number of C": (ctypes.c_int(0), lambda kept: setattr(kept, "value", 1)),
    "shared number": (synchronized(ctypes.c_int(0)), lambda kept: setattr(kept, "value", 1)),
    "generator function": (count_on(), next),
    "text in memory": (io.StringIO(), lambda kept: kept.write("a")),
    "object": (History(), lambda kept: kept.note()),
    "method": (History().note_inside, lambda kept: kept()),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_a_hook_of_the_step_that_changes_a_variable_is_refused(name: str) -> None:
    kept, change = KEEPERS[name]
    job = make_job()
    register(job, lambda *args: (change(kept), clip(*args))[1])
    with pytest.raises(InputError, match=r"^a step changes the variable kept of .*<lambda>, which"):
        step(job)


def keep_on_weight(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    weight = optimizer.param_groups[0]["params"][0]
    weight.average = getattr(weight, "average", 0.0) + 1.0


def keep_a_view(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.state[weight]["fast"] = weight.detach()


def test_what_a_step_keeps_on_a_weight_a_layer_or_in_its_memory_is_refused() -> None:
    job = make_job()

    def keep_on_layer(*_: Any) -> None:
        job.model.average = job.model.weight.detach().clone()

    expected = {
        keep_on_weight: "attribute average of the weight weight, which no snapshot",
        keep_on_layer: "attribute average of the layer that is the model, which no snapshot",
        keep_a_view: "state 'fast' of weight lies in the memory of the weight weight",
    }
    for hook, message in expected.items():
        handle = job.optimizer.register_step_post_hook(hook)
        with pytest.raises(InputError, match=message):
            step(job)
        handle.remove()


class Keeping(torch.optim.SGD):
    """Keeps in its own step, without a hook, an average on each weight."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        keep_on_weight(self)
        super().step()


def test_what_an_own_step_keeps_on_a_weight_is_refused() -> None:
    job = make_job()
    job = Job(job.model, Keeping(job.model.parameters(), lr=0.1), job.loss, job.train_data)
    with pytest.raises(InputError, match="attribute average of the weight weight, which"):
        step(job)


class CountingElsewhere(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.defaults["calls"] = 1
        super().step()


class CountingUnderAWord(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["calls"] = 1
        super().step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (CountingElsewhere, "attribute defaults of CountingElsewhere"),
        (CountingUnderAWord, "state 'calls' of no weight"),
    ],
)
def test_what_an_optimizer_keeps_where_a_snapshot_has_only_weights_is_refused(
    kind: type[torch.optim.SGD], message: str
) -> None:
    job = make_job()
    job = Job(job.model, kind(job.model.parameters(), lr=0.1), job.loss, job.train_data)
    with pytest.raises(InputError, match=message):
        step(job)


@pytest.mark.parametrize(
    ("note", "name"),
    [
        (lambda kept, loss: kept.append(loss.item()), "variable kept of "),
        (lambda kept, loss: kept.__setitem__(0, 1 + kept[0]), "variable kept of "),
        (lambda kept, loss: kept.__setitem__(0, loss.detach()), ""),
        (lambda kept, loss: None, ""),
    ],
    ids=["list", "count", "last loss", "nothing"],
)
def test_what_the_loss_keeps_between_calls_is_told_once(
    note: Callable[[list[Any], torch.Tensor], None],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept: list[Any] = [0]

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        total = model(x).square().sum()
        note(kept, total)
        return total, len(x)

    job = make_job()
    job = Job(job.model, job.optimizer, loss, job.train_data)
    settings = Settings(tmp_path, sync="exact", global_batch=4, epochs=2, progress=False)
    Trainer(job, settings).fit()
    errors = capsys.readouterr().err
    assert errors.count("each call of the loss changes the") == bool(name)
    assert name in errors


def test_what_a_function_in_place_of_a_step_counts_is_refused() -> None:
    job = make_job()
    calls: list[int] = []
    plain_step = job.optimizer.step

    def counted_step(closure: Any = None) -> Any:
        calls.append(1)
        return plain_step(closure)

    job.optimizer.step = counted_step  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"the variable calls of .*counted_step, which"):
        step(job)


def test_an_object_of_a_library_may_hold_the_weights() -> None:
    job = make_job()
    loader = torch.utils.data.DataLoader(list(job.model.parameters()))  # type: ignore[arg-type]
    register(job, lambda *args: (loader, job, clip(*args))[2])
    step(job)


def test_what_a_hook_of_the_forward_pass_counts_is_told() -> None:
    job = make_job()
    calls = itertools.count()
    job.model.register_forward_pre_hook(lambda *_: print(end="" * next(calls)))
    kept = KeptState(job)
    before = kept.read()
    job.model(job.train_data)
    assert kept.read() != before


class DropoutSchedule(torch.optim.lr_scheduler.StepLR):
    def __init__(self, layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.layers = {0: layer}
        super().__init__(optimizer, 1)

    def step(self, epoch: int | None = None) -> None:
        super().step()
        self.layers[0].p = 0.9**self.last_epoch  # type: ignore[assignment]


class Annealing:
    calls = 0

    def rate(self, _: int) -> float:
        self.calls += 1
        return 0.9**self.calls


def set_rate(layer: nn.Module, step: int) -> float:
    layer.p = 0.9**step  # type: ignore[assignment]
    return 1.0


@pytest.mark.parametrize(
    ("make_rate", "message"),
    [
        (lambda layer: lambda step: set_rate(layer, step), "attribute p of the layer 1, which"),
        (lambda layer: partial(set_rate, layer), "attribute p of the layer 1, which"),
        (lambda layer: Annealing().rate, "attribute calls of Annealing, which"),
        (lambda layer: lambda step: 0.9**step * (layer.p < 1), ""),
        (lambda layer: partial(pow, 0.9), ""),
    ],
    ids=["function", "partial", "method", "reads", "of Python"],
)
def test_what_the_function_of_a_schedule_keeps_or_sets_on_a_layer_is_refused(
    make_rate: Callable[[nn.Module], Any], message: str
) -> None:
    job = make_job()
    net = nn.Sequential(job.model, nn.Dropout(0.5))
    schedule = torch.optim.lr_scheduler.LambdaLR(job.optimizer, make_rate(net[1]))
    job = Job(net, job.optimizer, job.loss, job.train_data, schedule=schedule)
    with pytest.raises(InputError, match=message) if message else nullcontext():
        unsaved = UnsavedState(job, covers_hooks=True)
        job.model(job.train_data).sum().backward()
        job.optimizer.step()
        schedule.step()
        unsaved.after_gather()


def test_an_attribute_of_a_layer_that_an_own_schedule_sets_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = DropoutSchedule(model[1], optimizer)
    unsaved = UnsavedState(Job(model, optimizer, print, torch.ones(2), schedule=schedule), True)  # type: ignore[arg-type]
    schedule.step()
    with pytest.raises(InputError, match="attribute p of the layer 1, which"):
        unsaved.after_gather()


class ForgetfulSchedule(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer: torch.optim.Optimizer, saved: tuple[str, ...]) -> None:
        self.saved = saved
        self.losses: list[float] = []
        self.count = 0
        super().__init__(optimizer, 1)

    def step(self, epoch: int | None = None) -> None:
        self.count += 1
        self.losses.append(1.0)

    def state_dict(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self.saved}


@pytest.mark.parametrize(
    ("saved", "forgotten"),
    [(("count",), "losses"), (("losses",), "count"), (("count", "losses"), None)],
)
def test_what_the_state_dict_of_a_schedule_forgets_is_refused(
    saved: tuple[str, ...], forgotten: str | None
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ForgetfulSchedule(optimizer, saved)
    unsaved = UnsavedState(Job(model, optimizer, print, torch.ones(2), schedule=schedule), True)  # type: ignore[arg-type]
    schedule.step()
    message = f"the attribute {forgotten} of ForgetfulSchedule"
    with pytest.raises(InputError, match=message) if forgotten else nullcontext():
        unsaved.after_gather()


def test_a_list_that_passes_fill_and_a_hook_that_moves_a_buffer_empties_is_refused() -> None:
    job = make_job()
    job.model.register_buffer("prototype", torch.zeros(2))
    seen: list[torch.Tensor] = []
    register(job, lambda *_: (job.model.prototype.add_(seen[-1]), seen.clear(), None)[2])  # type: ignore[operator]
    unsaved = UnsavedState(job, covers_hooks=True)
    for _ in range(2):  # once the hook has had an effect
        unsaved.after_reduce(0, StepResult(1.0, []))
        seen.append(torch.ones(2))
        job.optimizer.step()
        unsaved.after_gather()
    seen.append(torch.ones(2))
    with pytest.raises(InputError, match=r"^a step changes the variable seen of"):
        unsaved.after_reduce(0, StepResult(1.0, []))


def test_a_counter_of_a_hook_that_moves_a_frozen_network_is_refused() -> None:
    job = make_job()
    job.model.target = nn.Linear(4, 2).requires_grad_(False)
    calls: list[int] = []

    def refresh(*_: Any) -> None:
        calls.append(1)
        job.model.target.load_state_dict(job.model.state_dict(), strict=False)

    register(job, refresh)
    with pytest.raises(InputError, match=r"^a step changes the variable calls of .*refresh"):
        step(job)


class Phase(enum.IntEnum):
    WARM = 0


def test_a_class_whose_objects_are_read_is_left_alone() -> None:
    job = make_job()
    phases = [Phase.WARM]
    register(job, lambda optimizer, *_: (clip(optimizer), phases, Phase, None)[3])
    step(job)


def test_what_forward_keeps_on_a_layer_is_left_alone() -> None:
    job = make_job()
    register(job, lambda optimizer, *_: clip(optimizer))
    unsaved = UnsavedState(job, covers_hooks=True)
    job.model.last_input = job.train_data
    unsaved.after_reduce(0, StepResult(1.0, []))
    unsaved.after_gather()


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (History().note, "attribute norms of History"),
        (History(), "attribute norms of History"),
        (History().note_inside, "attribute inner of History"),
        (History().note_in_class, "variable History of History.note_in_class"),
        (partial(lambda it, *args: it.note(*args), History()), "attribute args of partial"),
    ],
    ids=["method", "call", "inner", "class", "partial"],
)
def test_a_hook_that_is_an_object_or_its_method_is_refused(
    hook: Callable[..., Any], message: str
) -> None:
    job = make_job()
    register(job, hook)
    with pytest.raises(InputError, match=f"^a step changes the {re.escape(message)}"):
        step(job)


@pytest.mark.parametrize(
    "add",
    [
        lambda job, halve: job.model.weight.register_hook(halve),
        lambda job, halve: job.model.weight.register_post_accumulate_grad_hook(
            lambda param: [param.grad.copy_(halve(param.grad)), None][1]
        ),
        lambda job, halve: job.model.register_full_backward_hook(
            lambda _, inputs, outputs: tuple(map(halve, inputs))
        ),
        lambda job, halve: job.model.register_full_backward_pre_hook(
            lambda _, outputs: tuple(map(halve, outputs))
        ),
    ],
    ids=["gradient", "accumulated gradient", "module", "module before"],
)
def test_a_hook_of_the_backward_pass_that_keeps_a_history_is_refused(
    add: Callable[..., Any],
) -> None:
    norms: list[int] = []
    job = make_job()
    job.train_data.requires_grad_()
    add(job, lambda gradient: (norms.append(1), gradient / 2)[1])
    with pytest.raises(InputError, match=r"^a step changes the variable norms of"):
        step(job)


@pytest.mark.parametrize(
    "add",
    [
        lambda job, note: job.optimizer.register_step_pre_hook(lambda *_: note(job.model.weight)),
        lambda job, note: job.model.weight.register_hook(note),
        lambda job, note: job.model.weight.register_post_accumulate_grad_hook(note),
        lambda job, note: job.model.register_full_backward_hook(lambda *args: note(args[2][0])),
    ],
    ids=["step", "gradient", "accumulated gradient", "module"],
)
def test_a_hook_that_only_logs_is_left_alone(add: Callable[..., Any]) -> None:
    norms: list[float] = []
    job = make_job()
    job.train_data.requires_grad_()
    add(job, lambda tensor: norms.append(float(tensor.norm())))
    step(job)
    step(job)
    assert len(norms) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.param_groups[0].update(lr=0.01),
        lambda optimizer: optimizer.param_groups[0]["params"][0].grad.zero_(),
        lambda optimizer: next(iter(optimizer.state.values()))["momentum_buffer"].zero_(),
    ],
    ids=["rate", "gradient", "momentum"],
)
def test_a_hook_is_refused_once_it_has_an_effect(change: Callable[[Any], Any]) -> None:
    calls: list[int] = []
    job = make_job()

    def change_late(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            change(optimizer)

    register(job, change_late)
    step(job)
    step(job)
    with pytest.raises(InputError, match=r"^a step changes the variable calls of .*change_late"):
        step(job)


def test_a_hook_that_may_write_without_a_count_has_an_effect() -> None:
    calls: list[int] = []
    job = make_job()
    register(job, lambda *_: (calls.append(1), job.model.weight.data.mul_(0.9), None)[2])  # type: ignore[operator,union-attr]
    with pytest.raises(InputError, match=r"^a step changes the variable calls of"):
        step(job)


def test_state_that_a_snapshot_has_and_objects_of_libraries_are_left_alone() -> None:
    job = make_job()
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)
    job = Job(job.model, job.optimizer, job.loss, job.train_data, schedule=schedule)
    groups = job.optimizer.param_groups
    window = memoryview(bytearray(8))  # as a file, a logger or a writer is

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.state[job.model.weight].setdefault("norms", []).append(1.0)  # type: ignore[index]
        groups[0]["count"] = groups[0].get("count", 0) + 1
        schedule.step()
        window[0] += 1

    register(job, hook)
    step(job)
    step(job)


def test_what_a_hook_of_the_state_dict_saves_is_left_to_it() -> None:
    job = make_job()
    history = History()
    register(job, history.note)
    job.optimizer.register_state_dict_post_hook(lambda _, state: {**state, "norms": history.norms})
    step(job)


def test_what_is_compared_has_bounds() -> None:
    job = make_job()
    nested: list[Any] = []
    nested.append(nested)
    big = [list(range(MAX_ENDS * 10)) for _ in range(10_000)]
    register(job, lambda *_: (nested, big, None)[2])
    unsaved = UnsavedState(job, covers_hooks=True)
    begin = time.process_time()
    unsaved.after_gather()
    assert time.process_time() - begin < 0.1


def test_without_hooks_and_own_classes_nothing_is_compared() -> None:
    job = make_job()
    assert not UnsavedState(job, covers_hooks=True).can_exist
    register(job, History().note)
    assert not UnsavedState(job, covers_hooks=False).can_exist


def fit(run_dir: Path, job: Job, epochs: int) -> None:
    settings = Settings(run_dir, sync="exact", progress=False, epochs=epochs, global_batch=8)
    Trainer(job, settings, comm=Comm(World(), torch.device("cpu"))).fit()


def test_metrics_of_a_model_outside_of_the_job_are_compared_at_a_resume(tmp_path: Path) -> None:
    def make(teacher: float) -> Job:
        job = make_job()

        def metrics(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
            return {"distance": ((model(x) - teacher).sum(), len(x))}

        return Job(job.model, job.optimizer, job.loss, job.train_data, x, metrics)

    x = make_job().train_data
    fit(tmp_path / "run", make(1.0), 1)
    fit(tmp_path / "run", make(1.0), 2)
    with pytest.raises(
        InputError, match=r"the next metric distance, sum and count is .* no snapshot"
    ):
        fit(tmp_path / "run", make(1.5), 3)


def test_a_loss_of_which_only_the_last_bit_is_another_is_refused_at_a_resume(
    tmp_path: Path,
) -> None:
    def make(factor: float) -> Job:
        job = make_job()
        loss = lambda model, x: (model(x).square().sum() * factor, len(x))  # noqa: E731
        return Job(job.model, job.optimizer, loss, job.train_data)

    fit(tmp_path / "run", make(1.0), 1)
    with pytest.raises(InputError, match="the next loss is"):
        fit(tmp_path / "run", make(1.0 + 2**-22), 2)


@pytest.mark.parametrize(
    "read",
    [
        lambda state: state["param"],
        lambda state: state.get("param"),
        lambda state: list(state),
        lambda state: list(state.values()),
        lambda state: "param" in state,
        lambda state: bool(state),
    ],
)
def test_hidden_state_of_an_optimizer_cannot_be_read(read: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match=r"^--shard: the optimizer's state is read outside"):
        read(HiddenState())


@pytest.fixture
def group() -> Iterator[None]:
    """A group of which the other rank does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: dist.all_reduce(x),
        lambda x: dist.broadcast(x, 0),
        lambda _: dist.barrier(),
        lambda x: dist.all_gather([x], x),
        lambda x: dist.send(x, 1),
        lambda x: dist.all_gather_object([None, None], x),
    ],
)
@pytest.mark.usefixtures("group")
def test_a_collective_of_the_job_is_refused_where_it_is_called(
    collective: Callable[..., Any],
) -> None:
    def metrics(_: nn.Module, x: torch.Tensor) -> dict[str, Any]:
        assert dist.get_rank() == 0
        collective(x)
        return {}

    with (
        refuse_collectives(),
        pytest.raises(InputError, match=r"the job calls torch.distributed\.\w"),
    ):
        _compute_batch(nn.Linear(1, 1), metrics, torch.ones(1), torch.device("cpu"))


def test_what_a_signal_raises_while_a_value_is_read_changes_nothing() -> None:
    """As torch does once a worker of a loader has ended."""
    raised = [RuntimeError("DataLoader worker exited unexpectedly")]

    class Interrupted(Fraction):
        def __reduce__(self) -> Any:
            if raised:
                raise raised.pop()
            return Fraction, (1, 2)

    Interrupted.__module__ = "fractions"
    assert outline(Interrupted(1, 2), set()) == outline(Interrupted(1, 2), set())
