"""A model in one GGUF file, or in the parts of one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.gguf_config import config_from_gguf
from splitserve.engine.weights.dequantizing import dequantize
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.gguf_file import open_gguf
from splitserve.engine.weights.gguf_names import GGUF_STORAGE
from splitserve.engine.weights.model_files import TensorInfo, fingerprint_of

_OUTPUT_HEAD = "output.weight"
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight, or one expert's slice of a stored one."""

    name: str  # on the hub
    data: npt.NDArray[np.generic]  # as ``dequantize`` takes it
    kind: gguf.GGMLQuantizationType


class GgufModel:
    """Implements ``ModelFiles``. Tensors of any type that the ``gguf`` package can dequantise come out as float32."""

    native_dtype = None  # how it is stored says nothing of how it was made to compute

    def __init__(self, file: Path) -> None:
        """``file`` may be the first of several parts. Raises ModelLoadError."""
        parts = open_gguf(file)
        self._file = file
        stored: dict[str, gguf.ReaderTensor] = {}
        for part in parts:
            for tensor in part.tensors:
                if tensor.name in stored:
                    raise ModelLoadError(f"{part.path}: tensor {tensor.name} is stored in two parts")
                stored[tensor.name] = tensor
        divisors = stored.pop(_ROPE_DIVISORS, None)
        try:
            self.config = config_from_gguf(
                parts[0].metadata,
                tied_embeddings=_OUTPUT_HEAD not in stored,
                rope_divisors=tuple(dequantize(divisors.data, divisors.tensor_type).ravel().tolist())
                if divisors is not None
                else None,
            )
        except ModelLoadError as error:
            raise ModelLoadError(f"{file}: {error}") from error
        self._storage = GGUF_STORAGE[self.config.architecture]
        self._weights = [weight for tensor in stored.values() for weight in self._split(tensor)]
        self.index = {weight.name: _info(weight) for weight in self._weights}
        self.fingerprint = fingerprint_of([part.path for part in parts], *(part.head for part in parts))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, float32 tensor), dequantised one at a time. Raises ModelLoadError."""
        for weight in self._weights:
            yield weight.name, torch.from_numpy(self._restored(weight))

    def _split(self, stored: gguf.ReaderTensor) -> Iterator[_Weight]:
        pattern = self._storage.expert_pattern(stored.name)
        if pattern is None or stored.data.ndim != 3:
            yield _Weight(self._storage.hf_name(stored.name), stored.data, stored.tensor_type)
            return
        for expert, data in enumerate(stored.data):
            yield _Weight(pattern.format(expert), data, stored.tensor_type)

    def _restored(self, weight: _Weight) -> npt.NDArray[np.float32]:
        """What was in the model before it was converted."""
        values = dequantize(weight.data, weight.kind)
        part = weight.name.rpartition(".")[0]
        if part.endswith("norm"):
            values -= self._storage.norm_offset
        elif self._storage.paired_rotary and part.endswith(("q_proj", "k_proj")):
            return self._halved(weight.name, values)
        return values

    def _halved(self, name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Back from rotary pairs next to each other to two halves per head. ``values``: [heads * head_dim, ...]."""
        heads = self.config.kv_heads if "k_proj" in name else self.config.heads
        rows, rest = len(values), values.shape[1:]
        if rows % (2 * heads):
            raise ModelLoadError(f"{self._file}: {name} has {rows} rows, not a multiple of 2 * {heads} heads")
        return values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def _info(weight: _Weight) -> TensorInfo:
    shape = weight.data.shape
    if weight.data.dtype == np.uint8:
        shape = gguf.quant_shape_from_byte_shape(shape, weight.kind)
    return TensorInfo(tuple(map(int, shape)), weight.data.nbytes)
