"""Two workers for tests of the NIXL transport: one in this process, others in processes of their own."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import numpy as np

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.nixl_transport import NixlTransport
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.reception import Reception
from splitserve.kvtransfer.ticket import Ticket, new_ticket_id
from splitserve.kvtransfer.transport import PoolMemory, Read, ReadState

LAYOUT = PageLayout(model="m", layers=2, kv_heads=4, page_tokens=16, head_dim=64, dtype="float32")
PAGES = 512
LIMIT_S = 20.0
POLL_S = 0.001


class PeerProcess:
    """The other worker."""

    def __init__(self, name: str = "p", tls: str | None = None) -> None:
        environment = dict(os.environ) | ({"UCX_TLS": tls} if tls else {})
        script = Path(__file__).parents[1] / "kvtransfer" / "nixl_peer.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, str(PAGES), str(LAYOUT.page_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.notices: Queue[bytes] = Queue()
        self._answers: Queue[str] = Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.endpoint = bytes.fromhex(self._answers.get(timeout=LIMIT_S))

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            match line.split():
                case ["@notice", data]:
                    self.notices.put(bytes.fromhex(data))
                case ["@endpoint", data]:
                    self._answers.put(data)
                case ["@done"]:
                    self._answers.put("done")

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self._answers.get(timeout=LIMIT_S) == "done"

    def notice_about(self, ticket_id: str) -> NoticeKind:
        """The first one; those about other tickets are dropped."""
        while True:
            notice = Notice.decode(self.notices.get(timeout=LIMIT_S))
            if notice.ticket_id == ticket_id:
                return notice.kind

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """With SIGKILL, frozen or not. Idempotent."""
        if self.process.returncode is not None:
            return
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._listener.join(LIMIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def ticket(self, pages: tuple[int, ...], generation: int = 1) -> Ticket:
        return Ticket(
            ticket_id=new_ticket_id(),
            worker="p",
            incarnation=1,
            endpoint=self.endpoint,
            layout=LAYOUT.fingerprint,
            tokens=16 * len(pages),
            sealed=16 * len(pages),
            page_ids=pages,
            generations=(generation,) * len(pages),
            lease_s=60.0,
        )


class Receiver:
    """This process's pool and transport."""

    def __init__(self) -> None:
        self.data = np.zeros((PAGES, LAYOUT.page_bytes), np.uint8)
        self.transport = NixlTransport("d", PoolMemory(self.data.ctypes.data, LAYOUT.page_bytes, PAGES, self.data))

    def receive(self, ticket: Ticket, first_page: int = 0, deadline_s: float = LIMIT_S) -> Reception:
        now = time.monotonic()
        reception = Reception(ticket, transport=self.transport, layout=LAYOUT, now=now, deadline_s=deadline_s)
        reception.fetch({index: first_page + index for index in range(len(ticket.page_ids))}, now)
        return reception

    def finish(self, reception: Reception) -> Reception:
        wait_until(lambda: bool(reception.poll(time.monotonic())) and reception.settled)
        return reception

    def holds(self, page: int, remote: int, generation: int = 1) -> bool:
        return bool((self.data[page] == (remote * 13 + generation) % 256).all())


def wait_until(condition: Callable[[], bool]) -> None:
    pause, end = threading.Event(), time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "took too long"
        pause.wait(POLL_S)


def wait_for(read: Read) -> ReadState:
    wait_until(lambda: read.poll() is not ReadState.READING)
    return read.poll()
