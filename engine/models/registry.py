"""The model classes by architecture."""

from collections.abc import Callable
from typing import Protocol

import torch

from splitserve.engine.batch import StepBatch
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.llama import Llama


class Model(Protocol):
    """A decoder over a paged pool ``[pages, layers, 2, kv_heads, page_tokens, head_dim]``."""

    def destinations(self) -> dict[str, torch.Tensor]:
        """Uninitialised parameters by the Hugging Face name of the weight to copy into them."""

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        """Compute the step, writing keys and values into ``pool``.

        Returns the logits of ``batch.sample_rows``: [samples, vocab_size] float32.
        """


MODELS: dict[str, Callable[[ModelConfig, torch.dtype, torch.device], Model]] = {"llama": Llama}


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """Allocate a model's parameters on ``device``. ``config.architecture`` is one that ``model_config`` accepts."""
    return MODELS[config.architecture](config, dtype, device)
