"""Monotone totals, by metric name and labels."""

from collections import defaultdict

from splitserve.engine.protocol import Counted

Labels = tuple[tuple[str, str], ...]


class Counters:
    """Used by one thread. Names are Prometheus names of counters, ``*_total``."""

    def __init__(self) -> None:
        self._totals: defaultdict[tuple[str, Labels], float] = defaultdict(float)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self._totals[name, tuple(sorted(labels.items()))] += amount

    def set(self, name: str, total: float, **labels: str) -> None:
        """Take over a total that is counted elsewhere."""
        self._totals[name, tuple(sorted(labels.items()))] = total

    def totals(self) -> list[Counted]:
        return [Counted(name, total, dict(labels)) for (name, labels), total in self._totals.items()]
