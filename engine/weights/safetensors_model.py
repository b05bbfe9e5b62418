"""A model in a Hugging Face folder: config.json and safetensors, in one file or sharded with an index."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from splitserve.engine.model_config import config_from_hf
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.model_files import TensorInfo, fingerprint_of

_SINGLE = "model.safetensors"
_SHARD_INDEX = "model.safetensors.index.json"
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsModel:
    """Implements ``ModelFiles``. Tensors come out in the dtype they are stored in."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelLoadError."""
        config = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.config = config_from_hf(config, _read_json(generation) if generation.exists() else None)
        self._shards = _shards(folder)
        self.index: dict[str, TensorInfo] = {}
        for shard in self._shards:
            self._add_to_index(shard)
        self._check_shard_index(folder)
        if self.config.tied_embeddings:
            self.index.pop("lm_head.weight", None)  # some files store the tied head as well
        description = json.dumps({name: info.shape for name, info in sorted(self.index.items())})
        self.fingerprint = fingerprint_of(
            self._shards, json.dumps(config, sort_keys=True).encode(), description.encode()
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor in its stored dtype), file by file. Raises ModelLoadError."""
        for shard in self._shards:
            try:
                with safe_open(shard, framework="pt") as stream:
                    for name in stream.keys():  # noqa: SIM118 - not a dict
                        if name in self.index:
                            yield name, stream.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{shard} cannot be read: {error}") from error

    def _add_to_index(self, shard: Path) -> None:
        try:
            with safe_open(shard, framework="pt") as stream:
                for name in stream.keys():  # noqa: SIM118
                    stored = stream.get_slice(name)
                    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
                    if name.endswith("rotary_emb.inv_freq"):
                        continue  # old files store this table; it follows from the config
                    if dtype not in _DTYPE_BYTES:
                        raise ModelLoadError(
                            f"{shard}: tensor {name} has type {dtype}; supported: {', '.join(_DTYPE_BYTES)}"
                        )
                    if name in self.index:
                        raise ModelLoadError(f"{shard}: tensor {name} is stored in two files")
                    self.index[name] = TensorInfo(shape, torch.Size(shape).numel() * _DTYPE_BYTES[dtype])
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{shard} is missing, truncated or not safetensors: {error}") from error

    def _check_shard_index(self, folder: Path) -> None:
        if (folder / _SHARD_INDEX).exists():
            named = set(_read_json(folder / _SHARD_INDEX)["weight_map"])
            if lost := sorted(name for name in named - set(self.index) if not name.endswith("rotary_emb.inv_freq")):
                raise ModelLoadError(
                    f"{folder / _SHARD_INDEX} names tensors that its files lack: {', '.join(lost[:5])}"
                )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return value


def _shards(folder: Path) -> list[Path]:
    if not (folder / _SHARD_INDEX).exists():
        if not (folder / _SINGLE).exists():
            raise ModelLoadError(f"{folder} holds neither {_SINGLE} nor {_SHARD_INDEX}; pickled weights are never read")
        return [folder / _SINGLE]
    weight_map = _read_json(folder / _SHARD_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{folder / _SHARD_INDEX} has no weight_map")
    names = sorted(set(weight_map.values()))
    if foreign := [name for name in names if Path(name).name != name]:
        raise ModelLoadError(f"{folder / _SHARD_INDEX} names files outside its folder: {', '.join(foreign)}")
    return [folder / name for name in names]
