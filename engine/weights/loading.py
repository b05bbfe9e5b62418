"""Filling a model's parameters from its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from splitserve.engine.models.platform import Platform
from splitserve.engine.models.registry import Model, build_model
from splitserve.engine.platforms import plain_platform
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.model_files import ModelFiles, TensorInfo


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading has come. Bytes are those in the files, so before dequantising."""

    tensors: int
    total_tensors: int
    read_bytes: int
    total_bytes: int


Progress = Callable[[LoadProgress], None]


def load_model(files: ModelFiles, platform: Platform, progress: Progress | None = None) -> Model:
    """Build the model, fill its parameters and bring them into the form that is fastest on ``platform``.

    Whether config and tensors fit each other is known before memory is taken. Raises ModelLoadError.
    """
    check_fit(files)
    with torch.inference_mode():
        model = build_model(files.config, platform)
        load_weights(files, model.destinations(), progress)
        model.pack()
    return model


def load_weights(files: ModelFiles, destinations: Mapping[str, torch.Tensor], progress: Progress | None = None) -> None:
    """Copy every tensor of ``files`` to the destination of its name, converting dtype and device on the way.

    All names and shapes are checked before anything is read. Raises ModelLoadError, which lists what is missing,
    unexpected or of another shape.
    """
    _check(files.index, destinations)
    done = read_bytes = 0
    total_bytes = sum(info.stored_bytes for info in files.index.values())
    for name, tensor in files.tensors():
        destinations[name].copy_(tensor)
        del tensor  # before the next one is made
        done += 1
        read_bytes += files.index[name].stored_bytes
        if progress is not None:
            progress(LoadProgress(done, len(files.index), read_bytes, total_bytes))
    if done != len(destinations):
        raise ModelLoadError(f"only {done} of {len(destinations)} tensors could be read")


def check_fit(files: ModelFiles) -> None:
    """Compare config and tensors without taking memory for the model. Raises ModelLoadError.

    Sizes come first, because a damaged config may claim any: no dimension of a model is larger than the largest among
    its tensors, and each layer and expert has some of its own.
    """
    config, index = files.config, files.index
    experts = config.variation.experts
    networks = (config.layers - len(experts.dense_layers)) * experts.count if experts else 0
    for name, count in (("layers", config.layers), ("experts of all layers", networks)):
        if count > len(index):
            raise ModelLoadError(f"the weights do not fit the config: {len(index)} tensors for {count} {name}")
    largest = max((size for info in index.values() for size in info.shape), default=0)
    sizes = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "heads * head_dim": config.heads * config.head_dim,
    }
    for name, size in sizes.items():
        if size > largest:
            raise ModelLoadError(f"the weights do not fit the config: {name} is {size}, no tensor is so large")
    try:
        shapes = build_model(config, plain_platform(torch.device("meta"), torch.float32)).destinations()
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ModelLoadError(f"no model can have the sizes of this config: {error}") from error
    _check(index, shapes)


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
