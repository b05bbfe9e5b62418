"""Metrics: the gateway's own and those of the workers, as Prometheus reads them."""

import pytest
from feed_fakes.reports import report
from prometheus_client.parser import text_string_to_metric_families

from splitserve.cluster.telemetry import LABELLED, REMEMBERED_TRANSFERS, WORKER_COUNTERS, Telemetry
from splitserve.engine.protocol import Counted, Load, RequestId, Role, TransferRecord, WorkerId

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(telemetry: Telemetry) -> Series:
    """(name, sorted labels) → value of every sample. Fails where a series comes twice."""
    found: Series = {}
    for family in text_string_to_metric_families(telemetry.text()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return series(telemetry).get((name, tuple(sorted(labels.items()))))


def labels_of(telemetry: Telemetry, name: str) -> list[dict[str, str]]:
    return [dict(labels) for found, labels in series(telemetry) if found == name]


def workers_in(telemetry: Telemetry) -> set[str]:
    return {dict(labels)["worker"] for _, labels in series(telemetry) if "worker" in dict(labels)}


@pytest.fixture
def telemetry() -> Telemetry:
    """Of a gateway with one worker of each role."""
    telemetry = Telemetry()
    load = Load(waiting=1, waiting_tokens=9, running=2, free_pages=30, cached_pages=20, held_pages=14, total_pages=64)
    telemetry.take_in(report("p", load=load))
    telemetry.take_in(report("d", role=Role.DECODE))
    return telemetry


def test_every_family_has_a_type_and_a_text(telemetry: Telemetry) -> None:
    families = list(text_string_to_metric_families(telemetry.text()))
    assert families
    assert all(family.documentation and family.type != "unknown" for family in families)
    assert all(family.name.startswith("splitserve_") for family in families)


def test_a_new_gateway_shows_its_own_metrics_at_zero() -> None:
    shown = series(Telemetry())
    for name in ("prompt_tokens_total", "generated_tokens_total", "requests_recovered_total", "requests_running"):
        assert shown[f"splitserve_{name}", ()] == 0
    assert shown["splitserve_ttft_seconds_count", ()] == 0


def test_load_and_role_of_each_worker(telemetry: Telemetry) -> None:
    assert labels_of(telemetry, "splitserve_worker_up") == [
        {"role": "prefill", "worker": "p"},
        {"role": "decode", "worker": "d"},
    ]
    pages = {state: value(telemetry, "splitserve_pages", worker="p", state=state) for state in ("free", "cached")}
    assert pages == {"free": 30, "cached": 20}
    assert value(telemetry, "splitserve_pages", worker="p", state="held") == 14
    assert value(telemetry, "splitserve_pages", worker="p", state="total") == 64
    assert value(telemetry, "splitserve_sequences", worker="p", state="waiting") == 1
    assert value(telemetry, "splitserve_sequences", worker="p", state="running") == 2


def test_a_worker_that_changes_its_role_is_there_once(telemetry: Telemetry) -> None:
    telemetry.take_in(report("p", facts=None, role=Role.DECODE))
    assert {"role": "decode", "worker": "p"} in labels_of(telemetry, "splitserve_worker_up")
    assert len(labels_of(telemetry, "splitserve_worker_up")) == 2


@pytest.mark.parametrize("name", sorted(set(WORKER_COUNTERS) - LABELLED))
def test_a_counter_that_nobody_has_counted_yet_is_zero(telemetry: Telemetry, name: str) -> None:
    """So that a rate over it has a beginning."""
    assert value(telemetry, name, worker="p") == 0
    telemetry.take_in(report("d", facts=None, counters=[Counted(name, 3.0, {})]))
    assert value(telemetry, name, worker="p") == 0
    assert value(telemetry, name, worker="d") == 3


def test_labels_of_counters_are_those_of_the_worker(telemetry: Telemetry) -> None:
    failures = "splitserve_kv_transfer_failures_total"
    assert labels_of(telemetry, failures) == []
    torn, timeout = (Counted(failures, total, {"cause": cause}) for cause, total in (("torn", 2.0), ("timeout", 1.0)))
    telemetry.take_in(report("d", facts=None, counters=[torn, timeout]))
    telemetry.take_in(report("p", facts=None, counters=[torn]))
    assert value(telemetry, failures, worker="d", cause="torn") == 2
    assert value(telemetry, failures, worker="d", cause="timeout") == 1
    assert value(telemetry, failures, worker="p", cause="torn") == 2
    assert len(labels_of(telemetry, failures)) == 3


def test_a_label_with_odd_characters_survives(telemetry: Telemetry) -> None:
    name = "splitserve_kv_transport_errors_total"
    telemetry.take_in(report("d", counters=[Counted(name, 1.0, {"cause": 'a "b"\\\nc'})]))
    assert value(telemetry, name, worker="d", cause='a "b"\\\nc') == 1


def test_counters_stay_when_a_report_brings_none(telemetry: Telemetry) -> None:
    telemetry.take_in(report("d", facts=None, counters=[Counted("splitserve_steps_total", 5.0, {})]))
    telemetry.take_in(report("d", facts=None, counters=None, load=Load(running=7)))
    assert value(telemetry, "splitserve_steps_total", worker="d") == 5
    assert value(telemetry, "splitserve_sequences", worker="d", state="running") == 7


def test_a_counter_of_a_newer_worker_is_shown_too(telemetry: Telemetry) -> None:
    telemetry.take_in(report("d", facts=None, counters=[Counted("splitserve_novel_total", 1.0, {"kind": "x"})]))
    assert value(telemetry, "splitserve_novel_total", worker="d", kind="x") == 1


def test_a_gone_worker_leaves_no_series(telemetry: Telemetry) -> None:
    telemetry.take_in(report("d", counters=[Counted("splitserve_steps_total", 5.0, {})]))
    telemetry.forget(WorkerId("d"))
    telemetry.forget(WorkerId("never seen"))
    assert workers_in(telemetry) == {"p"}
    telemetry.take_in(report("d"))
    assert value(telemetry, "splitserve_steps_total", worker="d") == 0


def test_requests_of_a_gateway(telemetry: Telemetry) -> None:
    telemetry.requests.labels("stop").inc()
    telemetry.running.inc()
    telemetry.ttft.observe(0.03)
    assert value(telemetry, "splitserve_requests_total", outcome="stop") == 1
    assert value(telemetry, "splitserve_requests_running") == 1
    assert value(telemetry, "splitserve_ttft_seconds_bucket", le="0.02") == 0
    assert value(telemetry, "splitserve_ttft_seconds_bucket", le="0.04") == 1


def test_leases_by_state(telemetry: Telemetry) -> None:
    load = Load(leased_pages=5, open_leases=3, claimed_leases=2, held_back=1)
    telemetry.take_in(report("p", facts=None, load=load))
    assert value(telemetry, "splitserve_kv_leases", worker="p", state="open") == 1
    assert value(telemetry, "splitserve_kv_leases", worker="p", state="claimed") == 2
    assert value(telemetry, "splitserve_pages", worker="p", state="leased") == 5
    assert value(telemetry, "splitserve_sequences", worker="p", state="held_back") == 1


def test_the_latest_transfers_are_remembered_and_good_ones_measured() -> None:
    telemetry = Telemetry()
    good = TransferRecord(WorkerId("p"), 3, 1 << 20, 1, 2, 0.03, 0.004, None)
    bad = TransferRecord(WorkerId("p"), 1, 1 << 18, 0, 0, 9.0, 9.0, "timeout")
    telemetry.transferred(RequestId("bad"), bad)
    for number in range(REMEMBERED_TRANSFERS):
        telemetry.transferred(RequestId(str(number)), good)
    assert len(telemetry.transfers) == REMEMBERED_TRANSFERS
    assert next(iter(telemetry.transfers.items())) == ("0", good)
    assert value(telemetry, "splitserve_transfer_seconds_count") == REMEMBERED_TRANSFERS
    assert value(telemetry, "splitserve_transfer_tail_seconds_bucket", le="0.005") == REMEMBERED_TRANSFERS
    assert value(telemetry, "splitserve_transfer_bytes_sum") == REMEMBERED_TRANSFERS * good.bytes


def test_two_gateways_of_one_process_do_not_share() -> None:
    first, second = Telemetry(), Telemetry()
    first.prompt_tokens.inc(3)
    assert value(second, "splitserve_prompt_tokens_total") == 0
