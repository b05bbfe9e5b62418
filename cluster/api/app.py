"""The routes, and the Starlette application made of them."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from splitserve.cluster.api.answers import error_response, json_response
from splitserve.cluster.api.body import DEFAULT_MAX_BODY_BYTES, read_body
from splitserve.cluster.api.chat import chat, chat_stream
from splitserve.cluster.api.completions import complete, complete_stream
from splitserve.cluster.api.disconnect import ClientLeft, while_connected
from splitserve.cluster.api.errors import ApiError, BadRequest, InternalError, MethodNotAllowed, NotFound
from splitserve.cluster.api.models import model_list, model_object
from splitserve.cluster.api.reply import Json
from splitserve.cluster.api.request_ids import RequestIds
from splitserve.cluster.api.service import Service
from splitserve.cluster.api.sse import EventStream

METRICS_TYPE = "text/plain; version=0.0.4"

log = logging.getLogger(__name__)
Endpoint = Callable[[Request], Awaitable[Response]]


class Whole(Protocol):
    """``chat`` or ``complete``."""

    async def __call__(self, service: Service, body: Json, request_id: str | None = None) -> Json: ...


class Streamed(Protocol):
    """``chat_stream`` or ``complete_stream``."""

    def __call__(self, service: Service, body: Json, request_id: str | None = None) -> AsyncGenerator[Json, None]: ...


def build_asgi_app(
    service: Service, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES, echo_request_ids: bool = True
) -> Starlette:
    """The whole API over ``service``. Every answer is an OpenAI object, an event stream or an error envelope."""
    return Starlette(
        routes=build_routes(service, max_body_bytes),
        middleware=[Middleware(RequestIds, echo=echo_request_ids)],
        exception_handlers={HTTPException: _answer_http_exception},
    )


def build_routes(service: Service, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> list[Route]:
    """The endpoints alone, for an application that has others."""

    async def list_models(request: Request) -> Response:
        return json_response(model_list(service))

    async def show_model(request: Request) -> Response:
        return json_response(model_object(service, request.path_params["name"]))

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        is_ready, reasons = service.ready()
        return json_response(reasons, 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics_text(), media_type=METRICS_TYPE)

    async def transfers(request: Request) -> Response:
        return json_response({"data": [{"id": name, **record} for name, record in service.transfers().items()]})

    async def transfer(request: Request) -> Response:
        name = request.path_params["name"]
        record = service.transfers().get(name)
        if record is None:
            raise NotFound(f"No transfer of a request '{name[:256]}' is remembered.")
        return json_response({"id": name, **record})

    generations: dict[str, Endpoint] = {
        "/v1/chat/completions": _generation(service, chat, chat_stream, max_body_bytes),
        "/v1/completions": _generation(service, complete, complete_stream, max_body_bytes),
    }
    lookups: dict[str, Endpoint] = {
        "/v1/models": list_models,
        "/v1/models/{name:path}": show_model,
        "/health": health,
        "/ready": ready,
        "/metrics": metrics,
        "/debug/transfers": transfers,
        "/debug/transfers/{name}": transfer,
    }
    return [Route(path, _answer_errors(endpoint), methods=["POST"]) for path, endpoint in generations.items()] + [
        Route(path, _answer_errors(endpoint), methods=["GET"]) for path, endpoint in lookups.items()
    ]


def _generation(service: Service, whole: Whole, streamed: Streamed, max_body_bytes: int) -> Endpoint:
    async def generation(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        request_id = getattr(request.state, "request_id", None)
        if body.get("stream") is True:
            return EventStream(streamed(service, body, request_id))
        return json_response(await while_connected(request.receive, whole(service, body, request_id)))

    return generation


def _answer_errors(endpoint: Endpoint) -> Endpoint:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return ClientLeft()
        except ApiError as error:
            return error_response(error)
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            return error_response(InternalError())

    return answer


async def _answer_http_exception(request: Request, exception: Exception) -> Response:
    """Starlette's own refusals, in our envelope."""
    assert isinstance(exception, HTTPException)
    error: ApiError
    if exception.status_code == 404:
        error = NotFound(f"There is no '{request.url.path[:256]}' here.")
    elif exception.status_code == 405:
        error = MethodNotAllowed(f"'{request.method}' is not allowed here.")
    else:
        error = BadRequest(str(exception.detail))
    response = error_response(error)
    response.headers.update(exception.headers or {})
    return response
