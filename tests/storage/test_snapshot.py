"""What is saved comes back to the bit; the last few and the best stay; one hash stands for the
weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from snapshots import Training, bits
from stepladder.core.errors import InputError
from stepladder.storage.snapshot import hash_weights
from stepladder.storage.snapshot_store import Snapshots


@pytest.fixture
def snapshots(tmp_path: Path) -> Iterator[Snapshots]:
    made = Snapshots(tmp_path / "snapshots")
    yield made
    made.wait()


def latest(snapshots: Snapshots) -> Any:
    """The newest good snapshot, read as a later run would; a report of damage fails the test."""
    snapshots.wait()
    return Snapshots(snapshots.folder).latest(report=pytest.fail)


def steps_kept(snapshots: Snapshots) -> list[int]:
    snapshots.wait()
    return [int(path.name.removeprefix("step_")) for path in snapshots.paths()]


def save(snapshots: Snapshots, step: int, **manifest_value: Any) -> None:
    snapshots.save(step, nn.Linear(1, 1), {}, manifest_value)


@pytest.mark.usefixtures("one_thread")
def test_model_optimizer_and_the_rest_come_back_bit_for_bit(snapshots: Snapshots) -> None:
    trained = Training(seed=1)
    restored = Training(seed=2)
    trained.train(3)
    snapshots.save(3, trained.model, trained.state(), {"ledger": "abc"})
    snapshot = latest(snapshots)
    restored.restore(snapshot)
    assert (snapshot.step, snapshot.manifest["ledger"]) == (3, "abc")
    assert bits(snapshot.state()) == bits(trained.state())
    assert bits(restored.model.state_dict()) == bits(trained.model.state_dict())
    assert bits(restored.optimizer.state_dict()) == bits(trained.optimizer.state_dict())


class Adapted(nn.Linear):
    """A layer whose state_dict has what is trained alone."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if name != "weight"}


def test_frozen_weights_that_the_state_dict_leaves_out_stay_as_they_are(
    snapshots: Snapshots,
) -> None:
    trained, restored = Adapted(2, 2), Adapted(2, 2)
    snapshots.save(1, trained, {}, {})
    frozen = restored.weight.detach().clone()
    latest(snapshots).restore_model(restored)
    assert restored.weight.equal(frozen)
    assert restored.bias.equal(trained.bias)


@pytest.mark.usefixtures("one_thread")
def test_training_goes_on_from_a_snapshot_as_if_never_stopped(snapshots: Snapshots) -> None:
    trained = Training(seed=1)
    restored = Training(seed=2)
    trained.train(2)
    snapshots.save(2, trained.model, trained.state())
    restored.restore(latest(snapshots))
    trained.train(3)
    restored.train(3)
    assert hash_weights(restored.model) == hash_weights(trained.model)


def test_a_snapshot_is_of_the_moment_of_save_whatever_training_does_next(
    snapshots: Snapshots,
) -> None:
    trained = Training(seed=1)
    trained.train(1)
    before = bits({"model": trained.model.state_dict(), "state": trained.state()})
    snapshots.save(1, trained.model, trained.state())
    trained.train(2)
    snapshot = latest(snapshots)
    restored = Training(seed=2)
    restored.restore(snapshot)
    assert bits({"model": restored.model.state_dict(), "state": snapshot.state()}) == before


def test_restoring_keeps_ties_and_memory_format_of_the_built_model(snapshots: Snapshots) -> None:
    snapshots.save(1, Training(seed=1).model, {})
    model = Training(seed=2).model
    latest(snapshots).restore_model(model)
    assert model.head.weight is model.embed.weight
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()


def test_tied_weights_are_stored_once(snapshots: Snapshots) -> None:
    snapshots.save(1, Training(seed=1).model, {})
    assert latest(snapshots).manifest["aliases"] == {"head.weight": "embed.weight"}


def test_values_at_like_named_places_of_a_state_are_not_mixed_up(snapshots: Snapshots) -> None:
    state = {
        "a/b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0)},
        "n": {0: torch.tensor(3), "0": torch.tensor(4)},
    }
    snapshots.save(1, nn.Linear(1, 1), state)
    assert bits(latest(snapshots).state()) == bits(state)


def test_no_snapshot_yet_is_none(snapshots: Snapshots) -> None:
    assert latest(snapshots) is None


def test_saving_a_step_again_replaces_it(snapshots: Snapshots) -> None:
    save(snapshots, 7, ledger="first")
    save(snapshots, 7, ledger="second")
    assert latest(snapshots).manifest["ledger"] == "second"
    assert [path.name for path in snapshots.folder.iterdir()] == ["step_00000007"]


@pytest.mark.parametrize(
    ("changed", "case"),
    [
        (
            nn.Linear(4, 3),
            r"weight is \[3, 4\] in the model and \[2, 4\] in the snapshot; bias is \[3\] ",
        ),
        (nn.Sequential(nn.Linear(4, 2)), r"0.weight \[2, 4\] is in the model only; .*; and 1 more"),
        (nn.Linear(4, 2, bias=False), r"bias \[2\] is in the snapshot only"),
    ],
    ids=["another shape", "other names", "fewer parameters"],
)
def test_a_snapshot_of_another_model_is_refused(
    snapshots: Snapshots, changed: nn.Module, case: str
) -> None:
    snapshots.save(5, nn.Linear(4, 2), {})
    with pytest.raises(InputError, match=f"snapshot step_00000005 is of another model: {case}"):
        latest(snapshots).restore_model(changed)


@pytest.mark.parametrize("changed", [0, 99])
def test_a_snapshot_in_another_format_is_refused(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    monkeypatch.setattr("stepladder.storage.snapshot.SNAPSHOT_FORMAT", changed)
    save(snapshots, 1)
    snapshots.wait()
    monkeypatch.undo()
    with pytest.raises(
        InputError, match=f"has format {changed}\\. HINT: a stepladder that writes format 1$"
    ):
        latest(snapshots)


@pytest.mark.parametrize("max_kept", [1, 2, 5])
def test_the_newest_stay(tmp_path: Path, max_kept: int) -> None:
    snapshots = Snapshots(tmp_path, keep=max_kept)
    for step in range(1, 5):
        save(snapshots, step)
    assert steps_kept(snapshots) == [1, 2, 3, 4][-max_kept:]


def test_the_last_one_stays_even_if_none_is_to_be_kept(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, keep=0)
    save(snapshots, 1)
    save(snapshots, 2)
    assert steps_kept(snapshots) == [2]


@pytest.mark.parametrize(
    ("scores", "remaining"),
    [
        ([0.1, 0.9, 0.5, 0.6, 0.7], [2, 4, 5]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [4, 5]),
        ([float("nan"), 0.9, 0.5, 0.6, 0.7], [2, 4, 5]),
        ([-3.0, -2.0, -7.0, None, -8.0], [2, 4, 5]),
        ([None, None, None, None, None], [4, 5]),
    ],
    ids=["early", "last", "beside a NaN", "negative", "no scores"],
)
def test_the_best_stays_besides(
    tmp_path: Path, scores: list[float | None], remaining: list[int]
) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    for step, score in enumerate(scores, 1):
        save(snapshots, step, **({} if score is None else {"score": score}))
    assert steps_kept(snapshots) == remaining


def test_steps_of_nine_digits_come_after_those_of_eight(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    for step in (99_999_998, 99_999_999, 100_000_000):
        save(snapshots, step)
    assert steps_kept(snapshots) == [99_999_999, 100_000_000]
    assert latest(snapshots).step == 100_000_000


def test_the_same_weights_have_the_same_hash_in_any_memory_format() -> None:
    model = Training(seed=1).model
    changed = Training(seed=1).model
    changed.conv.to(memory_format=torch.contiguous_format)
    assert model.conv.weight.stride() != changed.conv.weight.stride()
    assert hash_weights(model) == hash_weights(changed)


@pytest.mark.parametrize(
    "name", ["conv.weight", "gain", "norm.running_var", "norm.num_batches_tracked", "mask"]
)
def test_one_flipped_bit_of_any_tensor_changes_the_hash(name: str) -> None:
    model = Training(seed=1).model
    changed = Training(seed=1).model
    tensor = changed.state_dict()[name]
    flat = tensor.detach().contiguous().reshape(-1)
    flat.view(torch.uint8)[-1] ^= 1
    tensor.copy_(flat.view(tensor.shape))
    assert hash_weights(model) != hash_weights(changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.zeros(2, 3), "c": torch.zeros(1)},
        {"a": torch.zeros(3, 2), "b": torch.zeros(1)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.zeros(1)},
        {"a": torch.zeros(2, 3), "b": torch.tensor([-0.0])},
    ],
    ids=["name", "shape", "dtype", "sign of zero"],
)
def test_the_hash_depends_on_name_shape_dtype_and_bits(changed: dict[str, torch.Tensor]) -> None:
    first = {"a": torch.zeros(2, 3), "b": torch.zeros(1)}
    assert hash_weights(with_buffers(first)) != hash_weights(with_buffers(changed))


def test_the_hash_is_frozen_so_that_results_of_other_versions_compare() -> None:
    model = with_buffers(
        {"b": torch.tensor(2, dtype=torch.int64), "a": torch.tensor([[1.0, -2.0]])}
    )
    assert hash_weights(model) == "f11642cd8f20041ee40e6e8e247a958fab8049b6a2b5c6e18c34e6ad921b3dbb"


def with_buffers(tensors: dict[str, torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def test_a_manifest_can_be_read_by_a_person(snapshots: Snapshots) -> None:
    save(snapshots, 12, metrics={"test_accuracy": 0.5})
    snapshots.wait()
    manifest = json.loads((snapshots.paths()[0] / "manifest.json").read_text())
    assert (manifest["step"], manifest["metrics"]) == (12, {"test_accuracy": 0.5})
    assert manifest["files"].keys() == {"model.safetensors", "state.pt"}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever else runs on this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
