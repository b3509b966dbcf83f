"""What may be a secret is known by its name, and by its place in a URL."""

from __future__ import annotations

import pytest

from stepladder.core.masking import drop_masked, is_secret_name, mask, mask_arguments, mask_command


@pytest.mark.parametrize(
    "name",
    [
        "hf_token",
        "--hf-token",
        "token",
        "HF_TOKEN",
        "accessToken",
        "hftoken",
        "api_key",
        "apiKey",
        "WANDB_API_KEY",
        "password",
        "db_password",
        "passwd",
        "DB_PASS",
        "NUM_PWD",
        "secret",
        "client_secret",
        "aws_secret_access_key",
        "credentials",
        "SLURM_JWT",
        "TORCH_HUB_PAT",
        "auth",
        "private_key_file",
        "wandb_key",
        "openai-key",
        "cookie",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "tokenizer",
        "num_tokens",
        "token_dim",
        "pad_token",
        "eos_token",
        "key",
        "sort_key",
        "key_dim",
        "author",
        "path",
        "pattern",
        "passes",
        "bypass",
        "compass",
        "monkey",
        "keyboard",
        "data_dir",
        "patience",
    ],
)
def test_names_of_none(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:pass@host/x", "https://me:***@host/x"),
        ("https://me:p@ss@host/x", "https://me:***@host/x"),
        ("https://ghp_1@github.com/a/b", "https://***@github.com/a/b"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("postgresql://me:@host", "postgresql://me:***@host"),
        ("https://host/x?a=1&token=abc&b=2", "https://host/x?a=1&token=***&b=2"),
        ("git clone http://a:b@c d", "git clone http://a:***@c d"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_passwords_in_urls(url: str, shown: str) -> None:
    assert mask(url) == shown


def test_all_of_a_config() -> None:
    config = {
        "lr": 0.1, "hf_token": "abc", "max_token": 5, "password": "", "on": True, "none": None,
        "deep": [{"api_key": "abc", "name": "x"}], "secrets": {"one": "abc", "two": ["abc"]}, "url": "http://a:b@c",
    }  # fmt: skip
    shown = mask(config)
    assert shown == config | {
        "hf_token": "***", "deep": [{"api_key": "***", "name": "x"}], "secrets": {"one": "***", "two": ["***"]},
        "url": "http://a:***@c",
    }  # fmt: skip
    assert drop_masked(shown).keys() == config.keys() - {"hf_token", "deep", "secrets", "url"}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["train", "--hf-token", "abc", "--lr", "1"], ["train", "--hf-token", "***", "--lr", "1"]),
        (["--hf-token=a=b", "--lr=1"], ["--hf-token=***", "--lr=1"]),
        (["--hf-token", "--abc", "x"], ["--hf-token", "***", "x"]),
        (["env", "HF_TOKEN=abc", "A=b"], ["env", "HF_TOKEN=***", "A=b"]),
        (["run", "https://me:pass@host"], ["run", "https://me:***@host"]),
        (["--url=https://me:pass@host"], ["--url=https://me:***@host"]),
        (["--token"], ["--token"]),
    ],
)
def test_words_of_a_command(command: list[str], shown: list[str]) -> None:
    assert mask_arguments(command) == shown


def test_a_command_is_shown_as_it_is_typed() -> None:
    shown = "train 'my job.py' --api-key '***'"
    assert mask_command(["train", "my job.py", "--api-key", "abc"]) == shown
    assert mask_command("train 'my job.py' --api-key abc") == mask_command(shown) == shown
    assert mask_command("train 'my job.py http://a:b@c") == "train 'my job.py http://a:***@c"
