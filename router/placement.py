"""Which workers compute a request: a pure function of the load view."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from splitserve.engine.protocol import PageHash, Role, WorkerId
from splitserve.router.load_view import LoadView, WorkerView


class NobodyThere(Exception):
    """No worker that could take the request is connected at the moment."""


@dataclass(frozen=True)
class Placement:
    """``prefill`` is None where the decode worker computes the prompt as well."""

    prefill: WorkerId | None
    decode: WorkerId


def place(names: Sequence[PageHash], prompt_tokens: int, view: LoadView, rng: Random) -> Placement:
    """Choose the pair for a prompt of ``prompt_tokens`` tokens whose full pages are called ``names``.

    The prefill worker is the one with the least left to compute, the uncached part of this prompt included; the decode
    worker the one with the fewest requests, among those with room. Ties fall at random. When a pool is empty, the
    workers of the other one compute whole requests: late is better than not at all.

    Raises NobodyThere when no worker at all takes work.
    """
    prefill, decode = view.of_role(Role.PREFILL), view.of_role(Role.DECODE)
    if not prefill and not decode:
        raise NobodyThere("no worker is connected")
    if not decode:
        return Placement(prefill=None, decode=_least(prefill, names, prompt_tokens, rng))
    roomy = [w for w in decode if w.free_tokens >= prompt_tokens] or decode
    chosen = min(roomy, key=lambda w: (w.requests, rng.random())).worker
    if not prefill:
        return Placement(prefill=None, decode=_least(decode, names, prompt_tokens, rng))
    return Placement(prefill=_least(prefill, names, prompt_tokens, rng), decode=chosen)


def _least(workers: Sequence[WorkerView], names: Sequence[PageHash], prompt_tokens: int, rng: Random) -> WorkerId:
    return min(workers, key=lambda w: (w.tokens_ahead + w.uncached_tokens(names, prompt_tokens), rng.random())).worker
