"""Typed reading of a request's fields. Every complaint names the field.

Null counts as absent everywhere. A boolean is no number, a number must be finite, and text must be valid Unicode
(JSON can write half of a surrogate pair, which no tokenizer can encode).
"""

import math
from typing import Any

from splitserve.cluster.api.errors import BadRequest, MissingField


def check_text(value: object, name: str, what: str | None = None) -> str:
    """``value`` as text. ``what`` describes the place where it is not the field ``name`` itself."""
    what = what or f"'{name}'"
    if not isinstance(value, str):
        raise BadRequest(f"{what} must be a string.", name)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"{what} contains half of a surrogate pair, which is not valid Unicode.", name) from None
    return value


def check_token_ids(value: object, name: str, vocab_size: int) -> list[int]:
    """``value`` as a list of token ids in [0, vocab_size)."""
    if not isinstance(value, list):
        raise BadRequest(f"'{name}' must be a list of token ids.", name)
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise BadRequest(f"'{name}' must contain integers only; item {index} is not one.", name)
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"'{name}' contains a token id outside the vocabulary of {vocab_size} at index {index}.", name
            )
    return value


class Fields:
    """The fields of one body. Each is taken once; ``rest`` is what nobody asked for."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise BadRequest("The body must be a JSON object.")
        self._left: dict[str, Any] = {name: value for name, value in body.items() if value is not None}

    @property
    def rest(self) -> dict[str, Any]:
        return self._left

    def take(self, name: str) -> Any:
        """The raw value, None where absent or null."""
        return self._left.pop(name, None)

    def require(self, name: str) -> Any:
        value = self.take(name)
        if value is None:
            raise MissingField(f"'{name}' is required.", name)
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadRequest(f"'{name}' must be true or false.", name)
        return value

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """An integer in [low, high], None where absent."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int:
            raise BadRequest(f"'{name}' must be an integer.", name)
        if value < low or (high is not None and value > high):
            raise BadRequest(
                f"'{name}' must be {f'in [{low}, {high}]' if high is not None else f'at least {low}'}.", name
            )
        return value

    def number(self, name: str, default: float, high: float) -> float:
        """A finite number in [0, high]."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"'{name}' must be a number.", name)
        # An integer too large for a float is compared as the integer it is.
        if (isinstance(value, float) and not math.isfinite(value)) or not 0 <= value <= high:
            raise BadRequest(f"'{name}' must be a finite number in [0, {high:g}].", name)
        return float(value)
