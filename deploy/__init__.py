"""Configuration, the application builder and the command line.

``splitserve.deploy:build_app`` is the import path for Serve.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build_app(args: dict[str, Any]) -> "Application":
    """The application for a Serve config file's ``import_path: splitserve.deploy:build_app``.

    ``args`` are the keys of ``cluster.settings.AppSettings``. Raises ``config.ConfigError``, which names a key that is
    unknown or wrong.
    """
    # Imported here, because the command line sets Ray's environment before anything imports Ray.
    from splitserve.cluster.application import application
    from splitserve.deploy.config import app_settings

    return application(app_settings(args))
