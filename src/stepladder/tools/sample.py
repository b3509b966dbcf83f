"""Continue a text with the model of a run of recipe gpt, read from its newest good snapshot."""

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

SAMPLE_HINT = "stepladder train gpt, then stepladder recipe sample runs/gpt --prompt ROMEO:"


def sample(run_dir: Path, prompt: str, count: int, temperature: float, seed: int) -> dict[str, Any]:
    """Return the prompt with the text that the model continues it with, as `--json` prints it.

    The run's data is not read.

    Args:
        run_dir: The run of recipe gpt.
        prompt: The text to continue.
        count: The number of tokens to draw.
        temperature: 1 draws from the model's probabilities, 0 always takes the likeliest token.
        seed: The seed of the draws.

    Raises:
        InputError: The run is of another recipe or has no snapshot, or the prompt has characters
            that the model has no tokens for.
    """
    if not 0 <= temperature < math.inf:
        raise InputError(f"--temperature {temperature:g}", "--temperature 1")
    config = read_recipe_config(run_dir, "gpt", gpt.Config, "writes no text", SAMPLE_HINT)
    snapshot = read_newest_snapshot(run_dir)
    with as_input_error(f"{run_dir} has no tokens", SAMPLE_HINT, (KeyError,)):
        character_tensor = load(snapshot.files[MODEL_FILE])["characters"]
    characters = character_tensor.tolist()
    model = gpt.GPT(config, character_tensor)
    snapshot.restore_model(model)
    torch.manual_seed(seed)
    tokens = gpt.generate(model, encode(prompt, characters), count, temperature)
    text = decode(tokens.tolist(), characters)
    return {"schema": 1, "step": snapshot.step, "prompt": prompt, "text": text}


def encode(text: str, characters: list[int]) -> torch.Tensor:
    """Return the tokens of a text, shape (tokens,).

    The list has the code point of each token; if it is empty, the tokens are bytes.
    """
    if not text:
        raise InputError("--prompt is empty", "--prompt ROMEO:")
    if not characters:
        return torch.tensor(list(text.encode(errors="surrogateescape")))
    token_of = {chr(code_point): token for token, code_point in enumerate(characters)}
    unknown = [character for character in text if character not in token_of]
    if unknown:
        raise InputError(
            f"--prompt has {unknown[0]!r}, which is not in the text of the run", "--prompt ROMEO:"
        )
    return torch.tensor([token_of[character] for character in text])


def decode(tokens: list[int], characters: list[int]) -> str:
    if characters:
        return "".join(chr(characters[token]) for token in tokens)
    return bytes(tokens).decode(errors="replace")
