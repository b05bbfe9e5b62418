"""Lines for whoever waits for the start: one per stage, and never a long silence."""

import threading
import time
from types import TracebackType

QUIET_S = 5.0


class Progress:
    """Repeats the last line, with the time it has taken so far, whenever nothing new was said for ``quiet_s``."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._line = ""
        self._since = time.monotonic()
        self._said = threading.Condition()
        self._over = False
        self._pulse = threading.Thread(target=self._repeat, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._pulse.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._said:
            self._over = True
            self._said.notify()
        self._pulse.join()

    def say(self, line: str) -> None:
        """Print a new line; one that was the last already is not printed again."""
        with self._said:
            if line == self._line:
                return
            self._line, self._since = line, time.monotonic()
            print(f"splitserve: {line}", flush=True)
            self._said.notify()

    def rest(self) -> None:
        """Repeat nothing until something new is said."""
        with self._said:
            self._line = ""

    def _repeat(self) -> None:
        with self._said:
            while not self._over:
                if not self._said.wait(self._quiet_s) and self._line:
                    print(f"splitserve: {self._line} ({time.monotonic() - self._since:.0f} s)", flush=True)
