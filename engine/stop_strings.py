"""Finding stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton: each character costs amortised constant time, however long the
    string.
    """

    text: str
    fallback: list[int]  # length of the longest proper prefix of text[:n + 1] that is also its suffix
    matched: int = 0  # characters of ``text`` that end the stream so far

    def advance(self, character: str) -> bool:
        while self.matched and self.text[self.matched] != character:
            self.matched = self.fallback[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)


def _pattern(text: str) -> _Pattern:
    fallback = [0] * len(text)
    length = 0
    for at in range(1, len(text)):
        while length and text[at] != text[length]:
            length = fallback[length - 1]
        if text[at] == text[length]:
            length += 1
        fallback[at] = length
    return _Pattern(text, fallback)


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a piece of text set free. ``matched`` is the stop string that ended the text, not part of ``emit``."""

    emit: str
    matched: str | None


class StopStrings:
    """Passes text on until a stop string is complete, holding back only what may still turn into one.

    The match that is complete first wins; among those that end at the same character, the longest. How the text is cut
    into pieces therefore changes nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._patterns = [_pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> Scanned:
        """Take more text. After a match everything is swallowed and the match is reported again."""
        if self._matched is not None:
            return Scanned("", self._matched)
        if not self._patterns:
            return Scanned(text, None)
        for at, character in enumerate(text):
            ended = [pattern for pattern in self._patterns if pattern.advance(character)]
            if ended:
                return self._end(self._held + text[: at + 1], ended[0].text)
        seen = self._held + text
        free = len(seen) - max(pattern.matched for pattern in self._patterns)
        self._held = seen[free:]
        return Scanned(seen[:free], None)

    def flush(self) -> str:
        """The text is over: what was held back. Empty after a match."""
        held, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.matched = 0
        return held

    def _end(self, seen: str, stop: str) -> Scanned:
        self._matched, self._held = stop, ""
        return Scanned(seen[: len(seen) - len(stop)], stop)
