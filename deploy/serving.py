"""From a configuration to a running application on Ray, and back to nothing."""

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ServeStatus

from splitserve.cluster.application import application
from splitserve.cluster.settings import ListenSettings
from splitserve.deploy.config import ServeSettings
from splitserve.deploy.progress import Progress
from splitserve.deploy.ray_environment import cluster_of_this_machine

APP_NAME = "splitserve"
STOP_TIMEOUT_S = 15.0


class StartFailed(Exception):
    """The application did not come up; the message says what stood in the way."""


def serve_until_stopped(settings: ServeSettings) -> None:
    """Bring the application up, wait for Ctrl-C or SIGTERM, take down everything that was started here. Raises
    StartFailed.
    """
    started = time.monotonic()
    stop = threading.Event()
    _check_port(settings.listen)
    with (
        _stopping_on_signals(stop),
        Progress() as progress,
        _ray(settings, progress) as joined,
        _stopping_on_signals(stop),  # again: Ray has put its own handler in place of ours
        _application(settings, joined, stop, progress),
    ):
        if not stop.is_set():
            progress.rest()
            print(_closing_line(settings, time.monotonic() - started), flush=True)
        while not stop.wait(1.0):
            pass
        progress.say("stopping")


@contextmanager
def _stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt  # asked twice: whatever is waited for, don't
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ray(settings: ServeSettings, progress: Progress) -> Iterator[bool]:
    """Ray, joined if it runs already (True), else started here and shut down at the end (False)."""
    joined = _join_ray(settings.ray_address, progress) or _start_ray(settings, progress)
    try:
        yield joined
    finally:
        ray.shutdown()


def _join_ray(address: str, progress: Progress) -> bool:
    """Raises StartFailed when a cluster that was named by its address is not there."""
    named = address if address not in ("auto", "local") else os.environ.get("RAY_ADDRESS")
    if address == "local" or not (named or cluster_of_this_machine()):
        return False
    try:
        ray.init(address=address, logging_level="error")
    except ConnectionError as error:
        raise StartFailed(f"no Ray cluster answers at {named or address}: {error}") from error
    progress.say("joined the running Ray cluster")
    return True


def _start_ray(settings: ServeSettings, progress: Progress) -> bool:
    """With as many logical CPUs as the workers reserve: there may be more workers than cores."""
    progress.say("starting Ray on this machine")
    reserved = sum(pool.workers * pool.cpus for pool in (settings.prefill, settings.decode))
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(reserved)),
        include_dashboard=False,
        logging_level="error",
    )
    return False


@contextmanager
def _application(settings: ServeSettings, joined: bool, stop: threading.Event, progress: Progress) -> Iterator[None]:
    serve_ran_before = _serve_runs()
    if serve_ran_before and APP_NAME in serve.status().applications:
        raise StartFailed(f"an application called {APP_NAME} is running on this Ray cluster already")
    progress.say("starting Ray Serve")
    if not serve_ran_before:
        serve.start(proxy_location=ProxyLocation.Disabled)  # gateways listen by themselves

    def take_down() -> None:
        serve.delete(APP_NAME)
        if joined and not serve_ran_before:
            serve.shutdown()

    try:
        _deploy(settings, stop, progress)
        yield
    finally:
        _within(STOP_TIMEOUT_S, take_down)


def _deploy(settings: ServeSettings, stop: threading.Event, progress: Progress) -> None:
    """Start the application and say how far it is until it runs, fails, or is to stop."""
    counts = f"{settings.prefill.workers} prefill and {settings.decode.workers} decode"
    progress.say(f"starting {counts} workers with {settings.engine.model}")
    target = serve.RunTarget(application(settings), name=APP_NAME, route_prefix="/")
    try:
        # Waiting for it is done here: Serve's own wait, once Ray is shut down, would go and join another cluster.
        serve.run_many([target], wait_for_applications_running=False)
    except (RayError, RayServeException, RuntimeError, TimeoutError) as error:
        raise StartFailed(str(error)) from error
    while not stop.wait(0.25):
        status = serve.status()
        app = status.applications.get(APP_NAME)
        if app is not None and app.status is ApplicationStatus.RUNNING:
            return
        if app is not None and app.status is ApplicationStatus.DEPLOY_FAILED:
            raise StartFailed(_reason(status) or "the application could not be deployed")
        progress.say(_stage(status))


def _stage(status: ServeStatus) -> str:
    app = status.applications.get(APP_NAME)
    if app is None:
        return "waiting for Ray Serve"
    parts = []
    for name, deployment in sorted(app.deployments.items()):
        ready = deployment.replica_states.get("RUNNING", 0)
        total = sum(deployment.replica_states.values()) or 1
        parts.append(f"{name} {ready}/{total} ready")
    return ", ".join(parts) or "waiting for Ray Serve"


def _reason(status: ServeStatus) -> str:
    app = status.applications.get(APP_NAME)
    if app is None:
        return ""
    messages = [d.message for d in app.deployments.values() if d.message] + [app.message]
    return next((message for message in messages if message), "")


def _serve_runs() -> bool:
    return any(actor["name"] == "SERVE_CONTROLLER_ACTOR" for actor in ray.util.list_named_actors(all_namespaces=True))


def _check_port(listen: ListenSettings) -> None:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise StartFailed(f"cannot listen on {listen.host}:{listen.port}: {error.strerror}") from error


def _within(timeout_s: float, action: Callable[[], None]) -> None:
    """Run calls of Serve's that have no deadline of their own; what they leave behind goes with Ray."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(timeout_s)


def _closing_line(settings: ServeSettings, seconds: float) -> str:
    url = f"http://{settings.listen.host}:{settings.listen.port}"
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": settings.served_name, "messages": messages})
    return (
        f"splitserve: ready after {seconds:.0f} s at {url} - try\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    )
