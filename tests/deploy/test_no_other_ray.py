"""A thread of ours that is late must not find itself a Ray cluster."""

import subprocess
import sys

LATE_CALL = """
from splitserve.deploy.ray_environment import prepare_ray_environment
prepare_ray_environment()
import ray
try:
    ray.put(1)
except Exception as error:
    print(type(error).__name__, ray.is_initialized())
"""


def test_a_call_without_ray_fails_and_starts_or_joins_none() -> None:
    """Else Ctrl-C while an application starts may have it deployed on somebody else's cluster."""
    done = subprocess.run([sys.executable, "-c", LATE_CALL], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["RaySystemError", "False"]
