"""Names of pages: nothing of a page's content is lost in its name, and all processes agree on it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.engine.page_hash import HASH_BYTES, PageHasher

HASHER = PageHasher(4, b"cluster key", b"model float32")
PAGE = [10, 20, 30, 40]
TOKEN = st.integers(-(1 << 63), (1 << 63) - 1)


def name(page: list[int], hasher: PageHasher = HASHER) -> bytes:
    return hasher.extend(hasher.root, page)


def test_a_name_is_this_literal_value_in_every_process() -> None:
    """B104: router and workers agree, whatever their hash seed and version."""
    assert [n.hex() for n in HASHER.chain([1, 2, 3, 4, 5, 6, 7, 8, 9])] == [
        "c9bd86f6ae2c95dd81721351b88fb8a5",
        "e8d2ac0a2c46f3ca706ce5048366ca1a",
    ]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([20, 10, 30, 40], id="swapped"),
        pytest.param([11, 19, 30, 40], id="equal sum"),
        pytest.param([20, 20, 15, 40], id="equal product"),
        pytest.param([10 ^ 1, 20 ^ 1, 30, 40], id="equal xor"),
        pytest.param([10 + (1 << 8), 20, 30, 40], id="above 8 bits"),
        pytest.param([10, 20 + (1 << 16), 30, 40], id="above 16 bits"),
        pytest.param([10, 20, 30 + (1 << 32), 40], id="above 32 bits"),
        pytest.param([10, 20, 30, 40 - (1 << 63)], id="sign"),
        pytest.param([0, 0, 0, 0], id="zeros"),
    ],
)
def test_pages_that_a_weak_hash_confuses_have_names_of_their_own(other: list[int]) -> None:
    """B056."""
    assert name(other) != name(PAGE)


def test_the_same_page_after_another_parent_has_another_name() -> None:
    assert HASHER.chain([*PAGE, *PAGE])[0] != HASHER.chain([*PAGE, *PAGE])[1]
    assert HASHER.chain([1, 2, 3, 4, *PAGE])[1] != HASHER.chain([1, 2, 3, 5, *PAGE])[1]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(PageHasher(4, b"cluster kez", b"model float32"), id="key"),
        pytest.param(PageHasher(4, b"cluster key\0", b"model float32"), id="padded key"),
        pytest.param(PageHasher(4, b"cluster key", b"model float16"), id="context"),
        pytest.param(PageHasher(4, b"cluster key"), id="no context"),
    ],
)
def test_key_and_context_are_part_of_every_name(other: PageHasher) -> None:
    """B056, B104."""
    ours, theirs = HASHER.chain([*PAGE, *PAGE]), other.chain([*PAGE, *PAGE])
    assert not set(ours) & set(theirs)
    assert name(PAGE, other) != name(PAGE)


@pytest.mark.parametrize("salt", ["a", "b", "tenant 1", " ", "\0", "é", "x" * 1000])
def test_a_salt_gives_names_of_its_own_and_the_same_in_every_process(salt: str) -> None:
    """B056, B104."""
    plain, salted = HASHER.chain([*PAGE, *PAGE]), HASHER.chain([*PAGE, *PAGE], salt=salt)
    assert not set(plain) & set(salted)
    assert salted == PageHasher(4, b"cluster key", b"model float32").chain([*PAGE, *PAGE], salt=salt)
    assert salted != HASHER.chain([*PAGE, *PAGE], salt=salt + "'")
    assert HASHER.chain([*PAGE, *PAGE], known=salted[:1], salt=salt) == salted


def test_no_salt_is_the_plain_name() -> None:
    assert HASHER.root_for("") == HASHER.root
    assert HASHER.chain(PAGE, salt="") == HASHER.chain(PAGE)


def test_a_salt_that_spells_a_page_does_not_reach_its_name() -> None:
    """Whoever chooses his salt would otherwise share pages with those who have none."""
    page = [0x41414141, 0x42424242, 0x43434343, 0x44444444]
    spelled = b"".join(token.to_bytes(8, "little") for token in page).decode()
    assert HASHER.root_for(spelled) != HASHER.extend(HASHER.root, page)


def test_names_of_other_page_sizes_are_others() -> None:
    tokens = list(range(8))
    assert not set(PageHasher(2, b"k").chain(tokens)) & set(PageHasher(4, b"k").chain(tokens))


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 7, 8, 9, 12])
def test_only_full_pages_have_names(length: int) -> None:
    names = HASHER.chain(range(length))
    assert len(names) == length // 4
    assert all(len(n) == HASH_BYTES for n in names)
    assert names == HASHER.chain(range(100))[: len(names)]


@given(tokens=st.lists(TOKEN, max_size=20), more=st.lists(TOKEN, max_size=20), page_tokens=st.integers(1, 5))
def test_a_chain_goes_on_from_what_is_known(tokens: list[int], more: list[int], page_tokens: int) -> None:
    hasher = PageHasher(page_tokens, b"k")
    assert hasher.chain(tokens + more, known=hasher.chain(tokens)) == hasher.chain(tokens + more)


@given(first=st.lists(TOKEN, min_size=3, max_size=9), second=st.lists(TOKEN, min_size=3, max_size=9))
def test_names_are_equal_exactly_for_equal_prefixes(first: list[int], second: list[int]) -> None:
    hasher = PageHasher(3, b"k")
    for pages, (ours, theirs) in enumerate(zip(hasher.chain(first), hasher.chain(second), strict=False), start=1):
        assert (ours == theirs) == (first[: 3 * pages] == second[: 3 * pages])


@pytest.mark.parametrize(("page_tokens", "key"), [(0, b"k"), (-1, b"k"), (4, b""), (4, b"x" * 65)])
def test_sizes_that_make_no_hash_are_refused(page_tokens: int, key: bytes) -> None:
    with pytest.raises(ValueError, match="must"):
        PageHasher(page_tokens, key)
