"""The thread that keeps a transport going."""

import threading

from splitserve.kvtransfer.progress import ProgressThread
from splitserve.kvtransfer.transport import TransferError


def test_it_drives_the_transport_until_stopped() -> None:
    driven = threading.Event()
    thread = ProgressThread(driven.set, lambda: True)
    thread.start()
    assert driven.wait(5.0)
    thread.stop()
    driven.clear()
    assert not thread._thread.is_alive()


def test_a_failing_transport_ends_it_quietly() -> None:
    def fail() -> None:
        raise TransferError("closed", "gone")

    thread = ProgressThread(fail, lambda: False)
    thread.start()
    thread._thread.join(5.0)
    assert not thread._thread.is_alive()
