"""Only who has the secret of a launch can say something to it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder.core.errors import InputError
from stepladder.core.signing import ForgedError, load_or_make_secret, make_secret, sign, verify


@given(st.binary())
def test_what_was_signed_comes_back(data: bytes) -> None:
    assert verify("secret", "key", sign("secret", "key", data)) == data


@given(st.binary(), st.data())
def test_a_changed_bit_is_noticed_wherever_it_is(data: bytes, choose: st.DataObject) -> None:
    signed = bytearray(sign("secret", "key", data))
    at = choose.draw(st.integers(0, 8 * len(signed) - 1))
    signed[at // 8] ^= 1 << at % 8
    with pytest.raises(ForgedError):
        verify("secret", "key", bytes(signed))


@pytest.mark.parametrize(
    "signed", [b"", b"short", sign("another", "key", b"data"), sign("", "key", b"data")]
)
def test_what_another_one_signed_is_forged(signed: bytes) -> None:
    with pytest.raises(ForgedError):
        verify("secret", "key", signed)


@pytest.mark.parametrize(
    ("key", "data"), [("another", b"data"), ("ke", b"ydata"), ("keyd", b"ata"), ("", b"keydata")]
)
def test_what_was_signed_for_one_key_is_forged_under_another(key: str, data: bytes) -> None:
    signature = sign("secret", "key", b"data")[: -len(b"data")]
    with pytest.raises(ForgedError):
        verify("secret", key, signature + data)


def test_all_who_ask_at_once_get_one_secret_that_nobody_else_can_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    with ThreadPoolExecutor(8) as pool:
        secrets_read = set(pool.map(load_or_make_secret, [path] * 32))
    assert len(secrets_read) == 1
    assert len(secrets_read.pop()) == len(make_secret()) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("text", "mode"), [("known", 0o644), ("known", 0o620), ("", 0o600)])
def test_a_secret_that_others_may_know_is_refused(tmp_path: Path, text: str, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(InputError, match="not a secret of yours alone"):
        load_or_make_secret(path)


def test_a_secret_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """Somebody who may write to the folder could name a file of this user's, or a secret that they
    know.
    """
    (tmp_path / "known").write_text("known")
    (tmp_path / "known").chmod(0o600)
    for target in ("known", "nowhere"):
        (tmp_path / "secret").symlink_to(target)
        with pytest.raises(InputError, match="is not used as a secret: it is a link") as error:
            load_or_make_secret(tmp_path / "secret")
        assert error.value.hint == f"rm {tmp_path / 'secret'}"
        (tmp_path / "secret").unlink()
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(InputError, match="is not used as a secret: it is no regular file"):
        load_or_make_secret(tmp_path / "secret")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("changed", [{"st_mode": 0o100777}, {"st_uid": 65534}])
def test_a_mount_that_shows_other_owners_or_modes_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, int]
) -> None:
    """As SMB, 9p and FUSE mounts do: no such mount can be made here, so what fstat says is changed."""
    fstat = os.fstat

    def shown(file: int) -> Any:
        status = fstat(file)
        return SimpleNamespace(
            **{name: getattr(status, name) for name in ("st_mode", "st_uid")} | changed
        )

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", shown)
        with pytest.raises(
            InputError, match="is on a mount that shows a new private file as user "
        ) as error:
            load_or_make_secret(tmp_path / "secret")
    assert "--run-dir DIR on a file system with owners and modes" in error.value.hint
    assert list(tmp_path.iterdir()) == []
