"""What a model asks of the device beside matrix products: the contract of the torch and of the Triton operations.

A layer's slice of the pool is ``[pages, 2, kv_heads, page_tokens, head_dim]``, keys at index 0 and values at 1. It is
not contiguous: a page of all layers is one region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from splitserve.engine.sampler import Draw
from splitserve.engine.step import Chunk

if TYPE_CHECKING:
    from splitserve.engine.batch import StepBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What of attention differs between architectures and layers."""

    scale: float  # of the scores
    window: int | None = None  # positions that a token sees, its own included; None: all up to its own
    soft_cap: float | None = None  # scores become ``cap * tanh(score / cap)``


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosine and sine of the rotary embedding at a step's positions: [tokens, head_dim / 2] float32.

    Pairs are (i, i + head_dim / 2).
    """

    cos: torch.Tensor
    sin: torch.Tensor


class Operations(Protocol):
    """Stateless; tensors in the model's dtype, arithmetic that needs it in float32."""

    def plan(self, chunks: Sequence[Chunk], page_tokens: int) -> object:
        """What ``attend`` needs of a step, once for all layers: goes into ``StepBatch.attention``."""

    def prepare(self, pool: torch.Tensor, batch: StepBatch) -> None:
        """Before the first layer of a step: whatever ``attend`` relies on in pages that ``batch`` begins to fill."""

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
        """One token per row of ``logits``, by the rule of ``sampler.sample``."""

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, times ``offset + weight``. ``hidden`` [..., size]."""

    def add_rms_norm(
        self, residual: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(``rms_norm(residual + hidden)``, ``residual + hidden``). May overwrite ``residual``."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[tokens, 2 * size]``, gate first: [tokens, size]."""

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The same with the tanh approximation of GELU."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary,
        pages: torch.Tensor,
        batch: StepBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Rotate queries and keys, write keys and values into their pages, attend to each sequence's context.

        ``query`` [tokens, heads, head_dim], ``key`` and ``value`` [tokens, kv_heads, head_dim], possibly views of one
        projection; ``pages`` the layer's slice of the pool. Returns [tokens, heads, head_dim], contiguous.
        """
