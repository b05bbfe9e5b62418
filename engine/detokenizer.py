"""Text from tokens that arrive one by one."""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_CONTEXT_TOKENS = 16  # of what went before; the bytes of a character that they leave open are at most the last three


class Decoder(Protocol):
    """The part of ``Tokenizer`` that is needed here."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def first_token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and its place in the text. Joined ``data`` is the text in UTF-8; joined ``text`` is the text."""

    data: bytes
    text: str  # what the token completes; like ``push``
    text_offset: int  # in characters: where the character that its first byte belongs to begins

    @property
    def token(self) -> str:
        """``token_string``. Where that is text, the whole text has it at ``text_offset``."""
        return token_string(self.data)


def token_string(data: bytes) -> str:
    r"""A token's bytes to read: the text, or of bytes that are not whole characters ``bytes:\xe2\x9c``, with ASCII as
    it is.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)


class IncrementalDetokenizer:
    """Turns a stream of tokens into pieces of text that, joined, are the tokens' bytes read as UTF-8.

    A character comes out with the token that completes it, so how tokens are grouped into calls changes nothing. Bytes
    that can't be of a character become U+FFFD, one for each longest piece that could have begun one (The Unicode
    Standard, section 3.9, "U+FFFD Substitution of Maximal Subparts").
    """

    def __init__(self, decoder: Decoder, follows: Sequence[int] = ()) -> None:
        """``follows`` are tokens whose text goes before and isn't given out; without any, the text begins here."""
        self._decoder = decoder
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_begun = False
        self._length = 0  # characters given out
        self.push(follows[-_CONTEXT_TOKENS:])
        self._length = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Take more tokens; the text they complete. The first bytes of a character stay back until it is whole."""
        return self._read(b"".join(map(self._bytes, token_ids)))

    def place(self, token_id: int) -> PlacedToken:
        """Take one more token; like ``push``, with what reports of single tokens need."""
        data = self._bytes(token_id)
        text = self._read(data[:1])
        # The character of the first byte is now either the last one given out or the one that is open.
        text_offset = self._length if self._is_open() or not data else self._length - 1
        return PlacedToken(data, text + self._read(data[1:]), text_offset)

    def flush(self) -> str:
        """The tokens are over: U+FFFD for a character that is incomplete. Ready for another text afterwards."""
        text = self._characters.decode(b"", final=True)
        self._characters.reset()
        self._has_begun = False
        self._length = 0
        return text

    def _bytes(self, token_id: int) -> bytes:
        if self._has_begun:
            return self._decoder.token_bytes(token_id)
        self._has_begun = bool(self._decoder.token_bytes(token_id))
        return self._decoder.first_token_bytes(token_id)

    def _read(self, data: bytes) -> str:
        text = self._characters.decode(data)
        self._length += len(text)
        return text

    def _is_open(self) -> bool:
        return bool(self._characters.getstate()[0])
