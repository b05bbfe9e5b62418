"""The table of fields that clients send by habit and that are harmless at certain values.

A value listed here changes nothing about the answer; any other value of that field would, and is refused rather than
dropped.
"""

from typing import Any

from splitserve.cluster.api.errors import UnknownField, UnsupportedField

ANY = object()  # at every value the answer stays the same

NO_OPS: dict[str, tuple[object, ...]] = {
    # for the provider's records and billing
    "metadata": (ANY,),
    "prompt_cache_key": (ANY,),
    "safety_identifier": (ANY,),
    "service_tier": (ANY,),
    "store": (False,),
    "user": (ANY,),
    # tools: none are offered
    "function_call": ("none",),
    "functions": ([],),
    "parallel_tool_calls": (ANY,),
    "tool_choice": ("none",),
    "tools": ([],),
    # sampling
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    # form of the answer
    "echo": (False,),
    "logprobs": (False,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "top_logprobs": (0,),
}

KNOWN_UNSUPPORTED = frozenset(
    {
        "audio",
        "guided_json",
        "guided_regex",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
    }
)


def refuse_rest(rest: dict[str, Any]) -> None:
    """Raise ``UnsupportedField`` or ``UnknownField`` for the first of ``rest`` that is not a no-op."""
    for name, value in rest.items():
        accepted = NO_OPS.get(name)
        if accepted is not None:
            if not any(allowed is ANY or _same(value, allowed) for allowed in accepted):
                raise UnsupportedField(f"'{name}' is not supported with this value.", name)
        elif name in KNOWN_UNSUPPORTED:
            raise UnsupportedField(f"'{name}' is not supported.", name)
        else:
            shown = name[:64].encode(errors="replace").decode()
            raise UnknownField(f"'{shown}' is not a known field.", shown)


def _same(value: object, allowed: object) -> bool:
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed
