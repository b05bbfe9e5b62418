"""A validated request, ready to be computed, whatever endpoint it came through."""

from dataclasses import dataclass

from splitserve.cluster.api.errors import ModelNotFound
from splitserve.cluster.api.fields import Fields, check_text
from splitserve.cluster.api.service import Service
from splitserve.engine.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """Prompt tokens and what to do with what follows them."""

    prompt: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    include_usage: bool = False
    continues: bool = False  # the text goes on from the prompt's, where a chat's answer is one of its own


def check_model(service: Service, fields: Fields) -> None:
    """Take ``model``. Raises ``MissingField`` or ``ModelNotFound``."""
    find_model(service, check_text(fields.require("model"), "model"))


def find_model(service: Service, name: str) -> None:
    """Raise ``ModelNotFound`` unless ``name`` is served."""
    if name != service.model:
        raise ModelNotFound(f"The model '{name[:256]}' does not exist; '{service.model}' is served here.", "model")
