"""What is known of a model's files before and while they are read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import torch

from splitserve.engine.model_config import ModelConfig

_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor."""

    shape: tuple[int, ...]  # as the model uses it: [out, in] for a projection
    stored_bytes: int  # in the file, so before dequantising


class ModelFiles(Protocol):
    """A model on disk, opened and checked for form; no tensor has been read yet."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def native_dtype(self) -> str | None:
        """In which dtype the model was made to compute, by torch's name; None where the files do not say."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal files whatever folder they lie in. Covers names, sizes, config, tensor index and samples of
        the data.
        """

    @property
    def index(self) -> Mapping[str, TensorInfo]:
        """The weights by their Hugging Face names."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) for everything in ``index``, one at a time, so that the model is never held twice.

        Raises ModelLoadError when a file has become unreadable.
        """


def fingerprint_of(files: list[Path], *descriptions: bytes) -> str:
    """Hash names, sizes and evenly spaced samples of ``files``, and ``descriptions`` (config and tensor index).

    Samples, because two fine-tunes of one model agree in everything else; not all bytes, because every worker does this
    at start.
    """
    digest = blake2b(digest_size=16)
    for description in descriptions:
        digest.update(len(description).to_bytes(8, "little") + description)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}\n{size}\n".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
