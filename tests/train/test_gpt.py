"""Recipe gpt: the tokens of a text, its whole validation split, one hash on any number of
processes, samples.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pages import expect_documented
from processes import run, train
from stepladder import InputError
from stepladder.recipes.gpt import (
    BLOCKS_PER_ROW,
    GPT,
    PADDING,
    Config,
    build,
    generate,
    loss,
    read_tokens,
    sum_token_losses,
)
from stepladder.train.progress_bar import ProgressBar

LINE = "to be, or not to be: that is the question.\n"
TINY = "--layers", 1, "--width", 16, "--heads", 2, "--block", 8, "--steps", 4, "--sync", "exact"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    (path / "input.txt").write_text(LINE * 60)
    return path


def tiny(folder: Path, **options: Any) -> Config:
    return Config(layers=1, width=16, heads=2, block=8, data_dir=str(folder), **options)


@pytest.mark.parametrize(
    ("data", "tokens", "points"),
    [
        ("bäb" * 90, [1, 2, 1] * 90, [ord("a"), ord("b"), ord("ä")][1:]),
        (b"\xff\x00\xff" * 90, [255, 0, 255] * 90, []),
        ("".join(map(chr, range(0x400, 0x400 + 300))), None, []),
    ],
    ids=["characters", "bytes", "many characters"],
)
def test_a_text_is_characters_and_anything_else_bytes(
    tmp_path: Path, data: str | bytes, tokens: list[int] | None, points: list[int]
) -> None:
    raw = data.encode() if isinstance(data, str) else data
    (tmp_path / "input.txt").write_bytes(raw)
    tokens_read, characters = read_tokens(tmp_path / "input.txt", 8)
    if points:
        assert characters.tolist() == points
        assert "".join(chr(points[token]) for token in tokens_read.tolist()) == data
    else:
        assert len(characters) == 0 and tokens_read.tolist() == (tokens or list(raw))


@pytest.mark.parametrize(
    ("text", "printed"), [(None, "cannot read"), ("too short", "has 9 tokens")]
)
def test_a_text_that_is_missing_or_too_short_is_refused(
    tmp_path: Path, text: str | None, printed: str
) -> None:
    if text is not None:
        (tmp_path / "input.txt").write_text(text)
    with pytest.raises(InputError, match=printed):
        build(tiny(tmp_path))


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="no multiple of --heads 4"):
        Config(width=130)


def test_the_loss_is_over_each_token_of_the_validation_split_but_the_first(folder: Path) -> None:
    job = build(tiny(folder))
    torch.nn.init.normal_(job.model.head.weight)  # type: ignore[union-attr, arg-type]
    tokens, _ = read_tokens(folder / "input.txt", 8)
    split = tokens[len(tokens) * 9 // 10 :].long()
    assert (len(split) - 1) % 8, "the last row is a part of one"
    with torch.no_grad():
        total, count = sum_token_losses(job.model, job.eval_data)
        expected = sum(
            float(
                F.cross_entropy(
                    job.model(split[None, lo : min(lo + 8, len(split) - 1)])[0], y, reduction="sum"
                )
            )
            for lo in range(0, len(split) - 1, 8)
            if len(y := split[lo + 1 : lo + 9])
        )
    assert count == len(split) - 1 and (job.eval_data == PADDING).any()
    assert float(total) == pytest.approx(expected, rel=1e-5)


def test_blocks_begin_anywhere_and_count_all_their_tokens(folder: Path) -> None:
    job = build(tiny(folder))
    starts = set()

    class Looking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            starts.update(x[:, 0].tolist())
            return torch.zeros(*x.shape, 8 * BLOCKS_PER_ROW)

    rows = torch.arange(8 * BLOCKS_PER_ROW).expand(2000, 8 * BLOCKS_PER_ROW)
    total, count = loss(Looking(), rows)
    assert (count, starts) == (2000 * 8, set(range(8 * (BLOCKS_PER_ROW - 1))))
    assert float(total) / count == pytest.approx(math.log(8 * BLOCKS_PER_ROW), abs=1e-3)
    assert job.train_data.shape[1] == 8 * BLOCKS_PER_ROW


def test_a_token_sees_those_before_it_and_none_after(folder: Path) -> None:
    model = build(tiny(folder)).model
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    x = torch.randint(5, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[0, 5] = (x[0, 5] + 1) % 5
    with torch.no_grad():
        output = model(x)[0]
        changed_output = model(changed)[0]
    assert torch.equal(output[:5], changed_output[:5])
    assert all(
        not torch.equal(output[position], changed_output[position]) for position in range(5, 8)
    )


def test_what_is_likeliest_is_drawn_where_nothing_is_left_to_chance() -> None:
    model = GPT(Config(layers=1, width=16, heads=2, block=8), torch.arange(5, dtype=torch.int32))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    tokens_read = generate(model, torch.tensor([1, 2]), 20, temperature=0)
    assert len(tokens_read) == 22 and tokens_read[:2].tolist() == [1, 2]
    with torch.no_grad():
        assert tokens_read[12] == model(tokens_read[None, 4:12])[0, -1].argmax(), (
            "the last tokens of a block are seen"
        )


def test_the_speed_is_shown_in_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(True, 10, 0, build(tiny(folder)).unit)
    bar.last_line_time -= 60
    bar.update(1, 2.0, 512.0)
    assert re.fullmatch(r"step 1/10  loss 2.0000  [\d,]+ tokens/s\n", capsys.readouterr().err)


@pytest.mark.ranks
@pytest.mark.slow
def test_one_hash_on_any_number_of_processes_and_a_sample(tmp_path: Path, folder: Path) -> None:
    random.seed(0)
    hashes = {}
    for ranks, shard in ((1, "none"), (2, "none"), (3, "optimizer"), (4, "optimizer")):
        flags = (
            "--run-dir",
            f"runs/{ranks}",
            "--nproc",
            ranks,
            "--shard",
            shard,
            "--data-dir",
            folder,
        )
        result = train("gpt", *TINY, *flags, cwd=tmp_path)
        hashes[ranks] = result["weights_sha256"]
        assert 0 < result["metrics"]["val_loss"] < 3.5
    assert len(set(hashes.values())) == 1, hashes
    arguments = "recipe", "sample", "runs/4", "--prompt", "to be", "--tokens", 12, "--json"
    printed = [json.loads(run(*arguments, cwd=tmp_path).stdout) for _ in range(2)]
    assert printed[0] == printed[1] and printed[0]["step"] == 4
    expect_documented(printed[0], "recipe sample")
    assert printed[0]["text"].startswith("to be") and len(printed[0]["text"]) == 17
    for wrong, text in (("€", "--prompt has '€'"), ("", "--prompt is empty")):
        done = run("recipe", "sample", "runs/4", "--prompt", wrong, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {text}"), done.stderr
