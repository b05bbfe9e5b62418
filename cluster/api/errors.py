"""What the API answers when it can't answer: one tree of exceptions and one table.

    ApiError
    ├── BadRequest             the client must change the request; names the field
    │   ├── MissingField
    │   ├── UnknownField
    │   ├── UnsupportedField
    │   └── ContextTooLong     names the limit that applied and the size of the prompt
    ├── ModelNotFound
    ├── NotFound
    ├── MethodNotAllowed
    ├── HeadTimeout
    ├── HeadTooLarge
    ├── BodyTimeout
    ├── BodyTooLarge
    ├── Overloaded             too much is queued; later works
    ├── NoWorker               nobody is there to compute it; later works
    ├── WorkerLost             whoever computed it died and nobody could take over
    └── InternalError          our mistake; the message says nothing about the inside

Exceptions carry plain arguments only and can be copied between processes, so a service may raise them on another actor.
"""

import math
from dataclasses import dataclass
from typing import Any


class ApiError(Exception):
    """An answer that is not a completion.

    ``param`` is the field of the request at fault, ``retry_after_s`` when to try again.
    """

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param, retry_after_s)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class BadRequest(ApiError):
    """A field has a value that is not allowed, or the body can't be read."""


class MissingField(BadRequest):
    """A required field is absent or null."""


class UnknownField(BadRequest):
    """A field that does not exist."""


class UnsupportedField(BadRequest):
    """A field that exists elsewhere, with a value that would change the answer and that is not supported here."""


class ContextTooLong(BadRequest):
    """The prompt, or the prompt and ``max_tokens``, exceed a limit."""

    @classmethod
    def of(
        cls, limit_tokens: int, limited_by: str, prompt_tokens: int, max_tokens: int | None, param: str | None = None
    ) -> "ContextTooLong":
        """``limited_by`` names whose limit it is: "the model", "the decode pool", ..."""
        asked = f"the prompt has {prompt_tokens} tokens"
        if max_tokens is not None:
            asked += f" and {max_tokens} more were requested ({prompt_tokens + max_tokens} in total)"
        return cls(f"The maximum context length of {limited_by} is {limit_tokens} tokens; {asked}.", param)


class ModelNotFound(ApiError):
    """The model is not served here."""


class NotFound(ApiError):
    """No such path."""


class MethodNotAllowed(ApiError):
    """The path exists, the method does not."""


class HeadTimeout(ApiError):
    """Request line and headers arrive too slowly."""


class HeadTooLarge(ApiError):
    """Request line and headers exceed the limit in bytes."""


class BodyTimeout(ApiError):
    """The body arrives too slowly."""


class BodyTooLarge(ApiError):
    """The body exceeds the limit in bytes."""


class Overloaded(ApiError):
    """Refused by admission; set ``retry_after_s``."""


class NoWorker(ApiError):
    """No worker is ready; set ``retry_after_s``."""


class WorkerLost(ApiError):
    """The worker went away during the request."""


class InternalError(ApiError):
    """A mistake of ours."""

    def __init__(
        self, message: str = "Internal error.", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, param, retry_after_s)


@dataclass(frozen=True, slots=True)
class Answer:
    """How a class of errors looks from outside."""

    status: int  # HTTP
    type: str
    code: str
    retryable: bool  # the same request may succeed later


ANSWERS: dict[type[ApiError], Answer] = {
    BadRequest: Answer(400, "invalid_request_error", "invalid_value", False),
    MissingField: Answer(400, "invalid_request_error", "missing_required_parameter", False),
    UnknownField: Answer(400, "invalid_request_error", "unknown_parameter", False),
    UnsupportedField: Answer(400, "invalid_request_error", "unsupported_parameter", False),
    ContextTooLong: Answer(400, "invalid_request_error", "context_length_exceeded", False),
    ModelNotFound: Answer(404, "invalid_request_error", "model_not_found", False),
    NotFound: Answer(404, "invalid_request_error", "not_found", False),
    MethodNotAllowed: Answer(405, "invalid_request_error", "method_not_allowed", False),
    HeadTimeout: Answer(408, "invalid_request_error", "head_timeout", True),
    HeadTooLarge: Answer(431, "invalid_request_error", "head_too_large", False),
    BodyTimeout: Answer(408, "invalid_request_error", "body_timeout", True),
    BodyTooLarge: Answer(413, "invalid_request_error", "body_too_large", False),
    Overloaded: Answer(429, "server_error", "overloaded", True),
    NoWorker: Answer(503, "server_error", "no_worker", True),
    WorkerLost: Answer(502, "server_error", "worker_lost", True),
    InternalError: Answer(500, "server_error", "internal_error", False),
}


def answer_of(error: ApiError) -> Answer:
    """The table's row for the class of ``error``, its nearest base otherwise; ``InternalError`` where there is none."""
    # Ray hands an exception of another process over in a class derived from the original one.
    return next((ANSWERS[cls] for cls in type(error).__mro__ if cls in ANSWERS), ANSWERS[InternalError])


def envelope(error: ApiError) -> dict[str, Any]:
    """The body of the answer: ``{"error": {"message", "type", "param", "code"}}``."""
    answer = answer_of(error)
    return {
        "error": {"message": error.message, "type": answer.type, "param": error.param, "code": answer.code},
    }


def headers(error: ApiError) -> dict[str, str]:
    """``x-should-retry`` (the official client obeys it) and, where known, ``retry-after`` in seconds, at least 1."""
    found = {"x-should-retry": "true" if answer_of(error).retryable else "false"}
    if error.retry_after_s is not None:
        found["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return found
