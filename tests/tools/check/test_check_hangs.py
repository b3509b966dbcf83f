"""Scripts whose ranks hang, through `check`: the rank, the line and the reason; and two that are
only slow.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hang_kinds import SAID_BY_CHECK, SCRIPT, function_at, serve_gate
from processes import run, started, wait_until

pytestmark = pytest.mark.ranks


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAID_BY_CHECK)
def test_a_hang_is_named_with_its_line(kind: str, tmp_path: Path) -> None:
    with started("check", "--json", SCRIPT, kind, cwd=tmp_path) as running:
        assert running.end() == 1
        report = json.loads(running.out.read_text().splitlines()[-1])
    rule, function, seen = SAID_BY_CHECK[kind]
    (finding,) = report["findings"]
    assert (finding["rule"], function_at(finding["line"])) == (rule, function)
    assert seen in finding["evidence"]


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["download", "evaluate"])
def test_a_rank_that_keeps_the_others_waiting_is_no_hang(kind: str, tmp_path: Path) -> None:
    """The patience is over before the rank goes on."""
    flags = "check", "--json", "--patience", 1
    with (
        serve_gate() as (port, is_open),
        started(*flags, SCRIPT, kind, port, cwd=tmp_path) as running,
    ):
        wait_until(lambda: "ranks wait" in running.err.read_text(), running.err.read_text)
        is_open.set()
        assert running.end() == 0
        report = json.loads(running.out.read_text().splitlines()[-1])
    assert report["findings"] == []
    (note,) = [note for note in report["notes"] if "waited long" in note]
    assert re.search(rf"rank 0: it is in {kind}\(\)", note)


@pytest.mark.corpus
@pytest.mark.slow
def test_ranks_that_still_wait_at_the_time_limit_are_no_clean_result(tmp_path: Path) -> None:
    flags = "check", "--json", "--patience", 1, "--timeout", 60
    with (
        serve_gate() as (port, _),
        started(*flags, SCRIPT, "evaluate", port, cwd=tmp_path) as running,
    ):
        assert running.end() == 3
        report = json.loads(running.out.read_text().splitlines()[-1])
    line = report["not_checked"]["line"]
    assert re.match(r"the script was ended after 60 s: rank 0: it is in evaluate\(\)", line)
    assert "to its end" not in report["ran"]


@pytest.mark.slow
def test_a_data_loader_that_hangs_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGING_WORKER)
    done = run("check", "--timeout", 40, "hangs.py", cwd=tmp_path)
    assert done.returncode == 3, done.stdout
    assert "the script was ended after 40 s" in done.stdout
    assert "whose worker is in __getitem__(), hangs.py:" in done.stdout


HANGING_WORKER = """
import threading, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        while index == 5 and dist.get_rank() == 1:
            threading.Event().wait(1)
        return torch.ones(1)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.utils.data.DataLoader(Rows(), 2, num_workers=1):
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
"""

BESIDE = """
import pathlib, torch
rows = torch.tensor([float(line) for line in pathlib.Path("../data/rows").read_text().split()])
also = pathlib.Path(__file__).resolve().parent.parent / "data" / "rows"
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(rows[:, None]).square().mean().backward()
    optimizer.step()
assert also.exists()
"""


@pytest.mark.slow
def test_paths_beside_the_working_folder_lead_to_the_users_own_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("1\n2\n")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(BESIDE)
    with started("check", "--json", "train.py", cwd=tmp_path / "work") as running:
        assert running.end() == 0, running.out.read_text()


RACE = """
import pathlib, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, late = dist.get_rank(), int(sys.argv[1])
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 2), 1.0 + rank + 2 * number)).square().mean().backward()
    optimizer.step()
while rank == late and not pathlib.Path("there").exists():
    pass
torch.save(model.module.state_dict(), "weights.pt")
scores = torch.zeros(53 - rank)
if rank != late:
    pathlib.Path("there").touch()
dist.all_gather([torch.zeros_like(scores) for _ in range(2)], scores)
"""


@pytest.mark.corpus
@pytest.mark.slow
def test_a_report_is_the_same_whichever_rank_is_first(tmp_path: Path) -> None:
    """Both write one file, and then gather tensors of two sizes."""
    (tmp_path / "race.py").write_text(RACE)
    reports = []
    for late in ("0", "1", "1"):
        report = json.loads(run("check", "--json", "race.py", late, cwd=tmp_path).stdout)
        reports.append((report["findings"], report["not_checked"], report["ran"]))
    assert reports[0] == reports[1] == reports[2]
    assert {finding["rule"] for finding in reports[0][0]} == {"many-writers", "collective-order"}
