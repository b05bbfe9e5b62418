"""The hand-over of a sequence's pages, as it crosses from the sender to the receiver."""

import math
import re
import secrets
from collections.abc import Sequence

import msgspec

TICKET_VERSION = 2
MAX_TICKET_BYTES = 2 << 20
MAX_ENDPOINT_BYTES = 64 << 10
MAX_TICKET_PAGES = 1 << 16
MAX_TICKET_ID_CHARS = 64
MAX_WORKER_CHARS = 256
MAX_FINGERPRINT_CHARS = 64
MAX_LEASE_S = 24 * 3600.0
_INT64_END = 1 << 63


class TicketError(ValueError):
    """A ticket that cannot be used. ``field`` names the culprit ("ticket" when it is not a ticket at all)."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the keys and values of positions [0, ``tokens``) lie, and how long they stay there.

    ``page_ids[i]`` is the sender's page at absolute page index ``i``; ``generations[i]`` is the generation that page
    must have for its content to be what the ticket promises. Both have ceil(tokens / page_tokens) entries.
    """

    version: int = TICKET_VERSION
    ticket_id: str  # opaque and unguessable, made by the sender; never a client's id
    worker: str  # the sender
    incarnation: int  # of the sender
    endpoint: bytes  # of the sender's transport
    layout: str  # PageLayout.fingerprint
    tokens: int
    sealed: int  # positions [0, sealed) were final when this was written; ``tokens`` once the pages are complete
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]
    lease_s: float  # from the moment of issue; no clock crosses between workers

    def check(self) -> None:
        """Raises TicketError for the first field whose value no ticket may have."""
        _check(self)

    def encode(self) -> bytes:
        """As msgpack. Raises TicketError where ``decode`` would."""
        self.check()
        data = msgspec.msgpack.encode(self)
        _check_size(data)
        return data

    @classmethod
    def decode(cls, data: bytes) -> "Ticket":
        """Read an encoded ticket of any origin. Raises TicketError, and nothing else, for what is not a valid one."""
        _check_size(data)
        try:
            version = msgspec.msgpack.decode(data, type=_Versioned).version
            if version != TICKET_VERSION:
                raise TicketError("version", f"{TICKET_VERSION} here, {version} there")
            ticket = msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise TicketError(_field_of(str(error)), str(error)) from error
        except UnicodeDecodeError as error:
            raise TicketError("ticket", "holds text that is not UTF-8") from error
        except RecursionError as error:
            raise TicketError("ticket", "is nested too deeply") from error
        ticket.check()
        return ticket


class _Versioned(msgspec.Struct):
    version: int


def new_ticket_id() -> str:
    """128 random bits in hexadecimal."""
    return secrets.token_hex(16)


def _field_of(message: str) -> str:
    found = re.search(r"`\$\.(\w+)|field `(\w+)`", message)
    return next(name for name in found.groups() if name) if found else "ticket"


def _check_size(data: bytes) -> None:
    if len(data) > MAX_TICKET_BYTES:
        raise TicketError("ticket", f"{len(data)} bytes exceed {MAX_TICKET_BYTES}")


def _check(ticket: Ticket) -> None:
    _check_text("ticket_id", ticket.ticket_id, MAX_TICKET_ID_CHARS)
    _check_text("worker", ticket.worker, MAX_WORKER_CHARS)
    _check_text("layout", ticket.layout, MAX_FINGERPRINT_CHARS)
    if not 1 <= len(ticket.endpoint) <= MAX_ENDPOINT_BYTES:
        raise TicketError("endpoint", f"{len(ticket.endpoint)} bytes, allowed are 1 to {MAX_ENDPOINT_BYTES}")
    if len(ticket.page_ids) > MAX_TICKET_PAGES:
        raise TicketError("page_ids", f"{len(ticket.page_ids)} pages exceed {MAX_TICKET_PAGES}")
    if len(ticket.generations) != len(ticket.page_ids):
        raise TicketError("generations", f"{len(ticket.generations)} for {len(ticket.page_ids)} pages")
    _check_words("incarnation", (ticket.incarnation,))
    _check_words("tokens", (ticket.tokens,))
    if not 0 <= ticket.sealed <= ticket.tokens:
        raise TicketError("sealed", f"{ticket.sealed} is outside [0, {ticket.tokens}]")
    _check_words("page_ids", ticket.page_ids)
    _check_words("generations", ticket.generations)
    if len(set(ticket.page_ids)) != len(ticket.page_ids):
        raise TicketError("page_ids", "a page appears twice")
    if not (math.isfinite(ticket.lease_s) and 0 < ticket.lease_s <= MAX_LEASE_S):
        raise TicketError("lease_s", f"{ticket.lease_s} is outside (0, {MAX_LEASE_S}]")


def _check_text(field: str, text: str, max_chars: int) -> None:
    if not 1 <= len(text) <= max_chars:
        raise TicketError(field, f"{len(text)} characters, allowed are 1 to {max_chars}")


def _check_words(field: str, words: Sequence[int]) -> None:
    if any(not 0 <= word < _INT64_END for word in words):
        raise TicketError(field, "a value is negative or above 63 bits")
