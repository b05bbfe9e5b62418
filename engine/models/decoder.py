"""The frame that all decoders share: embeddings, layers, a last norm, an output head."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.nn.functional import embedding

from splitserve.engine.batch import StepBatch
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.norm import Norm
from splitserve.engine.models.platform import Linear, Platform
from splitserve.engine.models.rotary_embedding import LayerRotaries
from splitserve.engine.operations import Rotary


class FeedForward(Protocol):
    """The part of a layer that sees each token alone."""

    def linears(self) -> Iterator[Linear]: ...

    def destinations(self) -> dict[str, torch.Tensor]:
        """By the Hugging Face name within it."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [tokens, hidden_size] in, the same shape out."""


class Layer(Protocol):
    """One decoder layer."""

    def linears(self) -> Iterator[Linear]:
        """Every projection in it."""

    def destinations(self) -> dict[str, torch.Tensor]:
        """Where each weight belongs, by its Hugging Face name within the layer."""

    def forward(self, hidden: torch.Tensor, rotary: Rotary, pages: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """``hidden`` [tokens, hidden_size] in, the same shape out. May overwrite ``hidden``. ``pages`` is this layer's
        slice of the pool; its pages are written.
        """


class Decoder:
    """Implements ``models.registry.Model``. Parameters are uninitialised until loaded."""

    def __init__(
        self,
        config: ModelConfig,
        platform: Platform,
        layers: Sequence[Layer],
        last_norm: Norm,
        embedding_scale: float | None = None,
    ) -> None:
        """``embedding_scale`` multiplies what the table holds; None: nothing does."""
        self._layers = layers
        self._norm = last_norm
        self._embedding_scale = embedding_scale
        self._soft_cap = config.variation.logit_soft_cap
        self._rotaries = LayerRotaries(config, platform.device)
        self._tied = config.tied_embeddings
        self._embeddings = platform.empty(config.vocab_size, config.hidden_size)
        if self._tied:
            self._head = platform.linear.over(self._embeddings)
        else:
            self._head = platform.linear(config.hidden_size, config.vocab_size)

    def destinations(self) -> dict[str, torch.Tensor]:
        named = {"model.embed_tokens.weight": self._embeddings, "model.norm.weight": self._norm.weight}
        if not self._tied:
            named["lm_head.weight"] = self._head.weight
        for number, layer in enumerate(self._layers):
            named |= {f"model.layers.{number}.{name}": weight for name, weight in layer.destinations().items()}
        return named

    def pack(self) -> None:
        for layer in self._layers:
            for linear in layer.linears():
                linear.pack()
        self._head.pack()

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        hidden = embedding(batch.token_ids, self._embeddings)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        rotaries = self._rotaries.at(batch.positions)
        for number, (layer, rotary) in enumerate(zip(self._layers, rotaries, strict=True)):
            hidden = layer.forward(hidden, rotary, pool[:, number], batch)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(self._norm(hidden)).float()
        if self._soft_cap is not None:
            logits = (logits / self._soft_cap).tanh() * self._soft_cap
        return logits
