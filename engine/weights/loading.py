"""Filling a model's parameters from its files."""

from collections.abc import Callable, Mapping

import torch

from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.model_files import ModelFiles, TensorInfo

Progress = Callable[[int, int, int], None]  # (tensors done, tensors in total, bytes read so far)


def load_weights(files: ModelFiles, destinations: Mapping[str, torch.Tensor], progress: Progress | None = None) -> None:
    """Copy every tensor of ``files`` to the destination of its name, converting dtype and device on the way.

    All names and shapes are checked before anything is read. Raises ModelLoadError, which lists what is missing,
    unexpected or of another shape.
    """
    _check(files.index, destinations)
    done = read_bytes = 0
    for name, tensor in files.tensors():
        destinations[name].copy_(tensor)
        done += 1
        read_bytes += files.index[name].stored_bytes
        if progress is not None:
            progress(done, len(files.index), read_bytes)
    if done != len(destinations):
        raise ModelLoadError(f"only {done} of {len(destinations)} tensors could be read")


def _check(index: Mapping[str, TensorInfo], destinations: Mapping[str, torch.Tensor]) -> None:
    problems = [f"missing {name}" for name in destinations if name not in index]
    problems += [f"unexpected {name}" for name in index if name not in destinations]
    problems += [
        f"{name} has shape {list(info.shape)} instead of {list(destinations[name].shape)}"
        for name, info in index.items()
        if name in destinations and info.shape != tuple(destinations[name].shape)
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ModelLoadError(f"the weights do not fit the config: {'; '.join(problems[:8])}{more}")
