"""Notices on the wire."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kvtransfer.notice import MAX_NOTICE_BYTES, Notice, NoticeError, NoticeKind
from splitserve.kvtransfer.ticket import MAX_ENDPOINT_BYTES, MAX_TICKET_ID_CHARS


@pytest.mark.parametrize(
    "notice",
    [
        Notice(NoticeKind.CLAIMED, "t", endpoint=b"e"),
        Notice(NoticeKind.FETCHED, "t"),
        Notice(NoticeKind.REFUSED, "t"),
        Notice(NoticeKind.SEALED, "t", tokens=0),
        Notice(NoticeKind.SEALED, "t", tokens=(1 << 63) - 1),
        Notice(NoticeKind.REVOKED, "t"),
        Notice(NoticeKind.CLAIMED, "\U0001f600" * MAX_TICKET_ID_CHARS, (1 << 63) - 1, b"e" * MAX_ENDPOINT_BYTES),
    ],
    ids=lambda notice: f"{notice.kind}-{len(notice.ticket_id)}-{notice.tokens}",
)
def test_round_trip(notice: Notice) -> None:
    assert Notice.decode(notice.encode()) == notice


@pytest.mark.parametrize(
    "notice",
    [
        Notice(NoticeKind.CLAIMED, "t"),
        Notice(NoticeKind.FETCHED, "t", endpoint=b"e"),
        Notice(NoticeKind.SEALED, "t", tokens=-1),
        Notice(NoticeKind.FETCHED, ""),
        Notice(NoticeKind.FETCHED, "x" * (MAX_TICKET_ID_CHARS + 1)),
        Notice(NoticeKind.CLAIMED, "t", endpoint=b"e" * (MAX_ENDPOINT_BYTES + 1)),
    ],
    ids=["claimed by nobody", "endpoint", "tokens", "no id", "long id", "long endpoint"],
)
def test_impossible_values_are_refused(notice: Notice) -> None:
    with pytest.raises(NoticeError):
        Notice.decode(notice.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x92\xa3abc\xa1t",
        b"\x92\xa7fetched\xa1\xff",
        b"\x95\xa7fetched\xa1t\x00\xc4\x00\x00",
        b"\x91" * 10_000,
        bytes(MAX_NOTICE_BYTES + 1),
    ],
    ids=["empty", "no msgpack", "no field", "kind", "text", "one field more", "nested", "size"],
)
def test_what_is_no_notice_is_refused(data: bytes) -> None:
    with pytest.raises(NoticeError):
        Notice.decode(data)


@given(st.binary(max_size=60), st.integers(0, 60))
def test_no_bytes_raise_anything_else(damage: bytes, position: int) -> None:
    whole = bytearray(Notice(NoticeKind.CLAIMED, "t1", 3, b"endpoint").encode())
    for data in (damage, bytes(whole[:position]) + damage + bytes(whole[position + len(damage) :])):
        with contextlib.suppress(NoticeError):
            Notice.decode(data)
