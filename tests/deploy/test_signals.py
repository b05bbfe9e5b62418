"""Ctrl-C: asked once it stops in order, asked twice at once."""

import signal
import threading

import pytest

from splitserve.deploy.serving import _stopping_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = threading.Event()
    with _stopping_on_signals(stop):
        signal.raise_signal(number)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
