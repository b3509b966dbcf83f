"""export and import: weights to and from safetensors and torch.distributed.checkpoint, tensor by
tensor.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import stepladder.cli
from ranks import run_ranks
from stepladder import InputError
from stepladder.storage.safetensors_file import write_tensors
from stepladder.storage.snapshot import read_newest_snapshot, write_snapshot_files
from stepladder.storage.snapshot_slices import TensorSlice, write_part
from stepladder.storage.snapshot_store import Snapshots
from stepladder.tools import weight_export
from stepladder.tools.weight_export import StoredWeights

JOB = """
from dataclasses import dataclass
import torch
from torch import nn
import stepladder

@dataclass
class Config:
    width: int = 8

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, width), nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = self.norm(x + block(x))
        return self.head(x)

def build(config):
    model = Net(config.width)
    data = torch.arange(44) % 11
    def loss(model, x):
        return model(x).square().sum(), len(x)
    return stepladder.Job(model, torch.optim.AdamW(model.parameters()), loss, data)
"""


@pytest.fixture
def type_command(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Type `stepladder ...` in tmp_path, where there is a job.py: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)

    def run_command(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            stepladder.cli.main([*map(str, args)])
        sys.modules.pop("job", None)
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run_command


def trained(type_command: Any) -> dict[str, torch.Tensor]:
    """The weights of a run in `run`, as its model has them."""
    assert (
        type_command("train", "job.py", "--run-dir", "run", "--steps", 2, "--global-batch", 8)[0]
        == 0
    )
    read_back = read_newest_snapshot(Path("run")).tensors()
    return {**read_back, "head.weight": read_back["tokens.weight"]}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def import_folder(type_command: Any, folder: str, *flags: object) -> tuple[int, str, str]:
    return type_command("import", folder, "--run-dir", "new", "job.py", *flags)


def test_safetensors_are_what_the_library_reads_and_come_back(type_command: Any) -> None:
    weights = trained(type_command)
    code, out, _ = type_command("export", "run", "--to", "safetensors", "out")
    assert (code, out) == (0, "written: out: 10 tensors, 0.0 MB, of step_00000002\n")
    read_back = load_file("out/model.safetensors")
    assert same(read_back, {name: weights[name] for name in weights if name != "head.weight"})
    assert import_folder(type_command, "out")[0::2] == (0, "")
    assert same(read_newest_snapshot(Path("new")).tensors(), read_back)


def test_a_large_model_has_several_files_and_an_index(
    type_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = trained(type_command)
    monkeypatch.setattr(weight_export, "MAX_WEIGHTS_FILE_BYTES", 300)
    assert type_command("export", "run", "--to", "safetensors", "out")[0] == 0
    files = sorted(path.name for path in Path("out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    read_back = {name: load_file(f"out/{file}")[name] for name, file in index["weight_map"].items()}
    del weights["head.weight"]
    assert same(read_back, weights)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert import_folder(type_command, "out")[0::2] == (0, "")
    assert same(read_newest_snapshot(Path("new")).tensors(), weights)


def test_dcp_is_what_torch_reads_and_comes_back(type_command: Any) -> None:
    weights = trained(type_command)
    assert type_command("export", "run", "--to", "dcp", "out")[0] == 0
    read_back = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    dcp.load(read_back, checkpoint_id="out", no_dist=True)
    assert same(read_back, weights)
    assert import_folder(type_command, "out")[0::2] == (0, "")
    del weights["head.weight"]
    assert same(read_newest_snapshot(Path("new")).tensors(), weights)


def save_by_two(comm: Any, folder: str, weights: dict[str, torch.Tensor]) -> None:
    """Save as a loop with FSDP2 does, together with an optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    spread = {
        n: distribute_tensor(t, mesh, [Shard(0)]) if t.ndim else t for n, t in weights.items()
    }
    dcp.save({"model": spread, "optimizer": {"step": 7}}, checkpoint_id=folder)


@pytest.mark.ranks
def test_a_checkpoint_of_two_ranks_beside_an_optimizer_is_imported(
    type_command: Any, tmp_path: Path
) -> None:
    weights = trained(type_command)
    run_ranks(save_by_two, 2, str(tmp_path / "out"), weights)
    assert import_folder(type_command, "out")[0::2] == (0, "")
    del weights["head.weight"]
    assert same(read_newest_snapshot(Path("new")).tensors(), weights)


def test_a_run_begins_with_what_was_imported(type_command: Any) -> None:
    weights = trained(type_command)
    type_command("export", "run", "--to", "safetensors", "out")
    import_folder(type_command, "out")
    code, _, err = type_command(
        "train", "job.py", "--run-dir", "new", "--steps", 1, "--global-batch", 8, "--lr", 1
    )
    assert code == 2 and "no field lr" in err
    code, _, err = type_command(
        "train", "job.py", "--run-dir", "new", "--steps", 1, "--global-batch", 8
    )
    assert code == 0 and "run directory new, new run with the imported weights" in err
    loss = json.loads(Path("new/metrics.jsonl").read_text().splitlines()[0])["loss"]
    first = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert loss != pytest.approx(first)
    after = read_newest_snapshot(Path("new"))
    assert after.step == 1
    torch.testing.assert_close(
        after.tensors()["blocks.0.weight"], weights["blocks.0.weight"], atol=2e-3, rtol=0
    )
    assert type_command("audit", "new")[0] == 0


@pytest.mark.parametrize("prefix", ["module.", "backbone.body."])
def test_a_prefix_of_all_names_is_left_out(type_command: Any, prefix: str) -> None:
    weights = trained(type_command)
    type_command("export", "run", "--to", "safetensors", "out")
    renamed = {f"{prefix}{n}": t for n, t in load_file("out/model.safetensors").items()}
    save_file(renamed, "out/model.safetensors")
    assert import_folder(type_command, "out")[0::2] == (0, "")
    del weights["head.weight"]
    assert same(read_newest_snapshot(Path("new")).tensors(), weights)


def test_slices_are_put_together_as_they_are_written(tmp_path: Path) -> None:
    full = torch.arange(21.0).view(7, 3).bfloat16()
    count = torch.tensor(3)
    snapshots = Snapshots(tmp_path / "run" / "snapshots")
    with snapshots.create(4) as aside:
        cuts = [(0, 3), (3, 7)]
        parts = [
            write_part(aside, n, {"model/w": TensorSlice(full[lo:hi], lo, [7, 3])})
            for n, (lo, hi) in enumerate(cuts)
        ]
        manifest = {"step": 4, "aliases": {"tied": "w"}, "ledger": ""}
        write_snapshot_files(aside, {"model": {"n": count}, "state": {}}, manifest, parts)
    for to in ("safetensors", "dcp"):
        weight_export.export(tmp_path / "run", to, tmp_path / to)
    assert same(load_file(tmp_path / "safetensors" / "model.safetensors"), {"w": full, "n": count})
    read_back = {name: torch.empty(7, 3, dtype=torch.bfloat16) for name in ("w", "tied")}
    dcp.load(read_back, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(read_back, {"w": full, "tied": full})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.uint16,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_every_type_that_the_format_knows(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    tensors = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "v": values,
        "t": values.t(),
        "none": values[:0],
    }
    written = write_tensors(tmp_path / "f", {**tensors, "one": values[0, 0]})
    read_back = load_file(tmp_path / "f")
    for name, tensor in {**tensors, "one": values[0, 0]}.items():
        assert read_back[name].dtype == tensor.dtype and read_back[name].shape == tensor.shape
        assert (
            torch.equal(read_back[name].float(), tensor.float()) if not dtype.is_complex else True
        )
    assert written["bytes"] == (tmp_path / "f").stat().st_size


class Calls:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("called"),)


def make_foreign_folder(kind: str) -> None:
    """A folder `bad` with weights of another model, or that are none."""
    folder = Path("bad")
    folder.mkdir()
    weights = load_file("out/model.safetensors")
    changed = {
        "missing": {n: t for n, t in weights.items() if n != "norm.bias"},
        "other names": {n.replace("norm.", "ln."): t for n, t in weights.items()},
        "more": {**weights, "extra": torch.ones(1)},
        "shape": {**weights, "norm.bias": torch.ones(3)},
    }
    if kind in changed:
        save_file(changed[kind], folder / "model.safetensors")
    elif kind == "damaged":
        (folder / "model.safetensors").write_bytes(Path("out/model.safetensors").read_bytes()[:-9])
    elif kind == "leads out":
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"w": "../out/model.safetensors"}}'
        )
    elif kind == "code":
        (folder / ".metadata").write_bytes(pickle.dumps(Calls()))
    elif kind == "no metadata":
        (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))


@pytest.mark.parametrize(
    "kind, expected",
    [
        (
            "empty",
            "bad holds neither model.safetensors nor model.safetensors.index.json nor .metadata",
        ),
        ("missing", "bad has no norm.bias, which the model has"),
        (
            "other names",
            "bad has no norm.weight, which the model has, but ln.bias, ln.num_batches_tracked, ",
        ),
        ("more", "bad has extra, which the model has not"),
        ("shape", "norm.bias has shape [3] in bad, [8] in the model"),
        ("damaged", "bad cannot be read: "),
        ("leads out", "leads out of the folder, to ../out/model.safetensors"),
        (
            "code",  # of pathlib, which Python 3.13 has in a module of its own
            f"bad cannot be read: it asks for {Path.touch.__module__}.Path.touch, which describes",
        ),
        ("no metadata", ".metadata describes no checkpoint"),
    ],
)
def test_a_foreign_folder_is_one_line_and_runs_nothing(
    type_command: Any, kind: str, expected: str
) -> None:
    trained(type_command)
    type_command("export", "run", "--to", "safetensors", "out")
    make_foreign_folder(kind)
    code, out, err = import_folder(type_command, "bad")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and expected in err and "HINT: " in err
    assert not Path("new").exists() and not Path("called").exists()


def test_bad_places_are_one_line(type_command: Any) -> None:
    trained(type_command)
    type_command("export", "run", "--to", "dcp", "out")
    for args, expected in [
        (("export", "run", "--to", "dcp", "out"), "out is there already"),
        (
            ("export", "nowhere", "--to", "dcp", "other"),
            "nowhere has no good snapshot (there is none)",
        ),
        (("import", "out", "--run-dir", "run", "job.py"), "run is there already"),
        (
            ("import", "out", "--run-dir", "new", "job.py", "--width", 9),
            "has shape [8] in out, [9] in the model",
        ),
        (("import", "out", "--run-dir", "job.py/new", "job.py"), "cannot write job.py/new: "),
    ]:  # fmt: skip
        code, out, err = type_command(*args)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert expected in err


def export_on_a_full_disk(_comm: Any, run_dir: Path, to: str) -> str:
    """RLIMIT_FSIZE fails a write as a full disk does, after some of its bytes."""
    target = run_dir.with_name("out")
    # Load the modules that are imported late, before the limit is set.
    StoredWeights(read_newest_snapshot(run_dir, with_model=False))
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
    try:
        weight_export.export(run_dir, to, target)
    except InputError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.ranks
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_full_disk_leaves_nothing(type_command: Any, tmp_path: Path, to: str) -> None:
    trained(type_command)
    (message,) = run_ranks(export_on_a_full_disk, 1, tmp_path / "run", to)
    reason = f"cannot write {tmp_path / 'out'}: File too large"
    assert message == f"{reason}. HINT: another DIR, or free space and the right to write there"
    assert not list(tmp_path.glob("out*"))
