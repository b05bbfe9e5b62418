"""What a sequence that waits can share with others: pages that are there, and pages that are just being computed."""

from collections.abc import Sequence as Collection
from dataclasses import dataclass

from splitserve.engine.prefix_cache import PrefixCache
from splitserve.engine.protocol import PageHash, PageId
from splitserve.engine.sequence import Sequence


@dataclass(frozen=True)
class SharablePrefix:
    """The beginning of a waiting sequence."""

    names: list[PageHash]  # of the pages that it may share
    pages: list[PageId]  # those of them, from the first on, that are there


def sharable_prefix(sequence: Sequence, cache: PrefixCache, page_tokens: int) -> SharablePrefix:
    """At least one token stays to be computed, as a step has to produce logits, unless the token after the prompt is
    drawn elsewhere; so do all prompt tokens whose log-probabilities are asked for and not yet known.
    """
    tokens = len(sequence.tokens) - (0 if sequence.awaiting else 1)
    if sequence.request.sampling.prompt_logprobs is not None:
        known = len(sequence.prompt_logprobs)
        tokens = tokens if known >= sequence.client_prompt_tokens - 1 else known
    names = sequence.names[: tokens // page_tokens]
    return SharablePrefix(names, cache.leading(names))


def is_in_flight(prefix: SharablePrefix, sequence: Sequence, others: Collection[Sequence]) -> bool:
    """Whether one of ``others`` that goes before ``sequence`` is about to compute the next page of its ``prefix``.

    As a name stands for a page and all before it, only the page at the same place can have it. A page that is sealed
    and yet not in the cache has lost its name; it is not waited for.
    """
    page = len(prefix.pages)
    if page == len(prefix.names):
        return False
    name = prefix.names[page]
    return any(
        other.sealed <= page < len(other.names) and other.names[page] == name and other.rank < sequence.rank
        for other in others
    )
