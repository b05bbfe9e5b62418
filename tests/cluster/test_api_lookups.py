"""Models, health, metrics, request ids, and paths that do not exist."""

import httpx2
import pytest

from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.fake_service import FakeService

MODEL = {"id": "fake", "object": "model", "created": 1_700_000_000, "owned_by": "splitserve"}


async def send(service: FakeService, method: str, path: str, **options: object) -> httpx2.Response:
    transport = httpx2.ASGITransport(build_asgi_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
        return await client.request(method, path, **options)


async def test_models():
    assert (await send(FakeService(), "GET", "/v1/models")).json() == {"object": "list", "data": [MODEL]}
    assert (await send(FakeService(), "GET", "/v1/models/fake")).json() == MODEL


async def test_a_model_id_with_slashes():
    service = FakeService()
    service.model = "org/name"
    assert (await send(service, "GET", "/v1/models/org/name")).json()["id"] == "org/name"


async def test_an_unknown_model():
    response = await send(FakeService(), "GET", "/v1/models/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_health_ready_metrics():
    service = FakeService()
    service.is_ready = False
    response = await send(service, "GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    response = await send(service, "GET", "/ready")
    assert (response.status_code, response.json()) == (503, {"ready": False})
    assert (await send(FakeService(), "GET", "/ready")).status_code == 200
    response = await send(service, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert response.text == "fake_requests_total 0\n"


async def test_transfers():
    service = FakeService()
    service.moved = {"a-0": {"pages": 3, "cause": None}, "b-0": {"pages": 0, "cause": "torn"}}
    first, second = {"id": "a-0", "pages": 3, "cause": None}, {"id": "b-0", "pages": 0, "cause": "torn"}
    assert (await send(service, "GET", "/debug/transfers")).json() == {"data": [first, second]}
    assert (await send(service, "GET", "/debug/transfers/b-0")).json() == second
    response = await send(service, "GET", "/debug/transfers/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
    ],
)
async def test_wrong_ways(method, path, status, code):
    response = await send(FakeService(), method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers["x-request-id"].startswith("req-")
    if status == 405:
        assert response.headers["allow"]


async def test_the_clients_request_id_comes_back_and_is_passed_on():
    service = FakeService()
    for stream in (False, True):
        body = {"model": "fake", "prompt": "a", "stream": stream}
        response = await send(service, "POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine 1"})
        assert response.headers.get_list("x-request-id") == ["mine 1"]
        assert "mine 1" not in response.text
    assert [request_id for _, _, request_id in service.requests] == ["mine 1", "mine 1"]


@pytest.mark.parametrize("value", ["", "x" * 129, "tab\tinside", b"\xc3\xa9"])
async def test_request_ids_that_are_refused(value):
    response = await send(FakeService(), "GET", "/health", headers={"X-Request-Id": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-id"
    assert response.headers["x-request-id"].startswith("req-")


async def test_a_failing_lookup_says_nothing_about_the_inside():
    service = FakeService()
    service.metrics_text = lambda: 1 // 0  # type: ignore[assignment,return-value]
    response = await send(service, "GET", "/metrics")
    assert (response.status_code, response.json()["error"]["message"]) == (500, "Internal error.")
