"""What the API asks of whoever computes: tokens in, tokens out."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from splitserve.engine.detokenizer import Decoder
from splitserve.engine.protocol import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one request, in order: everything that has arrived since the item before."""

    token_ids: list[int]
    finish: FinishReason | None = None  # with the last item: STOP or LENGTH
    cached_tokens: int | None = None  # prompt tokens taken from a prefix cache; known once, with the first item
    logprobs: list[TokenLogprobs] | None = None  # one for each of ``token_ids``, where asked for
    # One for each token of the prompt but the first, where asked for; with the first item
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Most tokens that something can hold, of the prompt alone or of prompt and output together."""

    tokens: int
    name: str  # as in "the maximum context length of ..."
    prompt_only: bool = False


class Service(Protocol):
    """A model behind the API. All methods are called on the event loop."""

    @property
    def model(self) -> str:
        """The name clients ask for."""

    @property
    def created(self) -> int:
        """Unix time in seconds at which the model was put up."""

    @property
    def limits(self) -> Sequence[ContextLimit]:
        """What a request must fit into; at least one is on prompt and output together."""

    @property
    def vocab_size(self) -> int:
        """Valid token ids are [0, vocab_size)."""

    @property
    def tokenizer(self) -> Decoder:
        """Turns output tokens into text."""

    async def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of the rendered conversation, ready for the model's reply. Does not block the event loop.

        Raises ``BadRequest`` with param "messages" and the template's own sentence where it refuses the conversation.
        """

    async def tokenize_text(self, text: str) -> list[int]:
        """Token ids of a plain prompt. Does not block the event loop."""

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None
    ) -> AsyncGenerator[Tokens, None]:
        """Compute one request. The last item has ``finish``; only STOP and LENGTH are replies, all else must raise.

        Closing the generator, at any point, aborts the request and releases what it holds; so does cancelling the
        task that waits for an item. The caller closes it always. ``request_id`` is the client's and may repeat: for
        logs and traces, never a key. Raises ``ApiError``, before or after the first item. What the reader has not
        taken yet is the service's to bound: it gathers in the next item.
        """

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether a request sent now would be computed, and the reasons as plain data."""

    def transfers(self) -> Mapping[str, Mapping[str, Any]]:
        """What moving pages between workers came to, by the request's name inside the service; the latest, oldest
        first.
        """

    def metrics_text(self) -> str:
        """All metrics in the Prometheus text format."""
