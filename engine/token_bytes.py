"""The bytes that a token stands for in text."""

from typing import Any

from splitserve.engine.weights.errors import ModelLoadError

_EURO_OF_LETTERS = ["\u00e2\u0124\u00ac"]  # the three bytes of the euro sign as a byte-level vocabulary spells them
_EURO_OF_BYTE_TOKENS = ["<0xE2>", "<0x82>", "<0xAC>"]
_SENTENCE = " Two words,\n  na\u00efve: \u20ac1 \U0001f600."


class TokenBytes:
    """For each token of a vocabulary the bytes it adds to a text.

    A text is the bytes of its tokens, joined and read as UTF-8. Decoders treat the token that a text begins with
    differently (most drop its space), so it is asked for separately. Special tokens and ids outside the vocabulary
    have no bytes. Safe to call from several threads.
    """

    def __init__(self, backend: Any, special_token_ids: frozenset[int]) -> None:
        """``backend`` is a ``tokenizers.Tokenizer``. Raises ModelLoadError where its texts are not their tokens' bytes
        joined, as with decoders that look ahead.
        """
        self._backend = backend
        self._special = special_token_ids
        self._added: dict[int, str] = {
            token: added.content for token, added in backend.get_added_tokens_decoder().items()
        }
        self._letters = _letter_bytes() if _decodes(backend, _EURO_OF_LETTERS) else {}
        self._has_byte_tokens = _decodes(backend, _EURO_OF_BYTE_TOKENS)
        self._within: dict[int, bytes] = {}  # filled as tokens are met
        self._check()

    def within(self, token_id: int) -> bytes:
        """Bytes of a token that comes after others. Need not be whole characters."""
        data = self._within.get(token_id)
        if data is None:
            data = self._within[token_id] = self._find(token_id)
        return data

    def first(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text: ``within``, mostly without the space that begins it."""
        data = self.within(token_id)
        if self._is_literal(token_id) or not _is_text(data):
            return data
        return self._decode([token_id]).encode()

    def _find(self, token_id: int) -> bytes:
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None or token_id in self._special:
            return b""
        if self._is_literal(token_id):
            return self._added[token_id].encode()
        if self._letters:
            known = all(letter in self._letters for letter in piece)
            return bytes(self._letters[letter] for letter in piece) if known else piece.encode()
        if self._has_byte_tokens and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        # What the second of two equal tokens adds: it is no longer at the beginning.
        return self._decode([token_id, token_id])[len(self._decode([token_id])) :].encode()

    def _is_literal(self, token_id: int) -> bool:
        """Added to a byte-level vocabulary: spelled as in text, not in letters for bytes."""
        return bool(self._letters) and token_id in self._added and token_id not in self._special

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def _check(self) -> None:
        ids = self._backend.encode(_SENTENCE, add_special_tokens=False).ids
        ids = [token_id for token_id in ids if self.within(token_id)]
        data = b"".join([*map(self.first, ids[:1]), *map(self.within, ids[1:])])
        if data.decode(errors="replace") != self._decode(ids):
            raise ModelLoadError(
                f"the tokenizer's decoder {self._backend.decoder!r} gives tokens no text of their own, "
                "so answers cannot be streamed"
            )


def _decodes(backend: Any, pieces: list[str]) -> bool:
    return backend.decoder is not None and backend.decoder.decode(pieces) == "\u20ac"


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _letter_bytes() -> dict[str, int]:
    """The letters in which byte-level vocabularies spell bytes: a byte that prints in Latin-1 is its own letter, the
    others follow from U+0100 on. Source: ``bytes_to_unicode`` of GPT-2's encoder.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
