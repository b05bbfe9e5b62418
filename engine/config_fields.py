"""Typed access to a model's configuration as it came from a file; every error names the field."""

from collections.abc import Mapping
from typing import Any

from splitserve.engine.weights.errors import ModelLoadError


class ConfigFields:
    """A dict of unknown content. A field that is absent or null takes the caller's default; without one it is an error.

    All methods raise ModelLoadError.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def integer(self, name: str, default: int | None = None) -> int:
        return self._integer(name, self._get(name, default))

    def number(self, name: str, default: float | None = None) -> float:
        return self._number(name, self._get(name, default))

    def integer_up_to(self, name: str, most: int) -> int:
        value = self.integer(name)
        if value > most:
            raise ModelLoadError(f"{self._where}: {name} must be at most {most}, got {value}")
        return value

    def positive(self, name: str) -> float:
        value = self.number(name)
        if not value > 0:
            raise ModelLoadError(f"{self._where}: {name} must be positive, got {value}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self._where}: {name} must be true or false, got {value!r}")
        return value

    def integer_or_none(self, name: str) -> int | None:
        value = self._values.get(name)
        return None if value is None else self._integer(name, value)

    def number_or_none(self, name: str) -> float | None:
        value = self._values.get(name)
        return None if value is None else self._number(name, value)

    def value(self, name: str) -> Any:
        """As it came; None when absent."""
        return self._values.get(name)

    def list_or_none(self, name: str) -> list[Any] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            raise ModelLoadError(f"{self._where}: {name} must be a list, got {value!r}")
        return value

    def object_or_empty(self, name: str) -> Mapping[str, Any]:
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ModelLoadError(f"{self._where}: {name} must be an object, got {value!r}")
        return value or {}

    def token_ids(self, name: str) -> frozenset[int]:
        """One id, a list of them, or none."""
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise ModelLoadError(f"{self._where}: {name} must be an integer or a list of integers, got {value!r}")
        return frozenset(ids)

    def require(self, name: str, default: Any, accepted: tuple[Any, ...]) -> None:
        """Refuse a value that would change results in a way that is not computed."""
        value = self._values.get(name, default)
        if value not in accepted:
            raise ModelLoadError(f"{self._where}: {name}={value!r} is not supported; supported: {accepted}")

    def refuse_others(self, known: frozenset[str]) -> None:
        """Refuse fields that nobody here reads."""
        if unknown := sorted(set(self._values) - known):
            raise ModelLoadError(f"{self._where}: {', '.join(unknown)} is not supported; supported: {sorted(known)}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self._where}: {name} is missing")
        return value

    def _integer(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelLoadError(f"{self._where}: {name} must be an integer, got {value!r}")
        return value

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{self._where}: {name} must be a number, got {value!r}")
        try:
            return float(value)
        except OverflowError as error:
            raise ModelLoadError(f"{self._where}: {name} is too large") from error


def supported(name: object, known: Mapping[str, str], where: str) -> str:
    """The architecture that ``name`` stands for. Raises ModelLoadError listing what is supported."""
    if not isinstance(name, str) or name not in known:
        raise ModelLoadError(f"{where}: architecture {name!r} is not supported; supported: {', '.join(sorted(known))}")
    return known[name]
