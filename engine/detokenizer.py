"""Text from tokens that arrive one by one."""

from collections.abc import Iterable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_CHARACTER_TOKENS = 4  # a character is at most four bytes, and a token at least one


class Decoder(Protocol):
    """The part of ``Tokenizer`` that is needed here."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class IncrementalDetokenizer:
    """Turns a stream of tokens into pieces of text that, joined, are ``decode`` of all tokens.

    Only a window of the last tokens is decoded at each step, so that a token costs the same at any length:

    - ``context``, whose text is out. It is there because decoders treat the first token of a text differently.
    - ``pending``, of whose text ``sent`` characters are out. It holds more than one token while a character is
      incomplete, which shows as U+FFFD at the end of the decoded text.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decode = decoder.decode
        self._special = decoder.special_token_ids
        self._context: list[int] = []
        self._context_characters = 0
        self._pending: list[int] = []
        self._sent = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Take more tokens; the text they complete. The first bytes of a character stay back until it is whole."""
        return "".join(self._push_one(token) for token in token_ids if token not in self._special)

    def flush(self) -> str:
        """The tokens are over: what was held back, U+FFFD for an incomplete character. Ready for another sequence
        afterwards.
        """
        text = self._text()[self._sent :]
        self._restart([], [])
        return text

    def _push_one(self, token: int) -> str:
        self._pending.append(token)
        text = self._text()
        if not text.endswith(_REPLACEMENT):
            piece = text[self._sent :]
            self._restart(self._pending, [])
            return piece
        if len(self._pending) <= _CHARACTER_TOKENS:
            return ""
        # Characters that overlap token borders again and again, or bytes that are no text: only the last one can still
        # change.
        final = max(self._sent, len(text) - 1)
        piece = text[self._sent : final]
        self._sent = final
        self._shorten()
        return piece

    def _text(self) -> str:
        """Text of ``pending``."""
        if not self._context:
            return self._decode(self._pending)
        return self._decode(self._context + self._pending)[self._context_characters :]

    def _shorten(self) -> None:
        """Drop leading tokens of the window where its text falls into two independent parts."""
        window = self._context + self._pending
        whole = self._decode(window)
        for cut in range(len(window) - 1, max(0, len(window) - 1 - _CHARACTER_TOKENS), -1):
            rest = self._decode(window[cut:])
            if self._decode(window[:cut]) + rest == whole:
                self._restart([], window[cut:])
                self._sent = max(0, len(rest) - 1)
                return

    def _restart(self, context: list[int], pending: list[int]) -> None:
        self._context = context
        self._context_characters = len(self._decode(context)) if context else 0
        self._pending = pending
        self._sent = 0
