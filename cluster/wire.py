"""What gateway and worker say to each other: length-prefixed msgpack frames with a fixed schema, over one TCP
connection.

The gateway begins with ``Hello`` and then sends legs and aborts; the worker sends ``StepReport`` frames, the feed. A
connection is known by the token in its ``Hello``, which a gateway gets from the worker by a call through Serve.
"""

import asyncio
from typing import TypeVar

import msgspec

from splitserve.engine.protocol import Request, RequestId, StepReport

T = TypeVar("T")

MAX_HELLO_BYTES = 4 << 10  # its sender is a stranger yet, and must not cost much memory
MAX_COMMAND_BYTES = 16 << 20
MAX_REPORT_BYTES = 64 << 20
LENGTH_BYTES = 4


class WireError(ConnectionError):
    """The peer sent something that is not what it should be."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame: who is there, and the proof that it may."""

    gateway: str
    token: str


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute the prompt and the first token, then offer the pages by a ticket."""

    request: Request


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Compute all tokens, on the pages of the ticket if there is one. ``awaiting``: the prompt's first token is still
    to come from whoever gave the ticket; fetch the pages, and wait for ``Proceed``.
    """

    request: Request
    ticket: bytes | None
    awaiting: bool = False


class Proceed(msgspec.Struct, frozen=True, tag=True):
    """Go on with an awaiting request: as ``request``, which has its id, its prompt and the tokens after it."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End what there is of a request: a leg, or the lease of one that was handed over."""

    request_id: RequestId


LegCommand = Prefill | Decode | Proceed | Abort
Command = Hello | LegCommand


class WorkerEndpoint(msgspec.Struct, frozen=True):
    """Where a worker listens, as it answers through Serve."""

    worker: str
    host: str
    port: int
    token: str


_encoder = msgspec.msgpack.Encoder()
_command = msgspec.msgpack.Decoder(Command)
_report = msgspec.msgpack.Decoder(StepReport)


def frame(message: Command | StepReport) -> bytes:
    """The message as it goes over the wire."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_hello(reader: asyncio.StreamReader) -> Command:
    """The first frame, which is a short one. Raises like ``read_command``."""
    return _decode(_command, await _read_body(reader, MAX_HELLO_BYTES))


async def read_command(reader: asyncio.StreamReader) -> Command:
    """Raises WireError, or IncompleteReadError when the gateway has gone."""
    return _decode(_command, await _read_body(reader, MAX_COMMAND_BYTES))


async def read_report(reader: asyncio.StreamReader) -> StepReport:
    """Raises WireError, or IncompleteReadError when the worker has gone."""
    return _decode(_report, await _read_body(reader, MAX_REPORT_BYTES))


async def _read_body(reader: asyncio.StreamReader, limit: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > limit:
        raise WireError(f"a frame of {length} bytes exceeds the limit of {limit}")
    return await reader.readexactly(length)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a valid frame: {error}") from error
