"""Stop strings: nothing of them leaks, nothing else is lost, and the cut of the text into pieces changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.engine.stop_strings import Scanned, StopStrings

words = st.text(alphabet="ab\u20ac", min_size=1, max_size=5)


def first_completed(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the shortest prefix that ends with a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


def longest_partial(text: str, stops: list[str]) -> int:
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(st.lists(words, max_size=3), st.lists(st.text(alphabet="ab\u20ac", max_size=4), max_size=12))
def test_agrees_with_the_definition_for_every_cut(stops: list[str], pieces: list[str]) -> None:
    scanner = StopStrings(stops)
    emitted, seen, matched = "", "", None
    for piece in pieces:
        scanned = scanner.push(piece)
        emitted += scanned.emit
        seen += piece
        matched = scanned.matched
        if matched is None:
            assert seen.startswith(emitted)
            assert len(seen) - len(emitted) == longest_partial(seen, stops)
    emitted += scanner.flush()
    assert (emitted, matched) == first_completed(seen, stops)


@pytest.mark.parametrize(
    ("stops", "text", "before", "matched"),
    [
        (["aaab"], "aaaab", "a", "aaab"),  # fails in the middle of itself and begins again
        (["abab", "abac"], "ababac", "", "abab"),
        (["ababc"], "abababc", "ab", "ababc"),
        (["abcd", "bc"], "abcd", "a", "bc"),  # complete first
        (["c", "bc", "abc"], "abc", "", "abc"),  # complete at the same character: the longest
        (["a"], "aaa", "", "a"),
        (["ab"], "abc", "", "ab"),  # at the very beginning
        (["\u20ac\U0001f600"], "a\u20ac\u20ac\U0001f600", "a\u20ac", "\u20ac\U0001f600"),
        (["abc"], "ababab", "ababab", None),
    ],
)
def test_the_match_that_is_complete_first_ends_the_text(
    stops: list[str], text: str, before: str, matched: str | None
) -> None:
    for size in range(1, len(text) + 1):
        scanner = StopStrings(stops)
        scanned = [scanner.push(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join(piece.emit for piece in scanned) + scanner.flush() == before
        assert scanned[-1].matched == matched


def test_a_partial_match_is_released_when_it_fails() -> None:
    scanner = StopStrings(["END"])
    assert scanner.push("the E") == Scanned("the ", None)
    assert scanner.push("N") == Scanned("", None)
    assert scanner.push("EN") == Scanned("EN", None)
    assert scanner.flush() == "EN"
    assert scanner.push("D") == Scanned("D", None)


def test_everything_after_a_match_is_swallowed() -> None:
    scanner = StopStrings(["\n\n"])
    assert scanner.push("a\n") == Scanned("a", None)
    assert scanner.push("\nb") == Scanned("", "\n\n")
    assert scanner.push("c") == Scanned("", "\n\n")
    assert scanner.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    assert StopStrings([]).push("text") == Scanned("text", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
