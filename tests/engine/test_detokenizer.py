"""The detokenizer: pieces joined are the whole decoded text, for text, for bytes that are no text, at any length."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from splitserve.engine.detokenizer import IncrementalDetokenizer

SPECIAL = 0


class Pieces:
    """The byte-level decoder over every single byte and a few pieces that begin or end inside a character."""

    def __init__(self) -> None:
        straddling = [
            "\u201c".encode()[:2],
            b" " + "\u201c".encode()[:1],
            "\u201c".encode()[1:] + "\u20ac".encode()[:2],
        ]
        straddling += ["\U0001f600".encode()[:3], "\U0001f600".encode()[3:] + b"a", b" the", "\u00e9".encode()]
        pieces = ["<s>", *sorted(ByteLevel.alphabet()), *("".join(map(spelled, piece)) for piece in straddling)]
        self.backend = Backend(BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[]))
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens(["<s>"])
        self.special_token_ids = frozenset([SPECIAL])
        self.tokens = range(len(pieces))
        self.calls = 0
        self.decoded_tokens = 0

    def decode(self, ids: list[int]) -> str:
        self.calls += 1
        self.decoded_tokens += len(ids)
        return self.backend.decode(ids, skip_special_tokens=True)

    def of_bytes(self, data: bytes) -> list[int]:
        return [self.backend.token_to_id(spelled(byte)) for byte in data]


def spelled(byte: int) -> str:
    """The byte-level alphabet's letter for a byte: itself where it prints, else the next letter from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + sorted(set(range(256)) - set(printable)).index(byte))


class ByteFallback:
    """A decoder of the SentencePiece kind: a leading space is dropped, bytes that are no text become U+FFFD each."""

    def __init__(self) -> None:
        pieces = ["\u2581the", "\u2581", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
        self.backend = Backend(BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[]))
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        self.backend.decoder = decoders.Sequence(steps)
        self.special_token_ids: frozenset[int] = frozenset()

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids)

    def of_bytes(self, data: bytes) -> list[int]:
        return [3 + byte for byte in data]


PIECES = Pieces()
tokens = st.lists(st.sampled_from(PIECES.tokens), max_size=40)
text = st.text(alphabet="a \u00e9\u20ac\U0001f600", max_size=20)


@given(tokens, st.integers(1, 5))
def test_joined_pieces_are_the_decoded_whole(ids: list[int], step: int) -> None:
    detokenizer = IncrementalDetokenizer(PIECES)
    pieces = [detokenizer.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    assert "".join([*pieces, detokenizer.flush()]) == PIECES.decode(ids)


@given(text)
def test_no_replacement_character_appears_in_the_middle_of_text(whole: str) -> None:
    for decoder in (PIECES, ByteFallback()):
        detokenizer = IncrementalDetokenizer(decoder)
        seen = ""
        for token in decoder.of_bytes(("a" + whole).encode()):
            seen += detokenizer.push([token])
            assert ("a" + whole).startswith(seen)
        assert seen + detokenizer.flush() == "a" + whole


def test_spaces_of_a_sentencepiece_decoder_survive_the_window() -> None:
    decoder = ByteFallback()
    ids = [0, 2, 0, 1, 0, *decoder.of_bytes("\u20ac".encode()), 0, 1, 2]
    detokenizer = IncrementalDetokenizer(decoder)
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == decoder.decode(ids)
    assert pieces[:3] == ["the", "a", " the"]


def test_an_incomplete_character_is_held_back_and_flushed_as_replacement() -> None:
    detokenizer = IncrementalDetokenizer(PIECES)
    assert detokenizer.push(PIECES.of_bytes(b"a\xe2\x82")) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(PIECES.of_bytes(b"b")) == "b"


def test_special_tokens_are_skipped_even_within_a_character() -> None:
    first, *rest = PIECES.of_bytes("\u20ac".encode())
    detokenizer = IncrementalDetokenizer(PIECES)
    assert detokenizer.push([SPECIAL, first, SPECIAL, *rest, SPECIAL]) == "\u20ac"


@pytest.mark.parametrize(
    "data", [b"plain text ", b"\xff\x80", "\u20ac".encode()], ids=["text", "no text", "multi-byte"]
)
def test_the_window_stays_bounded(data: bytes) -> None:
    decoder = Pieces()
    detokenizer = IncrementalDetokenizer(decoder)
    ids = decoder.of_bytes(data) * 300
    for token in ids:
        detokenizer.push([token])
    assert decoder.decoded_tokens < 80 * len(ids)


def test_throughput_is_above_ten_thousand_tokens_per_second() -> None:
    ids = PIECES.of_bytes("the caf\u00e9 ".encode()) * 500
    detokenizer = IncrementalDetokenizer(PIECES)
    start = time.process_time()
    for token in ids:
        detokenizer.push([token])
    assert len(ids) / (time.process_time() - start) > 10_000
