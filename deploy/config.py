"""The configuration file: YAML into frozen settings, unknown keys refused by name."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from splitserve.cluster.settings import AppSettings, ListenSettings

Settings = TypeVar("Settings", bound=AppSettings)


class ConfigError(ValueError):
    """The configuration can't be used; the message names the file or key and what is wrong with it."""


class ServeSettings(AppSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``splitserve serve`` needs: the application, where it listens, and on which Ray."""

    listen: ListenSettings = msgspec.field(default_factory=ListenSettings)
    # auto: join the cluster that runs on this machine or that RAY_ADDRESS names, else start one; local: start one
    ray_address: str = "auto"


def app_settings(args: dict[str, Any]) -> AppSettings:
    """Validate the ``args`` of a Serve config file. Raises ConfigError."""
    return _convert(args, AppSettings)


def serve_settings(file: Path | None, overrides: dict[str, Any]) -> ServeSettings:
    """Read ``file`` if there is one and put ``overrides`` over it: dotted keys to values. Raises ConfigError."""
    values = _read(file) if file is not None else {}
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        at = values
        for section in sections:
            inner = at.get(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"configuration: Expected `object`, got `{inner!r}` - at `$.{section}`")
            at[section] = dict(inner)  # with YAML's anchors two sections may be one object
            at = at[section]
        at[key] = value
    return _convert(values, ServeSettings)


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no text, or a date that is none
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected keys and values, got {type(values).__name__}")
    return values


def _convert(values: dict[str, Any], kind: type[Settings]) -> Settings:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from error
