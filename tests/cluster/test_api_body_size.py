"""Bodies that are too large, come in parts, or claim odd things about themselves."""

import time
from collections.abc import AsyncIterator

import httpx2

from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.fake_service import FakeService

BODY = b'{"model": "fake", "prompt": "hello"}'


async def post(service: FakeService, content: bytes | AsyncIterator[bytes], **headers: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(build_asgi_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
        return await client.post("/v1/completions", content=content, headers=headers)


async def test_a_5_mb_body_is_refused_quickly_and_not_tokenised():
    service = FakeService()
    start = time.perf_counter()
    response = await post(service, b'{"model": "fake", "prompt": "' + b"a" * 5_000_000 + b'"}')
    assert time.perf_counter() - start < 1
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert service.tokenized == []


async def test_a_body_without_a_length_is_read_up_to_the_limit():
    taken = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield b"a" * 65536

    response = await post(FakeService(), parts())
    assert response.status_code == 413
    assert taken < 70


async def test_a_false_length_does_not_help():
    response = await post(FakeService(), b" " * 5_000_000 + BODY, **{"content-length": "10"})
    assert response.status_code == 413


async def test_a_body_in_parts():
    async def parts() -> AsyncIterator[bytes]:
        for byte in BODY:
            yield bytes([byte])

    assert (await post(FakeService(), parts())).status_code == 200


async def test_the_content_type_does_not_matter():
    assert (await post(FakeService(), BODY, **{"content-type": "text/plain"})).status_code == 200
