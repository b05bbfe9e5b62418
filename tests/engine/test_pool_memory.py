"""The pool takes what the configuration says, to the byte."""

import pytest
import torch

from engine_models.random_model import RandomModel
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.model_runner import ModelRunner

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def config(layers: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        hidden_size=32,
        layers=layers,
        heads=2 * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=48,
        vocab_size=97,
        max_model_tokens=64,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        tied_embeddings=True,
        eos_token_ids=frozenset([2]),
    )


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize(("layers", "kv_heads", "head_dim"), [(1, 1, 8), (3, 2, 16)])
@pytest.mark.parametrize(("page_tokens", "kv_memory_bytes"), [(1, 10_000), (4, 65_535), (16, 65_536), (16, 100_001)])
def test_the_pool_has_every_whole_page_that_fits_and_no_byte_more(
    dtype: str, layers: int, kv_heads: int, head_dim: int, page_tokens: int, kv_memory_bytes: int
) -> None:
    page_bytes = layers * 2 * kv_heads * page_tokens * head_dim * ITEM_BYTES[dtype]
    runner = ModelRunner(
        RandomModel(config(layers, kv_heads, head_dim)),
        page_tokens=page_tokens,
        kv_memory_bytes=kv_memory_bytes,
        dtype=dtype,
    )
    memory = runner.memory()
    assert (memory.page_bytes, runner.layout.page_bytes) == (page_bytes, page_bytes)
    assert memory.num_pages == runner.num_pages == kv_memory_bytes // page_bytes
    assert isinstance(memory.owner, torch.Tensor)
    assert memory.owner.untyped_storage().nbytes() == kv_memory_bytes // page_bytes * page_bytes


def test_memory_for_less_than_a_page_is_refused_with_the_size_of_a_page() -> None:
    with pytest.raises(ValueError, match="at least one page of 2048 bytes"):
        ModelRunner(RandomModel(config(1, 1, 16)), page_tokens=16, kv_memory_bytes=2047, dtype="float32")
