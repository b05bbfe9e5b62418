"""A Llama model in one GGUF file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.model_config import config_from_gguf
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.model_files import TensorInfo, fingerprint_of

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
        """Seconds for a large vocabulary. Raises ModelLoadError."""
        self._file = file
        with _reported(file):
            # Only the tensors are kept: the reader's fields are a view for each word of the vocabulary, 100 MB of them.
            reader = gguf.GGUFReader(file)
            metadata = _metadata(reader)
        if reader.byte_order != "I":
            raise ModelLoadError(f"{file} was written for machines of the other byte order")
        if metadata.get("split.count", 1) > 1:
            raise ModelLoadError(f"{file} is one of {metadata['split.count']} parts; merge them with gguf-split first")
        stored = {tensor.name: tensor for tensor in reader.tensors}
        divisors = stored.pop(_ROPE_DIVISORS, None)
        self.config = config_from_gguf(
            metadata,
            tied_embeddings="output.weight" not in stored,
            rope_divisors=tuple(self._dequantize(divisors).tolist()) if divisors is not None else None,
        )
        self._by_name = {_hf_name(name): tensor for name, tensor in stored.items()}
        self.index = {
            name: TensorInfo(tuple(map(int, reversed(tensor.shape))), tensor.n_bytes)  # GGUF: fastest dimension first
            for name, tensor in self._by_name.items()
        }
        self.fingerprint = fingerprint_of([file], reader.data[: reader.data_offset].tobytes())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, float32 tensor), dequantised one at a time. Raises ModelLoadError."""
        heads = {"q_proj.weight": self.config.heads, "k_proj.weight": self.config.kv_heads}
        for name, stored in self._by_name.items():
            array = self._dequantize(stored)
            for suffix, count in heads.items():
                if name.endswith(suffix):
                    array = _unpermute(array, count)
            yield name, torch.from_numpy(array)

    def _dequantize(self, stored: gguf.ReaderTensor) -> npt.NDArray[np.float32]:
        """A writable array of its own, in the shape that ``index`` gives."""
        try:
            # asarray, because every slice of a memmap costs more than one of a plain array
            array = gguf.quants.dequantize(np.asarray(stored.data), stored.tensor_type)
        except (NotImplementedError, ValueError) as error:
            kind = stored.tensor_type.name
            raise ModelLoadError(
                f"{self._file}: tensor {stored.name} of type {kind} cannot be dequantised: {error}"
            ) from error
        return np.require(array, np.float32, "W")


@contextmanager
def _reported(file: Path) -> Iterator[None]:
    """Turn what ``GGUFReader`` raises into ModelLoadError."""
    try:
        yield
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    except IndexError as error:
        raise ModelLoadError(f"{file} is truncated: it ends within its header") from error
    except (KeyError, ValueError) as error:
        raise ModelLoadError(f"{file} is truncated, damaged or not GGUF of version 2 or 3: {error}") from error


def _metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """All metadata, but of the tokenizer's long arrays only a list of the same length: workers need no tokenizer."""
    return {
        name: field.data
        if name.startswith("tokenizer.") and field.types[0] is gguf.GGUFValueType.ARRAY
        else field.contents()
        for name, field in reader.fields.items()
    }


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
