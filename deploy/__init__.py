"""Configuration, the application builder and the command line. ``splitserve.deploy:build_app`` is the import path for
Serve.
"""

from typing import Any

from ray.serve import Application

from splitserve.cluster.application import application
from splitserve.deploy.config import app_settings


def build_app(args: dict[str, Any]) -> Application:
    """The application for a Serve config file's ``import_path: splitserve.deploy:build_app``.

    ``args`` are the keys of ``cluster.settings.AppSettings``. Raises ``config.ConfigError``, which names a key that is
    unknown or wrong.
    """
    return application(app_settings(args))
