"""Servers as a user starts them: the installed command, in a process of its own, on a free port."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2

START_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 10.0
METRIC = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


class Server:
    """One ``splitserve serve``."""

    def __init__(self, log: Path, *options: str, env: dict[str, str] | None = None) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.env = os.environ | (env or {})
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [str(Path(sys.executable).with_name("splitserve")), "serve", "--port", str(self.port)]
        command += ["--ray-address", "local", *options]
        self.process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=self.env,
        )
        self.http = httpx2.Client(base_url=self.url, timeout=60.0)

    def wait_until_ready(self) -> "Server":
        self.wait_for(lambda: "try" in self.log.read_text() and self.ready(), START_TIMEOUT_S)
        return self

    def ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx2.TransportError:
            return False

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = SETTLE_TIMEOUT_S) -> Any:
        """The condition's first true value; fails with the log's end."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"not so within {timeout_s} s; the log ends with\n{self.log.read_text()[-3000:]}")

    def stop(self) -> int:
        """Ctrl-C; the exit status."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that must work."""
        answer = self.http.post("/v1/completions", json={"model": self.model} | body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed completion, an error object included; ends with ``[DONE]`` or the connection."""
        with self.http.stream("POST", "/v1/completions", json={"model": self.model, "stream": True} | body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line[6:])

    @property
    def model(self) -> str:
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    def metrics(self, name: str, **labels: str) -> dict[str, float]:
        """Values of a metric by label text, where all ``labels`` match."""
        found = {}
        for line in self.http.get("/metrics").text.splitlines():
            match = METRIC.match(line)
            if match and match[1] == name and all(f'{k}="{v}"' in (match[2] or "") for k, v in labels.items()):
                found[match[2] or ""] = float(match[3])
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all labels that match."""
        return sum(self.metrics(name, **labels).values())

    def settled(self) -> bool:
        """Whether on every live worker nothing is held, and free and cached pages are all there are."""
        held = self.metric("splitserve_pages", state="held")
        parts = sum(self.metric("splitserve_pages", state=state) for state in ("free", "cached"))
        running = self.metric("splitserve_sequences")
        total = self.metric("splitserve_pages", state="total")
        return total > 0 and held == 0 and running == 0 and parts == total

    def workers(self, pool: str) -> list[int]:
        """Process ids of a pool's workers on the Ray that this server has started."""
        return [pid for pid in replica_pids(f"ServeReplica:splitserve:{pool}") if self.process.pid in ancestors(pid)]


def replica_pids(name: str) -> list[int]:
    """Processes whose title has ``name`` in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if name.encode() in title and title.startswith(b"ray::"):
                found.append(int(entry.name))
    return sorted(found)


def ancestors(pid: int) -> set[int]:
    """``pid`` and the processes above it."""
    found = set()
    while pid > 1:
        found.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return found
