"""A service without a model, for tests and for trying clients: it plays a script of items."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from splitserve.cluster.api.service import ContextLimit, Tokens
from splitserve.engine.protocol import FinishReason, SamplingParams

VOCAB_SIZE = 1000


class WordTokenizer:
    """One token per word, with the blank before it; words get ids as they come."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        words = [" " * (index > 0) + word for index, word in enumerate(text.split(" "))]
        self.words += [word for word in dict.fromkeys(words) if word not in self.words]
        return [self.words.index(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[token_id] for token_id in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id].encode() if token_id < len(self.words) else b""

    first_token_bytes = token_bytes


class FakeService:
    """Answers every request with ``script``: an exception in it is raised, an event waited for.

    ``open`` counts what runs.
    """

    model = "fake"
    created = 1_700_000_000
    vocab_size = VOCAB_SIZE

    def __init__(self, reply: str = "The capital of France is Paris.") -> None:
        self.tokenizer = WordTokenizer()
        self.script: list[Tokens | Exception | asyncio.Event] = []
        self.say(reply)
        self.limits: tuple[ContextLimit, ...] = (ContextLimit(100, "the model"),)
        self.requests: list[tuple[list[int], SamplingParams, str | None]] = []
        self.tokenized: list[str] = []
        self.open = 0
        self.is_ready = True
        self.moved: dict[str, dict[str, Any]] = {}

    def say(self, text: str, finish: FinishReason = FinishReason.STOP, cached_tokens: int | None = 2) -> None:
        """Make the script one item per word of ``text``."""
        self.script = [Tokens([token_id]) for token_id in self.tokenizer.encode(text)]
        self.script[0] = Tokens([self.tokenizer.encode(text)[0]], cached_tokens=cached_tokens)
        self.script.append(Tokens([], finish))

    async def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return await self.tokenize_text(" ".join(f"{message['role']}: {message['content']}" for message in messages))

    async def tokenize_text(self, text: str) -> list[int]:
        self.tokenized.append(text)
        return self.tokenizer.encode(text)

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None
    ) -> AsyncGenerator[Tokens, None]:
        self.requests.append((list(prompt), sampling, request_id))
        self.open += 1
        try:
            for item in self.script:
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            self.open -= 1

    def ready(self) -> tuple[bool, dict[str, Any]]:
        return self.is_ready, {"ready": self.is_ready}

    def transfers(self) -> dict[str, dict[str, Any]]:
        return self.moved

    def metrics_text(self) -> str:
        return "fake_requests_total 0\n"
