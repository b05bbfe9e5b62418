"""Which replicas of a deployment Serve routes to, as this process's request routers hear of it.

Serve tells the routers in a process about replicas, and nobody else. The router's own module is copied into each
handle by value, so what is to be shared lives here, in a module that is imported by name.
"""

import threading
from collections.abc import Callable


class ReplicaDirectory:
    """Deployment name → ids of its replicas. Written by routers, which may run on a thread of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: dict[str, frozenset[str]] = {}
        self._listeners: list[Callable[[], object]] = []

    def update(self, deployment: str, replicas: frozenset[str]) -> None:
        with self._lock:
            self._replicas[deployment] = replicas
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def replicas(self) -> dict[str, frozenset[str]]:
        with self._lock:
            return dict(self._replicas)

    def listen(self, listener: Callable[[], object]) -> None:
        """``listener`` is called after every change, on the thread that made it; it must not block."""
        with self._lock:
            self._listeners.append(listener)


directory = ReplicaDirectory()
"""This process's only one: Serve builds the routers, so they can't be handed it."""
