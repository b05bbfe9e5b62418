"""Tokenising off the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from splitserve.cluster.api.errors import BadRequest
from splitserve.engine.tokenizer import TemplateError, Tokenizer


class TokenizerThreads:
    """A tokenizer with threads of its own, so that a long prompt delays nobody's tokens."""

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    async def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of the rendered conversation. Raises BadRequest with the template's own sentence."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._tokenizer.render_chat, messages)
        except TemplateError as error:
            raise BadRequest(str(error), "messages") from error

    async def text(self, text: str) -> list[int]:
        """Token ids of a plain prompt."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._tokenizer.encode, text)
