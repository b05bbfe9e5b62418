"""From files into a model's parameters."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_models.random_model import RandomModel
from engine_models.written_files import PLAIN, WEIGHTS, write_folder, write_gguf
from splitserve.engine.models.registry import build_model
from splitserve.engine.platforms import plain_platform
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.loading import LoadProgress, load_model, load_weights
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.engine.weights.open_model import open_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_arrive_in_the_wanted_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    files = open_model(str(write_folder(tmp_path, WEIGHTS)))
    with torch.inference_mode():
        destinations = build_model(files.config, plain_platform(CPU, dtype)).destinations()
        load_weights(files, destinations)
    assert destinations.keys() == WEIGHTS.keys()
    for name, destination in destinations.items():
        assert torch.equal(destination, WEIGHTS[name].to(dtype))


def test_progress_counts_tensors_and_bytes_to_the_end(tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    load_model(open_model(str(write_gguf(tmp_path / "m.gguf"))), plain_platform(CPU, torch.float32), seen.append)
    total_bytes = sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert [loaded.tensors for loaded in seen] == list(range(1, len(WEIGHTS) + 1))
    assert {(loaded.total_tensors, loaded.total_bytes) for loaded in seen} == {(len(WEIGHTS), total_bytes)}
    assert [loaded.read_bytes for loaded in seen] == sorted({loaded.read_bytes for loaded in seen})
    assert seen[-1].read_bytes == total_bytes


class Watched:
    """``ModelFiles`` that notices when a tensor outlives its turn."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.config, self.index = files.config, files.index
        self.fingerprint, self.native_dtype = files.fingerprint, files.native_dtype

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._files.tensors()
        while (pair := next(tensors, None)) is not None:
            watched, handed_on = weakref.ref(pair[1]), [pair]
            del pair
            yield handed_on.pop()
            assert watched() is None


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_no_tensor_outlives_its_turn(kind: str, tmp_path: Path) -> None:
    place = write_gguf(tmp_path / "m.gguf") if kind == "gguf" else write_folder(tmp_path, WEIGHTS)
    load_model(Watched(open_model(str(place))), plain_platform(CPU, torch.bfloat16))


class Forgetful(RandomModel):
    """Stops before the last tensor."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(super().tensors())[:-1]


def test_files_that_end_early_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=f"only {len(WEIGHTS) - 1} of {len(WEIGHTS)} tensors"):
        load_model(Forgetful(PLAIN), plain_platform(CPU, torch.float32))
