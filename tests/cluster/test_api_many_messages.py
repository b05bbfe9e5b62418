"""A conversation that is sure to be too long is refused before it is rendered."""

import httpx2

from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.fake_service import FakeService


class Renderless(FakeService):
    """Renders nothing."""

    async def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]:
        raise AssertionError("it was rendered")


async def test_more_messages_than_tokens_fit_are_refused_unrendered() -> None:
    """B113: their contents may be empty, so bytes alone say nothing."""
    body = {"model": "fake", "messages": [{"role": "user", "content": ""}] * 101}
    transport = httpx2.ASGITransport(build_asgi_app(Renderless()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
        answer = await client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
