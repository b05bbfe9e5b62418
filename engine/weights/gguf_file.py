"""GGUF files as they are stored: metadata, and tensors under GGUF's own names."""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from splitserve.engine.weights.dequantizing import can_dequantize
from splitserve.engine.weights.errors import ModelLoadError

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS = 10_000
_ARRAY_HEAD_BYTES = 12  # the items' type and their number
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file, mapped into memory."""

    path: Path
    metadata: dict[str, Any]  # of an array of strings only how many there are, as a range: workers need no tokenizer
    tensors: tuple[gguf.ReaderTensor, ...]
    head: bytes  # everything before the tensors' data


def open_gguf(path: Path) -> list[GgufFile]:
    """The file at ``path``, and where it is the first of several parts, all of them in order.

    Raises ModelLoadError for files that are missing, damaged, of a type that cannot be read, or don't belong together.
    """
    first = _open(path)
    count = _whole_number(first, "split.count")
    if count <= 1:
        return [first]
    name = _PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count or count > _MOST_PARTS:
        raise ModelLoadError(f"{path} is one of {count} parts, but not named like one: NAME-00001-of-{count:05}.gguf")
    paths = [path.with_name(f"{name['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if (number := _whole_number(first, "split.no")) != 0:
        raise ModelLoadError(f"{path} is part {number + 1} of {count}; name the first one, {paths[0].name}")
    parts = [first, *map(_open, paths[1:])]
    for number, part in enumerate(parts):
        said = (_whole_number(part, "split.no"), _whole_number(part, "split.count"))
        if said != (number, count):
            raise ModelLoadError(f"{part.path} says that it is part {said[0] + 1} of {said[1]}")
    there, expected = sum(len(part.tensors) for part in parts), _whole_number(first, "split.tensors.count")
    if expected not in (0, there):
        raise ModelLoadError(f"{path} and its other parts hold {there} tensors instead of {expected}")
    return parts


def _open(path: Path) -> GgufFile:
    try:
        with np.errstate(all="ignore"):  # a damaged number may overflow; then what it counts is not there
            reader = _Reader(path)
            metadata = {name: _value(field) for name, field in reader.fields.items()}
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    except (IndexError, struct.error) as error:
        raise ModelLoadError(f"{path} is truncated: it ends within its header") from error
    except Exception as error:  # the reader takes a file at its word and raises whatever comes of it
        raise ModelLoadError(f"{path} is truncated, damaged or not GGUF of version 2 or 3: {error}") from error
    if reader.byte_order != "I":
        raise ModelLoadError(f"{path} was written for machines of the other byte order")
    for tensor in reader.tensors:
        if not can_dequantize(tensor.tensor_type):
            raise ModelLoadError(
                f"{path}: tensor {tensor.name} of type {tensor.tensor_type.name} cannot be dequantised"
            )
        if not tensor.data.size:
            raise ModelLoadError(f"{path}: tensor {tensor.name} is empty")
    return GgufFile(path, metadata, tuple(reader.tensors), reader.data[: reader.data_offset].tobytes())


def _whole_number(file: GgufFile, key: str) -> int:
    value = file.metadata.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelLoadError(f"{file.path}: {key} must be a whole number, got {value!r}")
    return value


def _value(field: gguf.ReaderField) -> Any:
    if field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:
        return range(int(field.parts[-1][0]))
    return field.contents()


class _Reader(gguf.GGUFReader):  # type: ignore[misc]  # the package has no types
    """Reads in milliseconds what takes its parent seconds, and 100 MB: a view for each word of the vocabulary."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        # Every slice of a memmap costs several times as much as one of a plain array over the same memory.
        self._data = np.asarray(mapped)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """(size in bytes, views, indices of those that are data, types); of an array of strings only the length."""
        array, string = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING
        if raw_type != array or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        start = int(orig_offs)
        item = gguf.GGUFValueType(int(self._get(start, np.uint32)[0]))
        count = self._get(start + 4, np.uint64)
        at = start + _ARRAY_HEAD_BYTES
        if item == string:
            mapped = self._data.data
            for _ in range(int(count[0])):
                at += _LENGTH.size + _LENGTH.unpack_from(mapped, at)[0]
            return at - start, [count], [0], [array, item]
        if item == array:
            raise ValueError("arrays of arrays are not supported")
        items = self._get(at, self.gguf_scalar_to_np[item], int(count[0]))
        if len(items) != count[0]:
            raise IndexError(at)
        return at + items.nbytes - start, [items], [0], [array, item]
