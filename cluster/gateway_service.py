"""What the API asks of whoever computes, answered by the workers of two pools."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import structs
from ray.serve.handle import DeploymentHandle

from splitserve.cluster.api.errors import ApiError
from splitserve.cluster.api.service import ContextLimit, Tokens
from splitserve.cluster.replica_directory import directory
from splitserve.cluster.request_path import RequestPath
from splitserve.cluster.settings import AppSettings
from splitserve.cluster.telemetry import Telemetry
from splitserve.cluster.tokenizing import TokenizerThreads
from splitserve.cluster.worker_links import WorkerLinks
from splitserve.engine.build import page_hasher
from splitserve.engine.protocol import Role, SamplingParams
from splitserve.engine.tokenizer import load_tokenizer
from splitserve.router.load_view import LoadView

UNKNOWN_MODEL_TOKENS = 1 << 20  # before any worker has said how much it can hold


class GatewayService:
    """Implements ``api.service.Service``. Composes a gateway's parts; lives on one event loop."""

    def __init__(self, settings: AppSettings, pools: list[DeploymentHandle]) -> None:
        self.model = settings.served_name
        self.created = int(time.time())
        self.tokenizer = load_tokenizer(settings.engine.model)
        self.vocab_size = self.tokenizer.vocab_size
        self._threads = TokenizerThreads(self.tokenizer, settings.gateway.tokenizer_threads)
        self._telemetry = Telemetry()
        self._view = LoadView()
        self._links = WorkerLinks(secrets.token_hex(8), pools, directory, self._view, self._telemetry)
        self._path = RequestPath(
            self._links, self._view, page_hasher(settings.engine), settings.gateway, self._telemetry
        )

    def start(self) -> None:
        """Begin to connect to workers, on the running event loop."""
        self._links.start()

    @property
    def limits(self) -> list[ContextLimit]:
        model = min((w.facts.max_model_tokens for w in self._view), default=UNKNOWN_MODEL_TOKENS)
        found = [ContextLimit(model, "the model")]
        for role, rooms in ((role, [w.facts.pool_tokens for w in self._view if w.role is role]) for role in Role):
            if rooms:
                # The token drawn last takes no room in a page.
                last = 0 if role is Role.PREFILL else 1
                found.append(ContextLimit(max(rooms) + last, f"the {role} pool", prompt_only=role is Role.PREFILL))
        return found

    async def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return await self._threads.chat(messages)

    async def tokenize_text(self, text: str) -> list[int]:
        return await self._threads.text(text)

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None
    ) -> AsyncGenerator[Tokens, None]:
        """The request's way, measured."""
        telemetry, clock = self._telemetry, asyncio.get_running_loop().time
        last, started, outcome = clock(), False, "aborted"
        telemetry.running.inc()
        telemetry.prompt_tokens.inc(len(prompt))
        try:
            async with aclosing(self._path.run(prompt, sampling)) as items:
                async for tokens in items:
                    now = clock()
                    (telemetry.itl if started else telemetry.ttft).observe(now - last)
                    last, started = now, True
                    telemetry.generated_tokens.inc(len(tokens.token_ids))
                    if tokens.finish is not None:
                        outcome = tokens.finish.value
                    yield tokens
        except ApiError as error:
            outcome = type(error).__name__
            raise
        finally:
            telemetry.running.dec()
            telemetry.requests.labels(outcome).inc()

    def ready(self) -> tuple[bool, dict[str, Any]]:
        pools = {role.value: sum(1 for w in self._view.of_role(role) if w.steps > 0) for role in Role}
        is_ready = all(pools.values())
        return is_ready, {"status": "ready" if is_ready else "not ready", "workers": pools}

    def transfers(self) -> dict[str, dict[str, Any]]:
        return {name: structs.asdict(record) for name, record in self._telemetry.transfers.items()}

    def metrics_text(self) -> str:
        return self._telemetry.text()
