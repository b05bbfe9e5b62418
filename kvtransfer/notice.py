"""What the two sides of a ticket tell each other: a few bytes over the transport."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from splitserve.kvtransfer.ticket import MAX_ENDPOINT_BYTES, MAX_TICKET_ID_CHARS

MAX_NOTICE_BYTES = MAX_ENDPOINT_BYTES + 4 * MAX_TICKET_ID_CHARS + 64  # UTF-8, and what msgpack adds


class NoticeKind(StrEnum):
    """What happened on the side that sends it."""

    # receiver to sender
    CLAIMED = "claimed"  # the pages are wanted, and ``endpoint`` is where to say what is sealed; renews the lease
    FETCHED = "fetched"  # the pages are there and verified, or none was needed
    REFUSED = "refused"  # the receiver gave the ticket up
    # sender to receiver
    SEALED = "sealed"  # positions [0, ``tokens``) are final and can be read
    REVOKED = "revoked"  # the lease has ended, the pages may be reused


class NoticeError(ValueError):
    """Bytes that are no notice."""


class Notice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, omit_defaults=True):
    """``[kind, ticket_id, tokens, endpoint]`` as msgpack."""

    kind: NoticeKind
    ticket_id: Annotated[str, Meta(min_length=1, max_length=MAX_TICKET_ID_CHARS)]
    tokens: Annotated[int, Meta(ge=0)] = 0  # with SEALED
    endpoint: Annotated[bytes, Meta(max_length=MAX_ENDPOINT_BYTES)] = b""  # with CLAIMED: of the receiver's transport

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Notice":
        """Raises NoticeError for anything but a notice of at most MAX_NOTICE_BYTES."""
        if len(data) > MAX_NOTICE_BYTES:
            raise NoticeError(f"{len(data)} bytes exceed {MAX_NOTICE_BYTES}")
        try:
            notice = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NoticeError(str(error)) from error
        if (notice.kind is NoticeKind.CLAIMED) != bool(notice.endpoint):
            raise NoticeError(f"endpoint: {len(notice.endpoint)} bytes with {notice.kind}")
        return notice
