"""Ray's environment: what the user has set stays."""

import os
from collections.abc import Iterator

import pytest

from splitserve.deploy.ray_environment import QUIET, prepare_ray_environment


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """As before, at the end; without Ray's variables, at the beginning."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("RAY_")]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


def test_what_is_not_set_is_set() -> None:
    prepare_ray_environment()
    assert QUIET.items() <= os.environ.items()


def test_what_the_user_set_stays() -> None:
    os.environ["RAY_DEDUP_LOGS"] = "1"
    prepare_ray_environment()
    assert os.environ["RAY_DEDUP_LOGS"] == "1"


def test_twice_is_once() -> None:
    prepare_ray_environment()
    first = dict(os.environ)
    prepare_ray_environment()
    assert dict(os.environ) == first
