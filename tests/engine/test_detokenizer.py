"""The detokenizer: characters come out whole, tokens have their place, and a token costs the same at any length."""

import time

import pytest

from splitserve.engine.detokenizer import IncrementalDetokenizer, PlacedToken, token_string

EURO = "\u20ac".encode()
REPLACEMENT = "\ufffd"


class ByteStrings:
    """A vocabulary of arbitrary byte strings: a token is the index of one. A text that begins with a blank loses it."""

    def __init__(self) -> None:
        self.asked = 0
        self._strings: list[bytes] = []

    def ids(self, *strings: bytes) -> list[int]:
        self._strings += [string for string in dict.fromkeys(strings) if string not in self._strings]
        return [self._strings.index(string) for string in strings]

    def token_bytes(self, token_id: int) -> bytes:
        self.asked += 1
        return self._strings[token_id]

    def first_token_bytes(self, token_id: int) -> bytes:
        return self.token_bytes(token_id).removeprefix(b" ")


def pieces(*strings: bytes, follows: tuple[bytes, ...] = ()) -> list[str]:
    """Of each token its piece, and what the flush gives."""
    decoder = ByteStrings()
    detokenizer = IncrementalDetokenizer(decoder, decoder.ids(*follows))
    return [*(detokenizer.push([token]) for token in decoder.ids(*strings)), detokenizer.flush()]


def placed(*strings: bytes, follows: tuple[bytes, ...] = ()) -> list[PlacedToken]:
    decoder = ByteStrings()
    detokenizer = IncrementalDetokenizer(decoder, decoder.ids(*follows))
    return [detokenizer.place(token) for token in decoder.ids(*strings)]


@pytest.mark.parametrize(
    ("strings", "expected"),
    [
        ([b"a", EURO[:1], EURO[1:2], EURO[2:]], ["a", "", "", "\u20ac", ""]),
        ([b"a", EURO[:2]], ["a", "", REPLACEMENT]),  # cut
        ([EURO[:2], b"a"], ["", REPLACEMENT + "a", ""]),  # never continued
        ([b"\xff", b"\x80", b"a"], [REPLACEMENT, REPLACEMENT, "a", ""]),  # of no character, so nothing to wait for
        ([EURO[:1], b"", EURO[1:], b""], ["", "", "\u20ac", "", ""]),  # special tokens leave a character alone
        ([EURO[2:] + b"a" + EURO[:2], EURO[2:]], [REPLACEMENT + "a", "\u20ac", ""]),
        ([REPLACEMENT.encode()], [REPLACEMENT, ""]),  # a character like others
        ([b" a", b" a"], ["a", " a", ""]),
        ([b"", b" ", b" a"], ["", "", " a", ""]),  # one blank in all
        ([], [""]),
    ],
)
def test_characters_come_out_as_soon_as_they_are_whole(strings: list[bytes], expected: list[str]) -> None:
    assert pieces(*strings) == expected


@pytest.mark.parametrize(
    ("follows", "strings", "expected"),
    [
        ((b"Hello",), [b" world"], [" world", ""]),
        ((b"<s>", b"Hello" * 99) * 99, [b" world"], [" world", ""]),
        ((b"",), [b" world"], ["world", ""]),  # only a special token goes before
        ((b"a" + EURO[:1],), [EURO[1:]], ["\u20ac", ""]),  # the character is whole here
    ],
)
def test_text_goes_on_after_other_text(follows: tuple[bytes, ...], strings: list[bytes], expected: list[str]) -> None:
    assert pieces(*strings, follows=follows) == expected


def test_after_a_flush_another_text_begins() -> None:
    decoder = ByteStrings()
    detokenizer = IncrementalDetokenizer(decoder)
    for _ in range(2):
        assert detokenizer.push(decoder.ids(b" a", EURO[:1])) == "a"
        assert detokenizer.place(decoder.ids(b"b")[0]).text_offset == 2
        assert detokenizer.push(decoder.ids(EURO[:1])) == ""
        assert detokenizer.flush() == REPLACEMENT


@pytest.mark.parametrize(
    ("strings", "tokens", "offsets"),
    [
        ([b" The", b" cat"], ["The", " cat"], [0, 3]),
        ([b"a", b"", b"b"], ["a", "", "b"], [0, 1, 1]),
        ([b"a ", EURO[:2], EURO[2:], b"b"], ["a ", r"bytes:\xe2\x82", r"bytes:\xac", "b"], [0, 2, 2, 3]),
        ([b" a" + EURO[:1], b"", EURO[1:] + b"\n"], [r"bytes:a\xe2", "", r"bytes:\x82\xac\x0a"], [0, 1, 1]),
        ([EURO[:1], b"a", b"b"], [r"bytes:\xe2", "a", "b"], [0, 1, 2]),  # U+FFFD, a, b
        ([EURO[:1], EURO[:1], EURO], [r"bytes:\xe2"] * 2 + ["\u20ac"], [0, 1, 2]),
        ([EURO[:1], b"\xff", b"a"], [r"bytes:\xe2", r"bytes:\xff", "a"], [0, 1, 2]),
    ],
)
def test_a_token_stands_where_its_first_character_begins(
    strings: list[bytes], tokens: list[str], offsets: list[int]
) -> None:
    found = placed(*strings)
    assert [token.token for token in found] == tokens
    assert [token.text_offset for token in found] == offsets
    assert b"".join(token.data for token in found) == b"".join(strings).removeprefix(b" ")


def test_offsets_count_from_the_first_character_given_out() -> None:
    assert [token.text_offset for token in placed(b" cat", EURO, follows=(b"The",))] == [0, 4]
    assert [token.text_offset for token in placed(EURO[1:], b"a", follows=(b"The" + EURO[:1],))] == [0, 1]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ""),
        (b" a\n", " a\n"),
        (EURO, "\u20ac"),
        (b" \xe2\x9c", r"bytes: \xe2\x9c"),
        (b"\xffA\n", r"bytes:\xffA\x0a"),
    ],
)
def test_a_token_can_be_read(data: bytes, expected: str) -> None:
    assert token_string(data) == expected


@pytest.mark.parametrize("data", [b"plain text ", b"\xff\x80", b"\xe2", b"\xed\xa0\x80", EURO, b""])
def test_a_token_is_looked_up_once_and_kept_back_at_most_three_bytes(data: bytes) -> None:
    decoder = ByteStrings()
    ids = decoder.ids(*[data[at : at + 1] for at in range(len(data))], b"\xf0") * (5000 // (len(data) + 1))
    detokenizer = IncrementalDetokenizer(decoder)
    given_out = sum(len(detokenizer.push([token])) for token in ids)
    assert decoder.asked <= len(ids) + 1  # the first is also asked for its blank
    assert len(detokenizer.flush()) <= 3
    assert given_out >= len(ids) // 4 - 1


def test_throughput_is_above_a_hundred_thousand_tokens_per_second() -> None:
    decoder = ByteStrings()
    ids = decoder.ids(*(bytes([byte]) for byte in "the caf\u00e9 ".encode())) * 5000
    detokenizer = IncrementalDetokenizer(decoder)
    start = time.process_time()
    for token in ids:
        detokenizer.push([token])
    assert len(ids) / (time.process_time() - start) > 100_000
