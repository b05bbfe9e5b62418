"""How a model of each architecture is built."""

from collections.abc import Callable
from typing import Protocol

import torch

from splitserve.engine.batch import StepBatch
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.gemma import gemma2, gemma3
from splitserve.engine.models.llama import llama
from splitserve.engine.models.mixtral import mixtral
from splitserve.engine.models.platform import Platform
from splitserve.engine.models.qwen3 import qwen3


class Model(Protocol):
    """A decoder over a paged pool ``[pages, layers, 2, kv_heads, page_tokens, head_dim]``."""

    def destinations(self) -> dict[str, torch.Tensor]:
        """Uninitialised parameters by the Hugging Face name of the weight to copy into them."""

    def pack(self) -> None:
        """All parameters are loaded: bring them into the form they are used in. Once, before the first step."""

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        """Compute the step, writing keys and values into ``pool``. Returns the last layer's output for every token:
        [tokens, hidden_size], model dtype.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of what ``forward`` returned through the last norm and the output head: [rows, vocab_size] float32."""


MODELS: dict[str, Callable[[ModelConfig, Platform], Model]] = {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "llama": llama,
    "mistral": llama,
    "mixtral": mixtral,
    "qwen2": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3,
}


def build_model(config: ModelConfig, platform: Platform) -> Model:
    """Allocate a model's parameters. ``config.architecture`` is one that ``model_config`` accepts."""
    return MODELS[config.architecture](config, platform)
