"""A Llama model in one GGUF file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.model_config import config_from_gguf
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.gguf_header import GgufTensor, read_gguf_header
from splitserve.engine.weights.model_files import TensorInfo, TokenizerSource, fingerprint_of

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufModel:
    """Implements ``ModelFiles``. Tensors of any type that the ``gguf`` package can dequantise come out as float32."""

    def __init__(self, file: Path) -> None:
        """Raises ModelLoadError."""
        header = read_gguf_header(file)
        stored = {tensor.name: tensor for tensor in header.tensors}
        self._file = file
        self._data = np.memmap(file, dtype=np.uint8, mode="r")
        divisors = stored.pop(_ROPE_DIVISORS, None)
        self.config = config_from_gguf(
            header.metadata,
            tied_embeddings="output.weight" not in stored,
            rope_divisors=tuple(self._dequantize(divisors).tolist()) if divisors is not None else None,
        )
        self._by_name = {_hf_name(name): tensor for name, tensor in stored.items()}
        self.index = {name: TensorInfo(tensor.shape, tensor.stored_bytes) for name, tensor in self._by_name.items()}
        self.tokenizer_source = TokenizerSource(file.parent, file.name)
        self.fingerprint = fingerprint_of([file], self._data[: header.header_bytes].tobytes())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, float32 tensor), dequantised one at a time. Raises ModelLoadError."""
        heads = {"q_proj.weight": self.config.heads, "k_proj.weight": self.config.kv_heads}
        for name, stored in self._by_name.items():
            array = self._dequantize(stored)
            for suffix, count in heads.items():
                if name.endswith(suffix):
                    array = _unpermute(array, count)
            yield name, torch.from_numpy(np.ascontiguousarray(array))

    def _dequantize(self, stored: GgufTensor) -> npt.NDArray[np.float32]:
        raw = self._data[stored.offset : stored.offset + stored.stored_bytes]
        try:
            array = gguf.quants.dequantize(_typed(raw, stored), stored.quantization)
        except (NotImplementedError, ValueError) as error:
            kind = stored.quantization.name
            raise ModelLoadError(
                f"{self._file}: tensor {stored.name} of type {kind} cannot be dequantised: {error}"
            ) from error
        values: npt.NDArray[np.float32] = array.reshape(stored.shape).astype(np.float32, copy=True)
        return values


def _typed(raw: npt.NDArray[np.uint8], stored: GgufTensor) -> npt.NDArray[Any]:
    if stored.quantization is gguf.GGMLQuantizationType.F32:
        return raw.view(np.float32)
    if stored.quantization is gguf.GGMLQuantizationType.F16:
        return raw.view(np.float16)
    return raw.reshape(*stored.shape[:-1], -1)


def _hf_name(name: str) -> str:
    """Names without a counterpart are kept, so that they are reported as unexpected."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    return name


def _unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Back from GGUF's interleaved rotary pairs to two halves per head. ``weight``: [heads * head_dim, in]."""
    rows, columns = weight.shape
    if rows % (2 * heads):
        raise ModelLoadError(f"a query or key projection has {rows} rows, not a multiple of 2 * {heads} heads")
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
