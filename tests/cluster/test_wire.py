"""Frames: what goes in comes out, and anything else is a WireError."""

import asyncio

import msgspec
import pytest
from feed_fakes.reports import report
from hypothesis import given
from hypothesis import strategies as st

from splitserve.cluster import wire
from splitserve.cluster.wire import (
    Abort,
    Command,
    Decode,
    Hello,
    Prefill,
    Proceed,
    WireError,
    frame,
    read_command,
    read_report,
)
from splitserve.engine.protocol import (
    Counted,
    FinishReason,
    Load,
    PageHash,
    Request,
    RequestId,
    Role,
    SamplingParams,
    SequenceUpdate,
    StepReport,
    TransferRecord,
    WorkerId,
)

REQUEST = Request(
    RequestId("r"),
    (0, 49151, 7),
    (PageHash(b"\xff" * 16),),
    SamplingParams(max_tokens=3, temperature=0.5, top_p=0.9, seed=(1 << 64) - 1, stop_token_ids=(2,), ignore_eos=True),
)
COMMANDS = [
    Hello("gateway", "token"),
    Hello("gäteway", "tökén"),
    Prefill(REQUEST),
    Decode(REQUEST, None),
    Decode(REQUEST, b"\x00\xff ticket"),
    Decode(REQUEST, b"ticket", awaiting=True),
    Proceed(REQUEST),
    Abort(RequestId("r")),
]
REPORTS = [
    report(),
    report(
        number=12,
        facts=None,
        role=Role.DECODE,
        updates=[
            SequenceUpdate(RequestId("a"), [1, 2], cached_tokens=16),
            SequenceUpdate(RequestId("b"), [3], FinishReason.HANDED_OVER, ticket=b"\x00"),
            SequenceUpdate(RequestId("e"), [], ticket=b"early"),
            SequenceUpdate(RequestId("f"), [4], transfer=TransferRecord(WorkerId("p"), 3, 99, 1, 2, 0.5, 0.1, None)),
            SequenceUpdate(RequestId("c"), [], FinishReason.ERROR, error="why"),
        ],
        stored=[PageHash(b"\x00" * 16)],
        removed=[PageHash(b"\xff" * 16)],
        load=Load(1, 2, 3, 4, 5, 6, 15),
        counters=[Counted("x_total", 1.5, {"cause": "torn"})],
    ),
]
DEEP = msgspec.msgpack.encode({"type": "Abort", "request_id": "r"}).replace(b"\x82", b"\x83") + b"\xa1x"
DEEP += b"\x91" * 100_000 + b"\xc0"  # an unknown field that is skipped, nested too deep for any stack


def stream(data: bytes, end: bool = True) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    if end:
        reader.feed_eof()
    return reader


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


async def test_commands_arrive_as_they_were_sent_one_after_the_other() -> None:
    reader = stream(b"".join(map(frame, COMMANDS)))
    assert [await read_command(reader) for _ in COMMANDS] == COMMANDS


async def test_reports_arrive_as_they_were_sent() -> None:
    reader = stream(b"".join(map(frame, REPORTS)))
    assert [await read_report(reader) for _ in REPORTS] == REPORTS


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
        pytest.param(frame(Hello("g", "t"))[4:-1], id="truncated"),
        pytest.param(frame(Hello("g", "t"))[4:] + b"\xc0", id="too much"),
        pytest.param(msgspec.msgpack.encode({"type": "Shutdown"}), id="unknown command"),
        pytest.param(msgspec.msgpack.encode({"type": "Hello", "gateway": "g"}), id="missing field"),
        pytest.param(msgspec.msgpack.encode({"type": "Hello", "gateway": 1, "token": "t"}), id="wrong type"),
        pytest.param(
            msgspec.msgpack.encode({"type": "Abort", "request_id": "??"}).replace(b"??", b"\xff\xff"), id="utf8"
        ),
        pytest.param(b"\x81\xa2\xff\xff\xc0", id="utf8 key"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="a length beyond the end"),
        pytest.param(DEEP, id="nested deeply"),
        pytest.param(b"\x80\x04\x95.", id="pickle"),
    ],
)
async def test_garbage_is_a_wire_error_for_both_readers(body: bytes) -> None:
    for read in (read_command, read_report):
        with pytest.raises(WireError, match="not a valid frame"):
            await read(stream(framed(body)))


async def test_a_message_of_the_other_direction_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        await read_command(stream(frame(REPORTS[0])))
    with pytest.raises(WireError):
        await read_report(stream(frame(COMMANDS[0])))


@pytest.mark.parametrize(
    ("read", "limit"), [(read_command, wire.MAX_COMMAND_BYTES), (read_report, wire.MAX_REPORT_BYTES)]
)
async def test_a_length_above_the_limit_is_refused_before_anything_of_it_is_read(read, limit) -> None:
    reader = stream((limit + 1).to_bytes(4, "big") + b"rest", end=False)
    with pytest.raises(WireError, match=f"{limit + 1} bytes exceeds the limit of {limit}"):
        await read(reader)
    assert await reader.readexactly(4) == b"rest"


async def test_a_frame_of_exactly_the_limit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = frame(Abort(RequestId("r" * 50)))
    monkeypatch.setattr(wire, "MAX_COMMAND_BYTES", len(sent) - 4)
    assert await read_command(stream(sent)) == Abort(RequestId("r" * 50))
    monkeypatch.setattr(wire, "MAX_COMMAND_BYTES", len(sent) - 5)
    with pytest.raises(WireError):
        await read_command(stream(sent))


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, -1])
async def test_an_end_in_the_middle_is_an_incomplete_read(cut: int) -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        await read_command(stream(frame(COMMANDS[2])[:cut]))


def outcome(read, body: bytes) -> Command | StepReport | WireError:
    """What comes of one frame; any other exception fails the test."""

    async def attempt() -> Command | StepReport | WireError:
        try:
            return await read(stream(framed(body)))
        except WireError as error:
            return error

    return asyncio.run(attempt())


@given(body=st.binary(max_size=200))
def test_random_bytes_are_only_ever_a_wire_error(body: bytes) -> None:
    assert isinstance(outcome(read_command, body), Command | WireError)
    assert isinstance(outcome(read_report, body), StepReport | WireError)


@given(data=st.data())
def test_damaged_frames_are_a_message_or_a_wire_error(data: st.DataObject) -> None:
    """Flipped, dropped and doubled bytes in frames that were valid."""
    message = data.draw(st.sampled_from(COMMANDS + REPORTS))
    body = bytearray(frame(message)[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(body)))
        stop = data.draw(st.integers(start, min(len(body), start + 3)))
        body[start:stop] = data.draw(st.binary(max_size=3))
    assert isinstance(outcome(read_command, bytes(body)), Command | WireError)
    assert isinstance(outcome(read_report, bytes(body)), StepReport | WireError)
