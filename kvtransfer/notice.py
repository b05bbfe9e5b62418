"""What a receiver tells a sender about a ticket: a few bytes over the transport."""

from enum import StrEnum

import msgspec

MAX_NOTICE_BYTES = 256


class NoticeKind(StrEnum):
    """How the receiver's side of a ticket ended. Either way the sender's pages are no longer needed."""

    FETCHED = "fetched"  # the pages are there and verified, or none was needed
    REFUSED = "refused"  # the receiver gave the ticket up


class NoticeError(ValueError):
    """Bytes that are no notice."""


class Notice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``[kind, ticket_id]`` as msgpack."""

    kind: NoticeKind
    ticket_id: str

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Notice":
        """Raises NoticeError for anything but a notice of at most MAX_NOTICE_BYTES."""
        if len(data) > MAX_NOTICE_BYTES:
            raise NoticeError(f"{len(data)} bytes exceed {MAX_NOTICE_BYTES}")
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NoticeError(str(error)) from error
