"""A NIXL agent with one backend, or a clear word why there is none."""

import logging
import os
from typing import Any

from splitserve.kvtransfer.settings import TransportSettings

logger = logging.getLogger(__name__)

# Understood by the UCX plugin of NIXL 1.5 beside those that it lists.
_UNLISTED = {"UCX": {"engine_config", "num_threads", "split_batch_size"}}


class BackendError(RuntimeError):
    """NIXL or its backend is not there, or refuses its parameters."""


def new_agent(name: str, settings: TransportSettings) -> Any:
    """An agent that reads memory through ``settings.backend`` and has no thread of its own. Raises BackendError."""
    backend, parameters = settings.backend, settings.parameters
    try:
        # Here, not at the top: the import loads CUDA libraries, and only workers that move pages need it.
        from nixl._api import nixl_agent, nixl_agent_config

        if "NIXL_LOG_LEVEL" not in os.environ:  # NIXL's import sets its own level, and writes to standard output
            logging.getLogger("nixl").setLevel(logging.WARNING)
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    except Exception as error:
        raise BackendError(f"NIXL cannot be used here: {error}") from error
    listed = _parameters_of(agent, backend)
    if listed is None:
        raise BackendError(_missing(agent, backend))
    for key in sorted(set(parameters) - set(listed) - _UNLISTED.get(backend, set())):
        logger.warning("parameters: %s is not among those that %s lists (%s)", key, backend, ", ".join(sorted(listed)))
    try:
        agent.create_backend(backend, dict(parameters))
    except Exception as error:
        raise BackendError(f"backend {backend} with parameters {parameters}: {error}") from error
    try:
        agent.get_agent_metadata()
    except Exception as error:
        raise BackendError(f"backend {backend} does not move memory between processes: {error}") from error
    return agent


def _parameters_of(agent: Any, plugin: str) -> dict[str, str] | None:
    """A plugin's parameters and their defaults; None when it cannot be loaded."""
    if plugin not in agent.get_plugin_list():
        return None
    try:
        parameters, _ = agent.agent.getPluginParams(plugin)
    except Exception:
        return None
    return dict(parameters)


def _missing(agent: Any, backend: str) -> str:
    installed = agent.get_plugin_list()
    usable = sorted(plugin for plugin in installed if _parameters_of(agent, plugin) is not None)
    why = "is installed, but a library that it needs is not" if backend in installed else "is missing"
    return f"backend {backend}: NIXL's plugin of that name {why}; those that load here: {', '.join(usable) or 'none'}"
