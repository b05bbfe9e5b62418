"""The default model through a prefill worker, NIXL and a decode worker, against transformers on the same weights."""

import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from e2e.server import Server
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.protocol import Request, RequestId, SamplingParams, WorkerId
from splitserve.engine.settings import EngineSettings
from splitserve.engine.tokenizer import Tokenizer, load_tokenizer
from splitserve.engine.weights.location import WEIGHT_FILES, locate
from splitserve.kvtransfer.local_transport import LocalNetwork, LocalTransport

NEW_TOKENS = int(os.environ.get("SPLITSERVE_GOLDEN_TOKENS", "16"))  # of each prompt
PAGE_TOKENS = 16
PAGE_BYTES = 30 * 2 * 3 * PAGE_TOKENS * 64 * 4  # layers, key and value, heads, tokens, head size, float32
CHUNK_TOKENS = 256
LENGTHS = (1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 2 * PAGE_TOKENS, 5 * PAGE_TOKENS + 3, CHUNK_TOKENS + 20)
TEXT = (
    "The harbour was quiet before dawn. A single lamp burned at the end of the pier, and the keeper counted the boats "
    "as they came in one by one, writing each name in a ledger that had belonged to his father. Rain had been promised "
    "for the afternoon, but the sky over the islands stayed clear and pale, like the inside of a shell. "
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a short poem about the sea.",
    "How many legs does a spider have?",
    "Explain photosynthesis in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 12?",
    "List the days of the week.",
    "Why is the sky blue?",
    "Who wrote Hamlet?",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """24 prompts, 14 plain ones of all the lengths that matter and 10 of chats."""
    text = tokenizer.encode(TEXT * 8)
    plain = [text[start : start + length] for start in (0, 7) for length in LENGTHS]
    chats = [tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return plain + chats


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers on the dequantised float32 weights."""
    from transformers import AutoModelForCausalLM

    file = locate("smollm2", WEIGHT_FILES)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return [greedy(model, prompt) for prompt in prompts]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def served(server: Server, prompt: list[int]) -> str:
    answer = server.complete(prompt=prompt, max_tokens=NEW_TOKENS, temperature=0)
    return str(answer["choices"][0]["text"])


def test_tokens_equal_those_of_transformers(
    smollm2: Server, prompts: list[list[int]], reference: list[list[int]], tokenizer: Tokenizer
) -> None:
    """Through prefill and decode worker, whole and streamed."""
    transfers = smollm2.metric("splitserve_kv_transfers_total")
    for prompt, tokens in zip(prompts, reference, strict=True):
        assert served(smollm2, prompt) == tokenizer.decode(tokens)
        chunks = list(smollm2.stream(prompt=prompt, max_tokens=NEW_TOKENS, temperature=0))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == tokenizer.decode(tokens)
    assert smollm2.metric("splitserve_kv_transfers_total") - transfers == 2 * len(prompts)
    assert smollm2.metric("splitserve_kv_recomputed_total") == 0


@pytest.fixture(scope="module")
def one_worker() -> Iterator[BuiltEngine]:
    network = LocalNetwork()
    built = build_engine(
        EngineSettings(threads=2, chunk_tokens=CHUNK_TOKENS),
        WorkerId("alone"),
        1,
        lambda memory: LocalTransport("alone", memory, network),
    )
    yield built
    built.engine.close()


def test_one_worker_alone_draws_the_same_tokens(
    one_worker: BuiltEngine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    hasher = PageHasher(PAGE_TOKENS, b"any")
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    for number, (prompt, expected) in enumerate(zip(prompts, reference, strict=True)):
        request = Request(RequestId(str(number)), tuple(prompt), hasher.chain(prompt), sampling)
        one_worker.engine.add(request)
        tokens: list[int] = []
        while not one_worker.engine.idle:
            for update in one_worker.engine.step().updates:
                tokens += update.tokens
        assert tokens == expected, f"prompt {number} of {len(prompt)} tokens"


def test_what_is_the_capital_of_france(smollm2: Server) -> None:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(model=model, messages=messages, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model=model, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
            )
        )
    answer = whole.choices[0].message.content
    assert answer is not None
    assert "Paris" in answer
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.total_tokens == chunks[-1].usage.total_tokens == whole.usage.prompt_tokens + 8
    assert whole.usage.completion_tokens == 8
    assert whole.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("length", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 5 * PAGE_TOKENS + 3])
def test_pages_really_move_from_process_to_process(smollm2: Server, tokenizer: Tokenizer, length: int) -> None:
    """Cold: all pages; a shared prefix: the rest; what the decode worker has: nothing."""

    def moved(prompt: list[int]) -> float:
        before = smollm2.metric("splitserve_kv_transfer_bytes_total")
        count = smollm2.metric("splitserve_kv_transfers_total")
        smollm2.complete(prompt=prompt, max_tokens=2, temperature=0, ignore_eos=True)
        smollm2.wait_for(lambda: smollm2.metric("splitserve_kv_transfers_total") == count + 1)
        return (smollm2.metric("splitserve_kv_transfer_bytes_total") - before) / PAGE_BYTES

    cold = [30_000 + length, *tokenizer.encode(TEXT * 2)][:length]
    full = length // PAGE_TOKENS
    partial = -(-length // PAGE_TOKENS) - full
    assert moved(cold) == full + partial
    assert moved(cold) == partial
    assert moved([*cold, *range(40_000, 40_020)]) == -(-(length + 20) // PAGE_TOKENS) - full


def test_a_seed_fixes_the_answer_wherever_it_is_computed(smollm2: Server) -> None:
    """B051."""
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.9, "top_p": 0.9}
    first, again, other = (smollm2.complete(**body, seed=seed)["choices"][0]["text"] for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "x" * 5_000_000}, 413, None),
        ({"prompt": [1] * 9000}, 400, "prompt"),
        ({"prompt": [1] * 10, "max_tokens": 9000}, 400, "max_tokens"),
        ({"prompt": "word " * 9000, "max_tokens": 1}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [49_152]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "a", "model": "gpt-5"}, 404, "model"),
    ],
)
def test_bad_input_costs_the_engine_nothing(smollm2: Server, body: dict[str, Any], status: int, param: str) -> None:
    steps = smollm2.metric("splitserve_steps_total")
    answer = smollm2.http.post("/v1/completions", json={"model": "smollm2"} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert answer.elapsed.total_seconds() < 1.0
    assert smollm2.metric("splitserve_steps_total") == steps
    assert smollm2.settled()


def test_memory_of_all_processes_stays_under_6_gib(smollm2: Server) -> None:
    total_bytes = sum(map(resident_bytes, descendants(smollm2.process.pid)))
    assert 1 << 30 < total_bytes < 6 << 30


def descendants(root: int) -> list[int]:
    """``root`` and all processes of its session."""
    found = [root]
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != root:
            try:
                if os.getsid(int(entry)) == root or is_ray(int(entry)):
                    found.append(int(entry))
            except ProcessLookupError:
                continue
    return found


def is_ray(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read()
    return b"ray" in command and b"pytest" not in command


def resident_bytes(pid: int) -> int:
    """Without what is shared and counted elsewhere."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return 0
    return int(lines["Pss"].split()[0]) << 10
