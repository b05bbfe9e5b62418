"""The shape of one page, and whether two workers' pages are the same thing."""

from dataclasses import asdict, dataclass, fields
from hashlib import blake2b

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PageLayout:
    """A page holds the keys and values of ``page_tokens`` tokens in all layers as one contiguous region,
    ``[layers, 2, kv_heads, page_tokens, head_dim]``; a pool is ``[pages, *page]``.
    """

    model: str  # fingerprint of the weights and of all that changes keys and values (rotary settings included)
    layers: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, self.page_tokens, self.head_dim)

    @property
    def page_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.page_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def fingerprint(self) -> str:
        """Equal exactly when pages can be copied byte for byte and mean the same."""
        text = "\n".join(f"{name}={value!r}" for name, value in sorted(asdict(self).items()))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def differences(self, other: "PageLayout") -> list[str]:
        """One line per field that differs, naming both values; empty when compatible."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [f"{name}: {ours!r} here, {theirs!r} there" for name, ours, theirs in pairs if ours != theirs]

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens, the partial last one included."""
        return -(-tokens // self.page_tokens)
