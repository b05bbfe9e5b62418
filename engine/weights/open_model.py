"""From the word that names a model to its opened files."""

from splitserve.engine.weights.gguf_model import GgufModel
from splitserve.engine.weights.location import WEIGHT_FILES, locate
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.engine.weights.safetensors_model import SafetensorsModel


def open_model(model: str) -> ModelFiles:
    """Open a GGUF file (of several parts: the first), a folder of safetensors, or what else ``location.locate`` knows.

    Raises ModelLoadError.
    """
    place = locate(model, WEIGHT_FILES)
    return SafetensorsModel(place) if place.is_dir() else GgufModel(place)
