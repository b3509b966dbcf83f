"""What a trained run of recipe gpt writes: the newest good snapshot's model goes on with a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from stepladder.core.errors import InputError, as_input_error
from stepladder.recipes import gpt
from stepladder.storage.run_config import read_recipe_config
from stepladder.storage.snapshot import MODEL_FILE, read_newest_snapshot

HINT = "stepladder train gpt, then stepladder recipe sample runs/gpt --prompt ROMEO:"


def sample(run_dir: Path, prompt: str, count: int, temperature: float, seed: int) -> dict[str, Any]:
    """`prompt` and what the run's model writes after it, as `--json` has them. The run's data is
    not read.

    count: tokens to draw.  temperature: 1 draws them as the model gives them, 0 always takes the
    likeliest. Raises InputError for a run of another recipe, a missing snapshot, or a prompt that
    it has no tokens for."""
    if not 0 <= temperature < math.inf:
        raise InputError(f"--temperature {temperature:g}", "--temperature 1")
    config = read_recipe_config(run_dir, "gpt", gpt.Config, "writes no text", HINT)
    snapshot = read_newest_snapshot(run_dir)
    with as_input_error(f"{run_dir} has no tokens", HINT, (KeyError,)):
        characters = load(snapshot.files[MODEL_FILE])["characters"]
    model = gpt.GPT(config, characters)
    snapshot.restore_model(model)
    torch.manual_seed(seed)
    tokens = gpt.generate(model, encoded(prompt, characters.tolist()), count, temperature)
    text = decoded(tokens.tolist(), characters.tolist())
    return {"schema": 1, "step": snapshot.step, "prompt": prompt, "text": text}


def encoded(text: str, characters: list[int]) -> torch.Tensor:
    """Its tokens, shape (tokens,). characters: the code points that they stand for; none where they
    are bytes.
    """
    if not text:
        raise InputError("--prompt is empty", "--prompt ROMEO:")
    if not characters:
        return torch.tensor(list(text.encode(errors="surrogateescape")))
    numbers = {chr(point): number for number, point in enumerate(characters)}
    if unknown := [character for character in text if character not in numbers]:
        raise InputError(
            f"--prompt has {unknown[0]!r}, which is not in the text of the run", "--prompt ROMEO:"
        )
    return torch.tensor([numbers[character] for character in text])


def decoded(tokens: list[int], characters: list[int]) -> str:
    if characters:
        return "".join(chr(characters[token]) for token in tokens)
    return bytes(tokens).decode(errors="replace")
