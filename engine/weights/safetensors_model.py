"""A model in a Hugging Face folder: config.json and safetensors, in one file or sharded with an index."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from splitserve.engine.hf_config import config_from_hf
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.model_files import TensorInfo, fingerprint_of
from splitserve.engine.weights.safetensors_names import weight_name

_SINGLE = "model.safetensors"
_SHARD_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST_JSON_BYTES = 64 << 20
_GROUP_BYTES = 256 << 20
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_NATIVE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(slots=True)
class _Group:
    """Tensors of one file that are read through one mapping. What is read stays resident until the file is unmapped, so
    a large file is mapped several times, one after the other.
    """

    shard: Path
    stored_names: list[str] = field(default_factory=list)
    stored_bytes: int = 0


class SafetensorsModel:
    """Implements ``ModelFiles``. Tensors come out in the dtype they are stored in."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelLoadError."""
        config = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        try:
            self.config = config_from_hf(config, _read_json(generation) if generation.exists() else None)
        except ModelLoadError as error:
            raise ModelLoadError(f"{folder}: {error}") from error
        self._shards = _shards(folder)
        self.index: dict[str, TensorInfo] = {}
        self._stored: set[str] = set()
        self._groups: list[_Group] = []
        stored_bytes: Counter[str] = Counter()  # by dtype
        for shard in self._shards:
            self._add_to_index(shard, stored_bytes)
        if not self.index:
            raise ModelLoadError(f"{self._shards[0]} holds no weights")
        self._check_shard_index(folder)
        if self.config.tied_embeddings:
            self.index.pop("lm_head.weight", None)  # some files store the tied head as well
        self.native_dtype = _named_dtype(config) or _NATIVE_DTYPES.get(max(stored_bytes, key=stored_bytes.__getitem__))
        description = json.dumps({name: info.shape for name, info in sorted(self.index.items())})
        self.fingerprint = fingerprint_of(
            self._shards, json.dumps(config, sort_keys=True).encode(), description.encode()
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor in its stored dtype), file by file. Raises ModelLoadError."""
        for group in self._groups:
            try:
                with safe_open(group.shard, framework="pt") as stream:
                    for stored in group.stored_names:
                        name = weight_name(stored)
                        if name in self.index:
                            yield name, stream.get_tensor(stored)
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{group.shard} cannot be read: {error}") from error

    def _add_to_index(self, shard: Path, stored_bytes: Counter[str]) -> None:
        if not shard.is_file():
            raise ModelLoadError(f"{shard} is missing")
        group = _Group(shard)
        self._groups.append(group)
        try:
            with safe_open(shard, framework="pt") as stream:
                for stored in stream.keys():  # noqa: SIM118 - not a dict
                    self._stored.add(stored)
                    name = weight_name(stored)
                    if name is None:
                        continue
                    view = stream.get_slice(stored)
                    shape, dtype = tuple(view.get_shape()), view.get_dtype()
                    if dtype not in _BITS:
                        raise ModelLoadError(
                            f"{shard}: tensor {stored} has dtype {dtype}, which is not supported;"
                            f" supported: {', '.join(_BITS)}"
                        )
                    if name in self.index:
                        raise ModelLoadError(f"{shard}: tensor {name} is stored twice")
                    self.index[name] = TensorInfo(shape, torch.Size(shape).numel() * _BITS[dtype] // 8)
                    size = self.index[name].stored_bytes
                    stored_bytes[dtype] += size
                    if group.stored_bytes and group.stored_bytes + size > _GROUP_BYTES:
                        group = _Group(shard)
                        self._groups.append(group)
                    group.stored_names.append(stored)
                    group.stored_bytes += size
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{shard} is truncated, damaged or not safetensors: {error}") from error

    def _check_shard_index(self, folder: Path) -> None:
        if (folder / _SHARD_INDEX).exists() and (lost := sorted(set(_weight_map(folder)) - self._stored)):
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            raise ModelLoadError(
                f"{folder / _SHARD_INDEX} names tensors that its files lack: {', '.join(lost[:5])}{more}"
            )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > _MOST_JSON_BYTES:
            raise ModelLoadError(f"{file} has {size} bytes, more than {_MOST_JSON_BYTES}")
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return value


def _named_dtype(config: dict[str, Any]) -> str | None:
    """What the config says, in either spelling, for the whole model or its text part."""
    text = config.get("text_config") or {}
    for said in (config, text):
        for key in ("dtype", "torch_dtype"):
            if said.get(key) in _NATIVE_DTYPES.values():
                return str(said[key])
    return None


def _weight_map(folder: Path) -> dict[str, str]:
    """File names by tensor names."""
    weight_map = _read_json(folder / _SHARD_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{folder / _SHARD_INDEX} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise ModelLoadError(
                f"{folder / _SHARD_INDEX}: weight_map names the file {name!r} for {tensor}, outside the folder"
            )
    return weight_map


def _shards(folder: Path) -> list[Path]:
    if (folder / _SHARD_INDEX).exists():
        return [folder / name for name in sorted(set(_weight_map(folder).values()))]
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    problem = f"{folder} holds neither {_SINGLE} nor {_SHARD_INDEX}"
    if pickled := sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern)):
        problem += f"; it holds pickled weights ({pickled[0]}), which are never read because they can run any program"
    elif ggufs := sorted(folder.glob("*.gguf")):
        problem += f"; to serve its GGUF file, name the file itself: {ggufs[0]}"
    else:
        problem += "; pickled weights are neither downloaded nor read"
    raise ModelLoadError(problem)
