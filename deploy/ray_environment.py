"""Environment variables that Ray reads when it is imported, so they are set before. They count for a Ray that we
start.
"""

import os
import socket
from pathlib import Path

CONNECT_TIMEOUT_S = 2.0

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


def cluster_of_this_machine() -> str | None:
    """Address of the cluster that ``ray start`` has put up here, if it answers.

    Ray keeps the address in a file, also after the cluster's death; ``ray.init`` would then wait for it for a minute.
    """
    try:
        address = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S):
            return address
    except (OSError, ValueError):
        return None
