"""HTTP responses in JSON."""

import msgspec
from starlette.responses import Response

from splitserve.cluster.api.errors import ApiError, answer_of, envelope, headers
from splitserve.cluster.api.reply import Json


def json_response(content: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``content`` as a JSON response."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The envelope of ``error`` with its status and headers."""
    return json_response(envelope(error), answer_of(error).status, headers(error))
