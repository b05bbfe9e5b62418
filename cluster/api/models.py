"""The list of models: the one that is served."""

from splitserve.cluster.api.generation import find_model
from splitserve.cluster.api.reply import Json
from splitserve.cluster.api.service import Service


def model_object(service: Service, name: str | None = None) -> Json:
    """A ``model`` object. Raises ``ModelNotFound`` where ``name`` is not served; None asks for whatever is."""
    if name is not None:
        find_model(service, name)
    return {"id": service.model, "object": "model", "created": service.created, "owned_by": "splitserve"}


def model_list(service: Service) -> Json:
    """The ``list`` object of all models."""
    return {"object": "list", "data": [model_object(service)]}
