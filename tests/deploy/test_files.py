"""The YAML files that are shipped in ``deploy/`` are what the program reads."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import splitserve.deploy
from splitserve.cluster.settings import AppSettings
from splitserve.deploy.config import ServeSettings, app_settings, serve_settings

FOLDER = Path(splitserve.deploy.__file__).resolve().parent
FILES = sorted([*FOLDER.rglob("*.yaml"), *FOLDER.rglob("*.yml")])


def serve_configs(content: Any) -> list[dict[str, Any]]:
    """Serve configs in a document: itself, or inside, as an object or (as KubeRay has it) as text."""
    if isinstance(content, str) and "applications:" in content:
        return serve_configs(yaml.safe_load(content))
    if isinstance(content, list):
        return [config for part in content for config in serve_configs(part)]
    if not isinstance(content, dict):
        return []
    return [content] if "applications" in content else serve_configs(list(content.values()))


CONFIGS = [
    pytest.param(config, id=file.name)
    for file in FILES
    for document in yaml.safe_load_all(file.read_text())
    for config in serve_configs(document)
]


def test_there_are_files() -> None:
    assert {"serve.yaml", "splitserve.yaml"} <= {file.name for file in FILES}
    assert CONFIGS


@pytest.mark.parametrize("config", CONFIGS)
def test_a_serve_config_builds(config: dict[str, Any]) -> None:
    for application in config["applications"]:
        assert application["import_path"] == "splitserve.deploy:build_app"
        assert isinstance(app_settings(application.get("args", {})), AppSettings)


def test_the_commands_own_file_shows_every_key_with_its_default() -> None:
    file = FOLDER / "splitserve.yaml"
    assert serve_settings(file, {}) == ServeSettings()
    shown = yaml.safe_load(file.read_text())
    assert set(shown) == set(ServeSettings.__struct_fields__)
    defaults = ServeSettings()
    for section in ("listen", "engine", "gateway", "prefill", "decode"):
        assert set(shown[section]) == set(getattr(defaults, section).__struct_fields__)
