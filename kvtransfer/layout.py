"""The shape of one page of one rank, and whether two workers' pages can be made from one another."""

from dataclasses import dataclass, fields, replace
from hashlib import blake2b

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3": 1}

_SIZES = ("layers", "kv_heads", "page_tokens", "head_dim", "tp_degree")
# What no plan of byte ranges and no conversion can bridge.
_FIXED = ("model", "layers", "kv_heads", "head_dim")


@dataclass(frozen=True)
class PageLayout:
    """A page holds the keys and values of ``page_tokens`` tokens in all layers as one contiguous region,
    ``[layers, 2, heads held, page_tokens, head_dim]``; a pool is ``[pages, *page]``.

    A tensor-parallel worker has one pool in each of its ``tp_degree`` ranks, and one page table for all of them. A rank
    holds ``kv_heads / tp_degree`` heads; with more ranks than heads each head is in ``tp_degree / kv_heads`` ranks.
    Raises ValueError for values that no pool can have.
    """

    model: str  # fingerprint of the weights and of all that changes keys and values (rotary settings included)
    layers: int
    kv_heads: int  # of the model, over all ranks
    page_tokens: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES; the one-byte types need scales, so that they occur in staged pages only
    tp_degree: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if not 0 <= self.tp_rank < self.tp_degree:
            raise ValueError(f"tp_rank {self.tp_rank} is outside [0, {self.tp_degree})")
        if self.kv_heads % self.tp_degree and self.tp_degree % self.kv_heads:
            raise ValueError(f"tp_degree {self.tp_degree} neither divides kv_heads {self.kv_heads} nor is a multiple")

    @property
    def heads(self) -> range:
        """The model's heads that this rank holds."""
        first = self.tp_rank * self.kv_heads // self.tp_degree
        return range(first, first + max(1, self.kv_heads // self.tp_degree))

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, len(self.heads), self.page_tokens, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """One token in one head, keys or values."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.layers * 2 * len(self.heads) * self.page_tokens * self.token_bytes

    @property
    def fingerprint(self) -> str:
        """Equal exactly when pages can be copied byte for byte and mean the same: ranks that hold the same heads
        agree.
        """
        shape = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("tp_degree", "tp_rank")}
        shape["heads"] = self.heads
        text = "\n".join(f"{name}={value!r}" for name, value in sorted(shape.items()))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def rank(self, tp_rank: int) -> "PageLayout":
        """The layout of another rank of the same worker."""
        return replace(self, tp_rank=tp_rank)

    def differences(self, other: "PageLayout") -> list[str]:
        """One line per field that differs, naming both values."""
        return [self._line(f.name, other) for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]

    def obstacles(self, other: "PageLayout") -> list[str]:
        """Why the pages of one cannot become pages of the other: one line per field, naming both values. Empty when
        they can, be it by another plan of byte ranges (degree, rank, page size) or by conversion (dtype).
        """
        lines = [self._line(name, other) for name in _FIXED if getattr(self, name) != getattr(other, name)]
        if self.page_tokens % other.page_tokens and other.page_tokens % self.page_tokens:
            lines.append(f"{self._line('page_tokens', other)}; one must be a multiple of the other")
        return lines

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens, the partial last one included."""
        return -(-tokens // self.page_tokens)

    def _line(self, name: str, other: "PageLayout") -> str:
        return f"{name}: {getattr(self, name)!r} here, {getattr(other, name)!r} there"
