"""How fast the engine computes: prefill of one 512-token prompt, and decoding at batch 1, 8 and 32.

Greedy, random prompts, nothing cached. Decoding is measured from the second token on: the time of a batch with 65
tokens each, less that of a like batch with one. The best of three repetitions counts. With ``--dtype int8`` also what
the rounding costs: how often the likeliest next token is the same as in float32, and both perplexities, over a few
thousand tokens of Python's own documentation.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pydoc_data.topics import topics

from splitserve.engine.build import build_engine
from splitserve.engine.engine import Engine
from splitserve.engine.protocol import Request, RequestId, SamplingParams, TokenLogprobs, WorkerId
from splitserve.engine.settings import EngineSettings
from splitserve.engine.tokenizer import load_tokenizer
from splitserve.kvtransfer.local_transport import LocalNetwork, LocalTransport

PREFILL_TOKENS = 512
PROMPT_TOKENS = 64
DECODE_TOKENS = 64
BATCHES = (1, 8, 32)
REPEATS = 3
TEXTS = 8
TEXT_TOKENS = 600  # of each


def build(settings: EngineSettings) -> Engine:
    """An engine by itself, on a transport to nobody."""
    network = LocalNetwork()
    return build_engine(settings, WorkerId("bench"), 1, lambda memory: LocalTransport("bench", memory, network)).engine


def prompt(tokens: int, seed: int) -> tuple[int, ...]:
    """Random token ids that every vocabulary in question has."""
    draw = random.Random(seed)
    return tuple(draw.randrange(100, 40_000) for _ in range(tokens))


def seconds(engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> float:
    """How long the engine takes for all of ``prompts`` together."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for number, tokens in enumerate(prompts):
        engine.add(Request(RequestId(str(number)), tokens, (), sampling))
    start = time.perf_counter()
    while not engine.idle:
        engine.step()
    return time.perf_counter() - start


def speed(engine: Engine) -> dict[str, float]:
    """Tokens per second, by figure."""
    best: dict[str, float] = {}
    for repeat in range(REPEATS):
        figures = {"prefill512": PREFILL_TOKENS / seconds(engine, [prompt(PREFILL_TOKENS, repeat)], 1)}
        for batch in BATCHES:
            first = seconds(engine, [prompt(PROMPT_TOKENS, 1000 * repeat + n) for n in range(batch)], 1)
            later = [prompt(PROMPT_TOKENS, 2000 * (repeat + 1) + 1000 + n) for n in range(batch)]
            whole = seconds(engine, later, 1 + DECODE_TOKENS)
            figures[f"decode{batch}"] = batch * DECODE_TOKENS / (whole - first)
        best = {name: max(value, best.get(name, 0.0)) for name, value in figures.items()}
    return best


def likely(engine: Engine, texts: Sequence[tuple[int, ...]]) -> list[TokenLogprobs]:
    """What the model thinks of each token of ``texts`` but their first."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    found: list[TokenLogprobs] = []
    for number, tokens in enumerate(texts):
        engine.add(Request(RequestId(f"text {number}"), tokens, (), sampling))
        while not engine.idle:
            for update in engine.step().updates:
                found += update.prompt_logprobs or ()
    return found


def loss_of_int8(settings: EngineSettings, rounded: Engine) -> dict[str, float]:
    """``rounded`` against the same model in float32."""
    tokenizer = load_tokenizer(settings.model)
    texts = [tuple(tokenizer.encode(text)[:TEXT_TOKENS]) for text in islice(_texts(), TEXTS)]
    exact = likely(build(EngineSettings(model=settings.model, dtype="float32")), texts)
    other = likely(rounded, texts)
    same = sum(a.top_ids == b.top_ids for a, b in zip(exact, other, strict=True))
    return {
        "tokens": len(exact),
        "top1_agreement": round(same / len(exact), 4),
        "perplexity_float32": round(_perplexity(exact), 3),
        "perplexity_int8": round(_perplexity(other), 3),
    }


def _texts() -> Iterator[str]:
    """The longest ones of the interpreter's help topics."""
    yield from sorted(topics.values(), key=len, reverse=True)


def _perplexity(tokens: Sequence[TokenLogprobs]) -> float:
    return math.exp(-sum(token.logprob for token in tokens) / len(tokens))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", default="smollm2")
    arguments.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "int8"))
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    settings = EngineSettings(model=options.model, dtype=options.dtype, chunk_tokens=PREFILL_TOKENS)
    engine = build(settings)
    figures = {name: round(value, 1) for name, value in speed(engine).items()}
    if options.dtype == "int8":
        figures |= loss_of_int8(settings, engine)
    if options.json:
        print(json.dumps({"dtype": options.dtype, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:>20} {value:10}")


if __name__ == "__main__":
    main()
