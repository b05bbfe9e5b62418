"""The conversation of a chat request."""

from typing import Any

from splitserve.cluster.api.errors import BadRequest
from splitserve.cluster.api.fields import check_text

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
PARAM = "messages"

# What clients send back of an earlier reply, at the values that mean nothing.
NO_OPS: dict[str, object] = {"tool_calls": [], "annotations": []}


def read_messages(value: object) -> list[dict[str, str]]:
    """Messages with ``role``, ``content`` as one string and, where given, ``name``. Raises ``BadRequest``.

    A content of several text parts is joined by newlines.
    """
    if not isinstance(value, list) or not value:
        raise BadRequest("'messages' must be a list with at least one message.", PARAM)
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _read_message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object.", PARAM)
    role = check_text(message.get("role"), PARAM, f"The role of {where}")
    if role not in ROLES:
        raise BadRequest(f"The role of {where} must be one of {', '.join(ROLES)}.", PARAM)
    found = {"role": ROLES[role], "content": _read_content(message.get("content"), where)}
    if message.get("name") is not None:
        found["name"] = check_text(message["name"], PARAM, f"The name of {where}")
    for field, content in message.items():
        if field not in {"role", "content", "name"} and content is not None and content != NO_OPS.get(field):
            shown = str(field)[:64].encode(errors="replace").decode()
            raise BadRequest(f"'{shown}' in {where} is not supported.", PARAM)
    return found


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return check_text(content, PARAM, f"The content of {where}")
    if not isinstance(content, list) or not content:
        raise BadRequest(f"The content of {where} must be a string or a list of text parts.", PARAM)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadRequest(f"The content of {where} has an unsupported content type; only text is.", PARAM)
    return "\n".join(check_text(part.get("text"), PARAM, f"A text part of {where}") for part in content)


def text_bytes(messages: list[dict[str, str]]) -> int:
    """Bytes of UTF-8 in the conversation's contents."""
    return sum(len(message["content"].encode()) for message in messages)
