"""What may be a secret, by its name or its place in a URL, and how it is shown: as ***.

Files, pages and services that people share get the mask; the job itself gets the value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MASK, URL = "***", "url"
ANYWHERE = re.compile(
    r"passw(or)?d|passphrase|passcode|secret|credential|api_?key|private_?key|access_?key"
)
LAST = re.compile(r"(?:^|_)(?:auth|bearer|cookie|jwt|pass|pat|pw|pwd)$|token$")
KEY = re.compile(  # there are keys of dictionaries too
    r"(auth|account|ssh|encryption|signing|deploy|master|service|license|session|storage|subscription|client|admin"
    r"|hf|huggingface|wandb|openai|anthropic|aws|azure|gcp|github|gitlab)_key$"
)
OF_A_VOCABULARY = re.compile(r"(pad|bos|eos|unk|sep|cls|mask|start|stop|end|image|special)_?token$")
IN_URL = re.compile(
    r"(?P<scheme>\w+)://(?P<user>[^/\s:@]+)(?P<rest>:?[^/\s]*)@|(?P<name>[?&]\w+)=[^&\s]+"
)


class Word(NamedTuple):
    """One of a command line. secret: behind `shown`, "" in most.  name: of the secret."""

    shown: str
    secret: str = ""
    name: str = ""


def is_secret(name: str) -> bool:
    """Whether a setting of that name is one, as in hf_token, --api-key, DB_PASSWORD, accessKey."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", name).lower().strip("_")
    if OF_A_VOCABULARY.search(words):
        return False
    return any(kind.search(words) for kind in (ANYWHERE, LAST, KEY))


def masked(value: Any, name: str = "") -> Any:
    """The same, of mappings and lists all that is in them, with masks. Only texts are secrets."""
    if isinstance(value, Mapping):
        return {
            key: masked(one, name if is_secret(name) else str(key)) for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [masked(one, name) for one in value]
    if not isinstance(value, str):
        return value
    return MASK if value and is_secret(name) else IN_URL.sub(_of_url, value)


def _of_url(found: re.Match[str]) -> str:
    """The password, or on the web the user alone, who is a token then; `name=value` by its name."""
    if found["name"]:
        return f"{found['name']}={MASK}" if is_secret(found["name"]) else found[0]
    if not found["rest"]:
        return f"{found['scheme']}://{MASK}@" if found["scheme"].startswith("http") else found[0]
    return f"{found['scheme']}://{found['user']}:{MASK}@"


def without_masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stored Config whose values are known."""
    return {name: value for name, value in config.items() if MASK not in str(value)}


def words_of(command: Sequence[str]) -> Iterator[Word]:
    """Its words, with what follows `--hf-token`, `--hf-token=` or `HF_TOKEN=` as a secret, and URLs
    with one.
    """
    flag = ""
    for word in command:
        name, equals, value = word.partition("=")
        if flag:
            yield Word("", word, flag)
        elif value and is_secret(name):
            yield Word(f"{name}=", value, name)
        elif masked(word) != word:
            yield Word("", word, URL)
        else:
            yield Word(word)
        flag = word if not flag and word.startswith("-") and not equals and is_secret(word) else ""


def masked_words(command: Sequence[str]) -> list[str]:
    words = words_of(command)
    return [
        word.shown + masked(word.secret, "" if word.name == URL else word.name) for word in words
    ]


def masked_command(command: Sequence[str] | str) -> str:
    """As it is shown, and typed in a shell. Of a text, which may be half a command, what can be
    read.
    """
    try:
        return shlex.join(
            masked_words(shlex.split(command) if isinstance(command, str) else command)
        )
    except ValueError:
        return str(masked(command))
