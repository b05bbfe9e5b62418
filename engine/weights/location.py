"""From the word that names a model to its files. Without torch, because a gateway needs only the tokenizer."""

import re
from collections.abc import Sequence
from pathlib import Path

from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.packaged_models import PACKAGED_MODELS

# What to download of a model on the hub. Pickled weights are never among it, nor are Mistral's own files of the same
# weights (consolidated.safetensors).
WEIGHT_FILES = ("model*.safetensors", "*.json")
TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")

_WORD = r"\w(?:[\w.-]*\w)?"
_HUB_ID = re.compile(rf"(?P<name>{_WORD}/{_WORD})(?:@(?P<revision>(?!.*\.\.)\w[\w./-]*))?", re.ASCII)
_FORMS = (
    f"a .gguf file, a folder of safetensors, org/name or org/name@revision on the hub, {', '.join(PACKAGED_MODELS)}"
)


def locate(model: str, wanted: Sequence[str]) -> Path:
    """The local file or folder that ``model`` names.

    ``model`` is the short name of a packaged model, a local path, or ``org/name`` or ``org/name@revision`` on the
    Hugging Face hub, where the revision is a branch, a tag or a commit; without one it is the branch ``main``. The
    first that exists wins, in this order. Only an id reaches for the network: the files of its repository that match
    one of the patterns ``wanted`` are downloaded, unless the local cache has them. Raises ModelLoadError.
    """
    if model in PACKAGED_MODELS:
        return PACKAGED_MODELS[model].locate()
    if not model.strip() or "\0" in model:
        raise ModelLoadError(f"{model!r} names no model; expected {_FORMS}")
    local = Path(model).expanduser()
    try:
        if local.exists():
            return local
    except OSError as error:  # such as a name that is too long
        raise ModelLoadError(f"{model} cannot be opened: {error}") from error
    if _looks_local(model):
        raise ModelLoadError(f"{model} does not exist")
    hub_id = _HUB_ID.fullmatch(model)
    if hub_id is None:
        raise ModelLoadError(f"{model!r} does not exist and is no id on the hub; expected {_FORMS}")
    return _download(hub_id["name"], hub_id["revision"], wanted)


def _looks_local(model: str) -> bool:
    name = model.partition("@")[0]
    return model.startswith(("/", ".", "~")) or name.count("/") != 1 or model.endswith(".gguf")


def _download(name: str, revision: str | None, wanted: Sequence[str]) -> Path:
    # Imported here: most starts need no hub, and the import costs what opening a local model does.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(wanted)))
    except Exception as error:  # the hub raises requests', httpx' and its own exceptions
        at = f" at revision {revision}" if revision else ""
        raise ModelLoadError(
            f"{name} is neither a local path nor a model that can be downloaded{at}: {error}"
        ) from error
