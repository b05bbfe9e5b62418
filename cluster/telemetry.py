"""Prometheus metrics: the gateway's own, and those of all workers from their feeds."""

from collections import OrderedDict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.engine.protocol import Counted, Load, RequestId, Role, StepReport, TransferRecord, WorkerId

TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TRANSFER_BUCKETS_BYTES = tuple(float(1 << shift) for shift in range(14, 35, 2))
REMEMBERED_TRANSFERS = 1000
LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)

WORKER_COUNTERS = {
    "splitserve_kv_transfers_total": "Receptions of KV pages that ended well",
    "splitserve_kv_transfer_bytes_total": "Bytes of KV pages read from peers",
    "splitserve_kv_transfer_pages_total": "KV pages read from peers",
    "splitserve_kv_transfer_seconds_total": "Time spent reading KV pages from peers",
    "splitserve_kv_transfer_hidden_pages_total": "KV pages read before their prompt was computed",
    "splitserve_kv_transfer_tail_seconds_total": "Time spent reading KV pages after their prompt was computed",
    "splitserve_held_back_total": "Times a prompt did not start because peers had too much to fetch",
    "splitserve_kv_transfer_failures_total": "Receptions of KV pages that failed, by cause",
    "splitserve_kv_transport_errors_total": "Errors of the transport outside of any reception, by cause",
    "splitserve_kv_malformed_notices_total": "Messages of peers that could not be read",
    "splitserve_kv_recomputed_total": "Prompts computed anew because their pages could not be had",
    "splitserve_kv_leases_total": "Leases on KV pages that ended, by outcome",
    "splitserve_preemptions_total": "Sequences that lost their pages to an older one",
    "splitserve_failed_steps_total": "Steps that raised; their requests ended with an error",
    "splitserve_steps_total": "Completed steps",
    "splitserve_step_seconds_total": "Time spent in steps",
    "splitserve_prefill_tokens_total": "Prompt tokens computed",
    "splitserve_decode_tokens_total": "Decode tokens computed",
}


class WorkerMetrics(Collector):
    """The latest word of each connected worker."""

    def __init__(self) -> None:
        self._reports: dict[WorkerId, tuple[Role, Load, list[Counted]]] = {}

    def take_in(self, report: StepReport) -> None:
        known = self._reports.get(report.worker)
        counters = report.counters if report.counters is not None else known[2] if known else []
        self._reports[report.worker] = (report.role, report.load, counters)

    def forget(self, worker: WorkerId) -> None:
        self._reports.pop(worker, None)

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("splitserve_worker_up", "Workers whose feed is open", labels=["worker", "role"])
        pages = GaugeMetricFamily("splitserve_pages", "KV pages by state", labels=["worker", "state"])
        sequences = GaugeMetricFamily("splitserve_sequences", "Sequences by state", labels=["worker", "state"])
        leases = GaugeMetricFamily("splitserve_kv_leases", "Leases on KV pages by state", labels=["worker", "state"])
        for worker, (role, load, _) in self._reports.items():
            leases.add_metric([worker, "open"], load.open_leases - load.claimed_leases)
            leases.add_metric([worker, "claimed"], load.claimed_leases)
            pages.add_metric([worker, "leased"], load.leased_pages)
            sequences.add_metric([worker, "held_back"], load.held_back)
            up.add_metric([worker, role], 1)
            for state, count in (("free", load.free_pages), ("cached", load.cached_pages), ("held", load.held_pages)):
                pages.add_metric([worker, state], count)
            pages.add_metric([worker, "total"], load.total_pages)
            sequences.add_metric([worker, "waiting"], load.waiting)
            sequences.add_metric([worker, "running"], load.running)
        return [up, pages, sequences, leases, *self._counters()]

    def _counters(self) -> Iterable[Metric]:
        """Every counter of the table, at 0 where a worker has not said anything of it yet."""
        families: dict[str, CounterMetricFamily] = {}
        for worker, (_, _, counters) in self._reports.items():
            said = {counted.name for counted in counters}
            silent = [Counted(name, 0.0, {}) for name in WORKER_COUNTERS if name not in said and name not in LABELLED]
            for counted in [*counters, *silent]:
                labels = sorted(counted.labels)
                family = families.get(counted.name)
                if family is None:
                    text = WORKER_COUNTERS.get(counted.name, "A total of the workers")
                    family = CounterMetricFamily(counted.name, text, labels=["worker", *labels])
                    families[counted.name] = family
                family.add_metric([worker, *(counted.labels[label] for label in labels)], counted.total)
        return families.values()


LABELLED = frozenset(
    {"splitserve_kv_transfer_failures_total", "splitserve_kv_transport_errors_total", "splitserve_kv_leases_total"}
)


class Telemetry:
    """All metrics of one gateway's process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._workers = WorkerMetrics()
        self._registry.register(self._workers)
        self.requests = Counter(
            "splitserve_requests", "Requests that ended, by outcome", ["outcome"], registry=self._registry
        )
        self.running = Gauge("splitserve_requests_running", "Requests under way", registry=self._registry)
        self.recovered = Counter(
            "splitserve_requests_recovered", "Times a request went on with other workers", registry=self._registry
        )
        self.prompt_tokens = Counter("splitserve_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self.generated_tokens = Counter("splitserve_generated_tokens", "Tokens drawn", registry=self._registry)
        self.ttft = Histogram(
            "splitserve_ttft_seconds",
            "From a request's arrival to its first token",
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self.itl = Histogram(
            "splitserve_itl_seconds",
            "Between two arrivals of tokens of one request",
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )

        self.transfers: OrderedDict[RequestId, TransferRecord] = OrderedDict()  # the latest, oldest first
        self._transfer_seconds = self._transfer_histogram("seconds", "Reading a prompt's KV pages", TRANSFER_BUCKETS_S)
        self._transfer_tail = self._transfer_histogram(
            "tail_seconds", "From the end of prefill to the end of the transfer", TRANSFER_BUCKETS_S
        )
        self._transfer_bytes = self._transfer_histogram("bytes", "KV pages of one prompt", TRANSFER_BUCKETS_BYTES)

    def _transfer_histogram(self, unit: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"splitserve_transfer_{unit}", text, buckets=buckets, registry=self._registry)

    def transferred(self, request_id: RequestId, record: TransferRecord) -> None:
        """What a decode worker says of the pages that it fetched, or could not."""
        self.transfers[request_id] = record
        if len(self.transfers) > REMEMBERED_TRANSFERS:
            self.transfers.popitem(last=False)
        if record.cause is None:
            self._transfer_seconds.observe(record.seconds)
            self._transfer_tail.observe(record.tail_s)
            self._transfer_bytes.observe(record.bytes)

    def take_in(self, report: StepReport) -> None:
        """A worker's report."""
        self._workers.take_in(report)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, its series with it."""
        self._workers.forget(worker)

    def text(self) -> str:
        """Everything in the Prometheus text format."""
        return generate_latest(self._registry).decode()
