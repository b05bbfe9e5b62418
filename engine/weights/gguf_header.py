"""The header of a GGUF file: metadata and tensor index.

The ``gguf`` package's reader keeps every array element as its own numpy view, which takes seconds for a tokenizer's
vocabulary; workers need the header at each start, so it is parsed here in a fraction of that.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from splitserve.engine.weights.errors import ModelLoadError

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor index."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, the order of numpy and torch
    quantization: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything in front of the tensor data."""

    metadata: dict[str, Any]  # scalars, str, or lists of them
    tensors: tuple[GgufTensor, ...]
    header_bytes: int


class _Cursor:
    """Reads values one after the other. IndexError-free: running off the end is reported as a truncated file."""

    def __init__(self, data: "np.memmap[Any, np.dtype[np.uint8]]", file: Path) -> None:
        self.data = data.data
        self.file = file
        self.at = 0

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.data):
            raise ModelLoadError(
                f"{self.file} is truncated: its header goes on at byte {self.at}, the file ends at {len(self.data)}"
            )
        view = self.data[self.at : end]
        self.at = end
        return view

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        return str(self.take(self.u64()), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.u32(), self.u64()
            if inner in _SCALARS:
                return self.scalars(inner, count)
            return [self.value(inner) for _ in range(count)]
        return self.scalars(kind, 1)[0]

    def scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.file}: unknown metadata type {kind} at byte {self.at}")
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values


def read_gguf_header(file: Path) -> GgufHeader:
    """Parse the header of ``file`` and check that the data of all tensors lies inside it.

    Raises ModelLoadError for a missing, foreign, split, big-endian or truncated file.
    """
    try:
        data = np.memmap(file, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    cursor = _Cursor(data, file)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ModelLoadError(f"{file} is not a GGUF file")
    version = cursor.u32()
    if version not in (2, 3):
        raise ModelLoadError(f"{file}: GGUF version {version} is not supported; supported: 2, 3 (little-endian)")
    tensor_count, pair_count = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.u32())
    if metadata.get("split.count", 1) > 1:
        raise ModelLoadError(f"{file} is one of {metadata['split.count']} parts; merge them with gguf-split first")
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    header_bytes = cursor.at
    alignment = metadata.get("general.alignment", 32)
    data_start = -(-header_bytes // alignment) * alignment
    tensors = tuple(_placed(entry, data_start, len(data), file) for entry in entries)
    return GgufHeader(metadata, tensors, header_bytes)


def _tensor_entry(cursor: _Cursor) -> GgufTensor:
    name = cursor.string()
    dimensions = [cursor.u64() for _ in range(cursor.u32())]
    kind, offset = cursor.u32(), cursor.u64()
    try:
        quantization = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    except (ValueError, KeyError) as error:
        raise ModelLoadError(f"{cursor.file}: tensor {name} has the unknown type {kind}") from error
    return GgufTensor(name, tuple(reversed(dimensions)), quantization, offset, prod(dimensions) // block * block_bytes)


def _placed(entry: GgufTensor, data_start: int, file_bytes: int, file: Path) -> GgufTensor:
    offset = data_start + entry.offset
    if offset + entry.stored_bytes > file_bytes:
        raise ModelLoadError(f"{file} is truncated: tensor {entry.name} ends after the file's {file_bytes} bytes")
    return GgufTensor(entry.name, entry.shape, entry.quantization, offset, entry.stored_bytes)
