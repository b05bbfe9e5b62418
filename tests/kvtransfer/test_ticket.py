"""Tickets on the wire."""

import contextlib
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kvtransfer.ticket import (
    MAX_ENDPOINT_BYTES,
    MAX_TICKET_BYTES,
    MAX_TICKET_PAGES,
    TICKET_VERSION,
    Ticket,
    TicketError,
    new_ticket_id,
)

MakeTicket = Callable[..., Ticket]


@pytest.mark.parametrize("sealed", [0, 3, 7])
def test_round_trip(make_ticket: MakeTicket, sealed: int) -> None:
    ticket = make_ticket(sealed=sealed)
    assert Ticket.decode(ticket.encode()) == ticket


def test_the_largest_ticket_fits(make_ticket: MakeTicket) -> None:
    end = (1 << 63) - 1
    ticket = make_ticket(
        tokens=4 * MAX_TICKET_PAGES,
        sealed=4 * MAX_TICKET_PAGES,
        page_ids=tuple(range(end - MAX_TICKET_PAGES, end)),
        generations=(end,) * MAX_TICKET_PAGES,
        endpoint=b"e" * MAX_ENDPOINT_BYTES,
    )
    assert Ticket.decode(ticket.encode()) == ticket


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ticket_id", ""),
        ("ticket_id", "x" * 65),
        ("worker", ""),
        ("worker", "x" * 257),
        ("incarnation", -1),
        ("endpoint", b""),
        ("endpoint", b"e" * (MAX_ENDPOINT_BYTES + 1)),
        ("layout", ""),
        ("tokens", -1),
        ("tokens", 1 << 63),
        ("sealed", -1),
        ("sealed", 8),
        ("sealed", 1 << 63),
        ("page_ids", (3, -5)),
        ("page_ids", (3, 3)),
        ("generations", (1,)),
        ("generations", (1, -2)),
        ("lease_s", 0.0),
        ("lease_s", -1.0),
        ("lease_s", float("nan")),
        ("lease_s", float("inf")),
    ],
)
def test_impossible_values_are_refused_on_both_ends(make_ticket: MakeTicket, field: str, value: object) -> None:
    ticket = make_ticket(**{field: value})
    with pytest.raises(TicketError) as sent:
        ticket.encode()
    with pytest.raises(TicketError) as received:
        Ticket.decode(msgspec.msgpack.encode(ticket))
    assert sent.value.field == received.value.field == field


def test_too_many_pages(make_ticket: MakeTicket) -> None:
    pages = tuple(range(MAX_TICKET_PAGES + 1))
    with pytest.raises(TicketError, match="page_ids"):
        make_ticket(page_ids=pages, generations=pages).encode()


@pytest.mark.parametrize("field", ["worker", "tokens", "sealed", "page_ids", "endpoint"])
def test_a_wrong_type_or_a_missing_field_is_named(make_ticket: MakeTicket, field: str) -> None:
    fields = msgspec.to_builtins(make_ticket(), builtin_types=(bytes,))
    for broken in (fields | {field: [{"a": 1}]}, {k: v for k, v in fields.items() if k != field}):
        with pytest.raises(TicketError) as error:
            Ticket.decode(msgspec.msgpack.encode(broken))
        assert error.value.field == field


@pytest.mark.parametrize("version", [TICKET_VERSION - 1, TICKET_VERSION + 1])
def test_another_version_is_refused_before_the_rest_is_read(version: int) -> None:
    with pytest.raises(TicketError) as error:
        Ticket.decode(msgspec.msgpack.encode({"version": version, "novel": True}))
    assert error.value.field == "version"


def test_unknown_fields_are_refused(make_ticket: MakeTicket) -> None:
    fields = msgspec.to_builtins(make_ticket(), builtin_types=(bytes,))
    with pytest.raises(TicketError, match="novel"):
        Ticket.decode(msgspec.msgpack.encode(fields | {"novel": 1}))


def test_size_is_checked_before_decoding() -> None:
    with pytest.raises(TicketError, match="exceed"):
        Ticket.decode(bytes(MAX_TICKET_BYTES + 1))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(TicketError):
        Ticket.decode(data)


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=3))
def test_damaged_tickets_raise_nothing_else(position: int, damage: bytes) -> None:
    data = bytearray(
        Ticket(
            ticket_id="t",
            worker="w",
            incarnation=1,
            endpoint=b"e",
            layout="f",
            tokens=7,
            sealed=4,
            page_ids=(3, 5),
            generations=(1, 2),
            lease_s=1.0,
        ).encode()
    )
    position %= len(data)
    data[position : position + len(damage)] = damage
    with contextlib.suppress(TicketError):
        Ticket.decode(bytes(data))


def test_b016_ids_are_made_by_the_system_and_differ() -> None:
    ids = {new_ticket_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(ticket_id) for ticket_id in ids} == {32}


def test_deep_nesting_is_a_ticket_error() -> None:
    deep = b"\x81\xa1x" * 100_000 + b"\xc0"
    with pytest.raises(TicketError, match="nested"):
        Ticket.decode(deep[:4000])
