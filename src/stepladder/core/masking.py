"""Find what may be a secret, by its name or its position in a URL, and show it as ***.

Files, pages and services that people share get the mask; the job itself gets the value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MASK = "***"
URL = "url"  # in place of a secret's name, for a URL that holds one
SECRET_PART = re.compile(
    r"passw(or)?d|passphrase|passcode|secret|credential|api_?key|private_?key|access_?key"
)
SECRET_END = re.compile(r"(?:^|_)(?:auth|bearer|cookie|jwt|pass|pat|pw|pwd)$|token$")
SECRET_KEY = re.compile(  # not every name that ends in `key`: dictionaries have keys too
    r"(auth|account|ssh|encryption|signing|deploy|master|service|license|session|storage"
    r"|subscription|client|admin"
    r"|hf|huggingface|wandb|openai|anthropic|aws|azure|gcp|github|gitlab)_key$"
)
VOCABULARY_TOKEN = re.compile(
    r"(pad|bos|eos|unk|sep|cls|mask|start|stop|end|image|special)_?token$"
)
URL_SECRET = re.compile(
    r"(?P<scheme>\w+)://(?P<user>[^/\s:@]+)(?P<password>:?[^/\s]*)@|(?P<name>[?&]\w+)=[^&\s]+"
)
WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|\W+")  # also that within camelCase


class _Argument(NamedTuple):
    """An argument of a command line.

    Args:
        prefix: The part that may be shown.
        secret: The part after it that may not, "" in most arguments.
        name: The name of the secret, or URL.
    """

    prefix: str
    secret: str = ""
    name: str = ""


def is_secret_name(name: str) -> bool:
    """Tell whether a setting is a secret by its name, as in hf_token, --api-key, accessKey."""
    snake_case = WORD_BORDER.sub("_", name).lower().strip("_")
    if VOCABULARY_TOKEN.search(snake_case):
        return False
    patterns = (SECRET_PART, SECRET_END, SECRET_KEY)
    return any(pattern.search(snake_case) for pattern in patterns)


def mask(value: Any, name: str = "") -> Any:
    """Return a value with masks in place of secrets. Only texts are secrets.

    Args:
        value: A text, or a nest of mappings, lists and tuples.
        name: Its name, which tells whether it is a secret.
    """
    if isinstance(value, Mapping):
        return {
            key: mask(item, name if is_secret_name(name) else str(key))
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [mask(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if value and is_secret_name(name):
        return MASK
    return URL_SECRET.sub(_mask_url_part, value)


def _mask_url_part(match: re.Match[str]) -> str:
    """Mask a password in a URL, or the value of a parameter with a secret name.

    In an http or https URL a user name without a password is masked too, since it is usually a
    token.

    Returns:
        The text that replaces the match; the match itself if it holds no secret.
    """
    name = match["name"]
    if name:
        return f"{name}={MASK}" if is_secret_name(name) else match[0]
    scheme = match["scheme"]
    if match["password"]:
        return f"{scheme}://{match['user']}:{MASK}@"
    if scheme.startswith("http"):
        return f"{scheme}://{MASK}@"
    return match[0]


def drop_masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a stored Config whose values are known."""
    return {name: value for name, value in config.items() if MASK not in str(value)}


def split_secrets(command: Sequence[str]) -> Iterator[_Argument]:
    """Yield the arguments of a command line, split where a secret begins.

    Secrets are what follows `--hf-token`, `--hf-token=` or `HF_TOKEN=`, and URLs that hold one.
    """
    secret_flag = ""  # the last argument, if the next one is its secret
    for text in command:
        name, equals, value = text.partition("=")
        if secret_flag:
            yield _Argument("", text, secret_flag)
            secret_flag = ""
            continue
        if value and is_secret_name(name):
            yield _Argument(f"{name}=", value, name)
        elif mask(text) != text:
            yield _Argument("", text, URL)
        else:
            yield _Argument(text)
        if text.startswith("-") and not equals and is_secret_name(text):
            secret_flag = text


def mask_arguments(command: Sequence[str]) -> list[str]:
    """Return the arguments of a command line, masked."""
    masked = []
    for argument in split_secrets(command):
        name = "" if argument.name == URL else argument.name
        masked.append(argument.prefix + mask(argument.secret, name))
    return masked


def mask_command(command: Sequence[str] | str) -> str:
    """Return a command as it is typed in a shell, masked.

    Of a text that is no complete command, only secrets within URLs are masked.
    """
    try:
        arguments = shlex.split(command) if isinstance(command, str) else command
        return shlex.join(mask_arguments(arguments))
    except ValueError:
        return str(mask(command))
