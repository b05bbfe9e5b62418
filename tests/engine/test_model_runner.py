"""The runner: what a sequence yields does not depend on chunks, neighbours or pages, and bad settings are refused."""

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_models.random_model import RandomModel
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.protocol import PageId, RequestId, SamplingParams
from splitserve.engine.step import Chunk, Runner

CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=32,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=97,
    max_model_tokens=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    tied_embeddings=True,
    eos_token_ids=frozenset([2]),
)
FILES = RandomModel(CONFIG)
GREEDY = SamplingParams(max_tokens=1, temperature=0)
PAGE_TOKENS = 4
PROMPTS = [[(7 * n + 3 * which) % 97 for n in range(length)] for which, length in enumerate((1, 5, 17, 30))]


def runner(num_pages: int = 64) -> ModelRunner:
    return ModelRunner(FILES, page_tokens=PAGE_TOKENS, num_pages=num_pages)


def chunk(tokens: Sequence[int], start: int, pages: Sequence[int], sample: SamplingParams | None = GREEDY) -> Chunk:
    return Chunk(RequestId("r"), tokens, start, [PageId(page) for page in pages], sample)


def drawn(one: ModelRunner, chunks: Sequence[Chunk]) -> list[int | None]:
    return [output.token for output in one.run(chunks)]


def generate(one: ModelRunner, prompt: list[int], count: int) -> list[int]:
    """One sequence alone: the prompt in one piece, then token by token."""
    tokens = list(prompt)
    done = 0
    for _ in range(count):
        (token,) = drawn(one, [chunk(tokens[done:], done, range(16))])
        assert token is not None
        done = len(tokens)
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small models slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


EXPECTED = [generate(runner(), prompt, 8) for prompt in PROMPTS]


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_mix_of_chunks_gives_what_each_sequence_gives_alone(random) -> None:  # type: ignore[no-untyped-def]
    one = runner()
    free = list(range(64))
    random.shuffle(free)
    tables = [[free.pop() for _ in range(16)] for _ in PROMPTS]
    known = [list(prompt) for prompt in PROMPTS]
    done = [0] * len(PROMPTS)
    goals = [len(prompt) + 8 for prompt in PROMPTS]
    while any(len(tokens) < goal for tokens, goal in zip(known, goals, strict=True)):
        open_ones = [n for n in range(len(PROMPTS)) if len(known[n]) < goals[n]]
        step = random.sample(open_ones, random.randint(1, len(open_ones)))
        sizes = [random.randint(1, len(known[n]) - done[n]) for n in step]
        last = [done[n] + size == len(known[n]) for n, size in zip(step, sizes, strict=True)]
        chunks = [
            chunk(known[n][done[n] : done[n] + size], done[n], tables[n], GREEDY if ends else None)
            for n, size, ends in zip(step, sizes, last, strict=True)
        ]
        for n, size, token in zip(step, sizes, drawn(one, chunks), strict=True):
            done[n] += size
            if token is not None:
                known[n].append(token)
    assert [tokens[len(prompt) :] for tokens, prompt in zip(known, PROMPTS, strict=True)] == EXPECTED


def test_pages_hold_the_same_however_the_prompt_is_cut() -> None:
    whole, cut = runner(), runner()
    whole.run([chunk(PROMPTS[3], 0, range(8))])
    for start, end in ((0, 1), (1, 2), (2, 13), (13, 16), (16, 30)):
        cut.run([chunk(PROMPTS[3][start:end], start, range(8), None)])
    torch.testing.assert_close(cut.memory().owner, whole.memory().owner, rtol=1e-4, atol=1e-5)


def test_the_rest_of_a_page_left_by_another_sequence_does_not_matter() -> None:
    one = runner()
    one.memory().owner.fill_(math.nan)
    assert generate(one, PROMPTS[1], 8) == EXPECTED[1]


def test_broken_pages_of_one_sequence_spare_the_others_and_give_it_no_token() -> None:
    one = runner()
    one.run([chunk(PROMPTS[2], 0, range(5), None), chunk(PROMPTS[2], 0, range(20, 25), None)])
    one.memory().owner[0].fill_(math.nan)
    broken, sound = drawn(one, [chunk([9], 17, range(5)), chunk([EXPECTED[2][0]], 17, range(20, 25))])
    assert broken is None
    assert sound == EXPECTED[2][1]


def test_copied_pages_continue_on_another_runner() -> None:
    prefill, decode = runner(), runner(num_pages=20)
    (first,) = drawn(prefill, [chunk(PROMPTS[2], 0, range(10, 15))])
    assert prefill.layout == decode.layout
    decode.memory().owner[[3, 1, 19, 0, 7]] = prefill.memory().owner[10:15]
    assert first == EXPECTED[2][0]
    assert drawn(decode, [chunk([first], 17, [3, 1, 19, 0, 7])]) == [EXPECTED[2][1]]


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    sampling = SamplingParams(max_tokens=1, temperature=2.0, top_p=0.95, seed=11)
    alone = drawn(runner(), [chunk(PROMPTS[3], 0, range(8), sampling)])
    one = runner()
    one.run([chunk(PROMPTS[3][:-1], 0, range(8), None)])
    both = drawn(one, [chunk(PROMPTS[2], 0, range(30, 40), sampling), chunk(PROMPTS[3][-1:], 29, range(8), sampling)])
    assert both[1:] == alone


def test_an_empty_step_and_a_chunk_that_does_not_sample_give_nothing() -> None:
    one = runner()
    assert one.run([]) == []
    assert drawn(one, [chunk([1, 2], 0, [0], None), chunk([1], 0, [1], None)]) == [None, None]


def test_it_is_a_runner_with_its_pool_in_host_memory() -> None:
    one: Runner = ModelRunner(FILES, page_tokens=16, kv_memory_bytes=100_000, max_model_tokens=40)
    layout = one.layout
    assert layout.page_shape == (2, 2, 2, 16, 8)
    assert layout.dtype == "float32"
    assert FILES.fingerprint in layout.model
    assert CONFIG.cache_key in layout.model
    memory = one.memory()
    assert (memory.page_bytes, memory.num_pages) == (layout.page_bytes, 100_000 // layout.page_bytes)
    assert memory.address == memory.owner.data_ptr()
    assert memory.device is None
    assert (one.num_pages, one.max_model_tokens, one.eos_token_ids) == (memory.num_pages, 40, {2})


def test_half_precision_stays_close_to_full() -> None:
    prefix = PROMPTS[3]
    half = ModelRunner(FILES, page_tokens=PAGE_TOKENS, num_pages=16, dtype="bfloat16")
    full = runner(16)
    for one in (half, full):
        one.run([chunk(prefix[:20], 0, range(8)), chunk([5], 0, [9])])
        one.run([chunk(prefix[20:], 20, range(8)), chunk([6], 1, [9])])
    assert half.layout.differences(full.layout) == ["dtype: 'bfloat16' here, 'float32' there"]
    torch.testing.assert_close(half.memory().owner.float(), full.memory().owner, rtol=0.1, atol=0.15)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (chunk([], 0, [0]), "needs tokens"),
        (chunk([1], 64, range(17)), "exceeds 64 tokens"),
        (chunk([1] * 5, 0, [0]), "1 pages do not hold 5 tokens"),
        (chunk([1], 0, [64]), "leaves the pool"),
        (chunk([97], 0, [0]), "outside the vocabulary"),
    ],
)
def test_a_chunk_that_cannot_be_computed_is_refused(bad: Chunk, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner().run([bad])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 1, "kv_memory_bytes": 1}, "not both"),
        ({"kv_memory_bytes": 10}, "at least one page"),
        ({"dtype": "int4"}, "'int4' is not supported"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"max_model_tokens": 65}, r"\[1, 64\]"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelRunner(FILES, page_tokens=4, **options)  # type: ignore[arg-type]
