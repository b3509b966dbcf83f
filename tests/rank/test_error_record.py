"""What a rank leaves of its error, and of what kind it is: the texts are those of torch 2.13, gloo
and NCCL.
"""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError

from stepladder.core.errors import Corrupt, InputError, PeerLost, RanksDiffer, StateLost
from stepladder.rank.error_record import ErrorKind, RankError
from stepladder.rank.open_file import MemoryFile


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerLost("Connection closed by peer"), ErrorKind.PEER_LOST),
        (
            PeerLost("a collective failed: Timed out waiting 2000ms for recv operation"),
            ErrorKind.PEER_SILENT,
        ),
        (StateLost("timed out: all that had the state"), ErrorKind.STATE_LOST),
        (
            RuntimeError("[gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44268"),
            ErrorKind.PEER_LOST,
        ),
        (
            RuntimeError("[gloo/transport] Timed out waiting 2000ms for recv operation"),
            ErrorKind.PEER_SILENT,
        ),
        (
            DistBackendError("NCCL error: remote process exited or there was a network error"),
            ErrorKind.PEER_LOST,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ErrorKind.OTHER),
        (KeyError("Connection closed by peer"), ErrorKind.OTHER),
        (TimeoutError("a download timed out"), ErrorKind.OTHER),
        (InputError("Connection closed by peer", "mend it"), ErrorKind.BAD_INPUT),
        (Corrupt("rank 1 is wrong: Connection closed by peer"), ErrorKind.CORRUPT),
        (RanksDiffer("ranks 0, 1 differ"), ErrorKind.RANKS_DIFFER),
    ],
)
def test_a_launcher_is_told_what_kind_of_error_it_is(error: Exception, kind: ErrorKind) -> None:
    errors = MemoryFile("errors")
    RankError.from_error(3, error).write(errors.path)
    record = RankError.read(errors.path, 3)
    assert record is not None and (record.rank, record.kind) == (3, kind)
    of_others = ErrorKind.PEER_LOST, ErrorKind.STATE_LOST, ErrorKind.PEER_SILENT
    assert record.is_consequence == (kind in of_others)
    assert record.affects_all_ranks == (
        record.is_consequence or kind in (ErrorKind.BAD_INPUT, ErrorKind.RANKS_DIFFER)
    )


def test_an_error_names_its_step_and_shows_only_the_user_s_frames() -> None:
    errors = MemoryFile("errors")

    def loss() -> None:
        error = KeyError("lost")
        error.step = 7  # type: ignore[attr-defined]
        raise error

    try:
        loss()
    except KeyError as raised:
        RankError.from_error(1, raised).write(errors.path)
    record = RankError.read(errors.path, 1)
    assert record is not None
    assert (record.name, record.text, record.step, record.hint) == ("KeyError", "'lost'", 7, "")
    assert record.trace.startswith("Traceback") and "in loss" in record.trace


@pytest.mark.parametrize("half_line", [b"", b"{", b'{"rank": 0, "na'])
def test_ranks_share_a_file_in_which_half_a_line_hides_no_other_one(half_line: bytes) -> None:
    errors = MemoryFile("errors")
    errors.path.write_bytes(half_line)
    assert RankError.read(errors.path, 1) is None
    for rank in (1, 2):
        RankError.from_error(rank, ValueError(str(rank))).write(errors.path)
    errors.path.open("ab").write(half_line)
    assert [(record := RankError.read(errors.path, rank)) and record.text for rank in range(3)] == [
        None,
        "1",
        "2",
    ]
