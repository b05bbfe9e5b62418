"""Environment variables that Ray reads when it is imported, so they are set before. They count for a Ray that we
start.
"""

import os

QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a late call after our shutdown must fail, not join another cluster
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def prepare_ray_environment() -> None:
    """Set what the user has not set. Call it before the first import of Ray."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
