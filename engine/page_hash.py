"""Names of page contents: a keyed hash over the tokens of a page and of everything before it.

Router and workers must agree on these, so the key comes from the configuration and never from the process. The hash is
cryptographic (BLAKE2b): who can guess prompts but not the key can neither forge nor predict a page's name.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

from splitserve.engine.protocol import PageHash

HASH_BYTES = 16
MAX_KEY_BYTES = 64  # of BLAKE2b
SALT_PERSON = b"salt"


class PageHasher:
    """Hashes full pages of ``page_tokens`` tokens. ``key`` is 1 to 64 bytes and the same in the whole cluster.

    Page contents depend on more than tokens: pass whatever changes them for all requests (model, dtype) as
    ``context``, and what differs between requests (a tenant's salt, an adapter) as the ``salt`` of each.
    """

    def __init__(self, page_tokens: int, key: bytes, context: bytes = b"") -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, got {page_tokens}")
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"the page hash key must have 1 to {MAX_KEY_BYTES} bytes, got {len(key)}")
        self.page_tokens = page_tokens
        self._key = key
        self._pack = struct.Struct(f"<{page_tokens}q").pack
        self.root = PageHash(blake2b(context, digest_size=HASH_BYTES, key=key).digest())

    def root_for(self, salt: str) -> PageHash:
        """The parent of the first page of requests with ``salt``. No salt, and no choice of pages, gives the names that
        belong to another salt.
        """
        if not salt:
            return self.root
        # ``person`` sets these apart from names of pages: who chooses his salt must not reach a name by it.
        digest = blake2b(self.root + salt.encode(), digest_size=HASH_BYTES, key=self._key, person=SALT_PERSON)
        return PageHash(digest.digest())

    def extend(self, parent: PageHash, page: Sequence[int]) -> PageHash:
        """Name of the page with exactly ``page_tokens`` tokens ``page`` that follows the page named ``parent``."""
        return PageHash(blake2b(parent + self._pack(*page), digest_size=HASH_BYTES, key=self._key).digest())

    def chain(self, tokens: Sequence[int], known: Sequence[PageHash] = (), salt: str = "") -> tuple[PageHash, ...]:
        """Names of all full pages of ``tokens``; a partial last page has none. ``known``: the first of these names,
        made with the same ``salt``.
        """
        names = list(known)
        parent = names[-1] if names else self.root_for(salt)
        for start in range(len(names) * self.page_tokens, len(tokens) - self.page_tokens + 1, self.page_tokens):
            parent = self.extend(parent, tokens[start : start + self.page_tokens])
            names.append(parent)
        return tuple(names)
