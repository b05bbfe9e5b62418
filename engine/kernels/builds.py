"""Shapes at which the kernels are compiled ahead of time: those of common models, and the hardest on registers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.engine.kernels import draw, gated, norms, page_copy, paged_decode, paged_prefill, rotate_and_write
from splitserve.engine.kernels.tiles import Tile, decode_tile, next_power_of_two, prefill_tile

_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel with its constants, as its door would launch it."""

    name: str
    kernel: Any  # a triton.JITFunction
    types: Mapping[str, str]  # of the arguments that are no constants, in Triton's spelling
    constants: Mapping[str, object]
    warps: int
    stages: int = 1

    @property
    def aligned(self) -> frozenset[str]:
        """Arguments that are multiples of 16, where the kernel makes use of that."""
        used = {parameter.name for parameter in self.kernel.params if not parameter.do_not_specialize_on_alignment}
        return frozenset(
            name for name, kind in self.types.items() if kind[0] == "*" or name.endswith(("_stride", "size"))
        ) & frozenset(used)


@dataclass(frozen=True, slots=True)
class _Heads:
    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    page_tokens: int = 16

    def __str__(self) -> str:
        return f"{_SHORT[self.dtype]} {self.kv_heads}x{self.group} heads of {self.head_dim}"


_LLAMA = _Heads(8, 4, 128)  # Llama 3 8B, Mistral 7B, Qwen3
_PHI = _Heads(32, 1, 80, torch.float16)  # Phi-2: tiles as Llama's, and masks for what is behind the head size
_GEMMA = _Heads(4, 2, 256)
_FLOAT32 = _Heads(8, 8, 128, torch.float32, 32)


def _builds() -> Iterator[Build]:
    yield _decode(_LLAMA, splits=1, soft_cap=False)
    yield _decode(_GEMMA, splits=8, soft_cap=True)
    yield _decode(_FLOAT32, splits=1, soft_cap=False)
    yield _merge(_GEMMA, splits=32)
    yield _prefill(_PHI, soft_cap=False)
    yield _prefill(_GEMMA, soft_cap=True)
    yield _prefill(_FLOAT32, soft_cap=False)
    yield _rotate(_Heads(8, 8, 128))
    yield _norm(16_384)
    yield _add_norm(16_384)
    data = {"gate_up": "*bf16", "output": "*bf16", "size": "i32"}
    yield Build("silu_gate", gated.silu_gate, data, {"TILE": gated.TILE}, 4)
    yield Build("gelu_gate", gated.gelu_gate, data, {"TILE": gated.TILE}, 4)
    words = {"pool": "*i64", "page_ids": "*i64", "staging": "*i64", "page_words": "i32"}
    yield Build("gather", page_copy.gather, words, {"TILE": page_copy.TILE}, 8)
    yield Build("scatter", page_copy.scatter, words, {"TILE": page_copy.TILE}, 8)
    rows = {"logits": "*fp32", "numbers": "*fp64", "vocab_size": "i32", "row_stride": "i32"}
    rows |= dict.fromkeys(("top_k", "tokens"), "*i32")
    yield Build("draw_rows", draw.draw_rows, rows, {"TILE": draw.TILE}, draw.WARPS)


def _attention_types(dtype: torch.dtype) -> dict[str, str]:
    data = f"*{_SHORT[dtype]}"
    return {
        **dict.fromkeys(("query", "pages", "output"), data),
        **dict.fromkeys(("page_tables", "context_tokens"), "*i32"),
        **dict.fromkeys(("page_stride", "max_pages", "window"), "i32"),
        **dict.fromkeys(("scale", "soft_cap"), "fp32"),
    }


def _attention_constants(shape: _Heads, tile: Tile, soft_cap: bool) -> dict[str, object]:
    return {
        "HAS_SOFT_CAP": soft_cap,
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "PAGE_TOKENS": shape.page_tokens,
        "HEAD_DIM": shape.head_dim,
        "TILE_ROWS": tile.rows,
        "TILE_CONTEXT": tile.context,
        "TILE_HEAD_DIM": tile.head_dim,
    }


def _decode(shape: _Heads, *, splits: int, soft_cap: bool) -> Build:
    tile = decode_tile(shape.group, shape.head_dim, shape.dtype)
    types = _attention_types(shape.dtype) | {"rows": "*i32", "parts": "*fp32", "part_logsums": "*fp32"}
    constants = _attention_constants(shape, tile, soft_cap) | {"SPLITS": splits}
    name = f"attend_split {shape}, {splits} splits"
    return Build(name, paged_decode.attend_split, types, constants, tile.warps, tile.stages)


def _merge(shape: _Heads, *, splits: int) -> Build:
    types = {"parts": "*fp32", "part_logsums": "*fp32", "rows": "*i32", "output": f"*{_SHORT[shape.dtype]}"}
    constants = {
        "HEADS": shape.kv_heads * shape.group,
        "HEAD_DIM": shape.head_dim,
        "SPLITS": splits,
        "TILE_SPLITS": splits,
        "TILE_HEAD_DIM": next_power_of_two(shape.head_dim),
    }
    return Build(f"merge_splits {splits} of {shape.head_dim}", paged_decode.merge_splits, types, constants, 4)


def _prefill(shape: _Heads, *, soft_cap: bool) -> Build:
    tile = prefill_tile(shape.group, shape.head_dim, shape.dtype)
    types = _attention_types(shape.dtype) | {"first_rows": "*i32", "query_starts": "*i32", "chunks": "i32"}
    constants = _attention_constants(shape, tile, soft_cap)
    return Build(f"attend_chunks {shape}", paged_prefill.attend_chunks, types, constants, tile.warps, tile.stages)


def _rotate(shape: _Heads) -> Build:
    data = f"*{_SHORT[shape.dtype]}"
    types = {
        **dict.fromkeys(("query", "key", "value", "pages", "rotated"), data),
        **dict.fromkeys(("cos", "sin"), "*fp32"),
        **dict.fromkeys(("write_pages", "write_offsets"), "*i64"),
        **dict.fromkeys(("query_stride", "key_stride", "value_stride", "page_stride"), "i32"),
    }
    heads = shape.kv_heads * shape.group
    constants = {
        "HEADS": heads,
        "KV_HEADS": shape.kv_heads,
        "PAGE_TOKENS": shape.page_tokens,
        "HEAD_DIM": shape.head_dim,
        "TILE_HEADS": rotate_and_write.tile_heads(heads),
        "TILE_HALF": next_power_of_two(shape.head_dim // 2),
    }
    return Build(f"rotate_write {shape}", rotate_and_write.rotate_write, types, constants, 4)


_NORM_NUMBERS = {"eps": "fp32", "offset": "fp32"}


def _norm(size: int) -> Build:
    data = dict.fromkeys(("hidden", "weight", "output"), "*bf16")
    types = data | dict.fromkeys(("outer_stride", "inner_stride", "inner_rows"), "i32") | _NORM_NUMBERS
    constants = {"SIZE": size, "TILE": next_power_of_two(size)}
    return Build(f"normalize {size}", norms.normalize, types, constants, norms.row_warps(size))


def _add_norm(size: int) -> Build:
    types = dict.fromkeys(("residual", "hidden", "weight", "output"), "*bf16") | _NORM_NUMBERS
    constants = {"SIZE": size, "TILE": next_power_of_two(size)}
    return Build(f"add_normalize {size}", norms.add_normalize, types, constants, norms.row_warps(size))


BUILDS = tuple(_builds())
