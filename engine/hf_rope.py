"""Rotary settings from a Hugging Face ``config.json``, in the spellings of all versions."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from splitserve.engine.config_fields import ConfigFields
from splitserve.engine.model_config import LinearRopeScaling, Llama3RopeScaling, RopeScaling, YarnRopeScaling
from splitserve.engine.weights.errors import ModelLoadError

_WHERE = "config.json: rope_parameters"
_IN_ALL = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_BY_KIND = {
    "default": _IN_ALL,
    "linear": _IN_ALL | {"factor"},
    "llama3": _IN_ALL | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _IN_ALL
    | {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


@dataclass(frozen=True, slots=True)
class HfRope:
    """Rotary settings of all layers, or of those without a window where the others have a base of their own."""

    theta: float
    scaling: RopeScaling | None
    windowed_theta: float | None


def rope_from_hf(fields: ConfigFields, architecture: str) -> HfRope:
    """Read ``rope_parameters`` of transformers 5, or the older ``rope_theta`` with ``rope_scaling``.

    Raises ModelLoadError for a kind of scaling, or a field of one, that is not supported.
    """
    spelled = fields.object_or_empty("rope_parameters") or fields.object_or_empty("rope_scaling")
    windowed_theta = None
    if architecture == "gemma3":
        windowed_theta = fields.number("rope_local_base_freq", 10_000.0)
        if "sliding_attention" in spelled or "full_attention" in spelled:
            local, spelled = spelled.get("sliding_attention") or {}, spelled.get("full_attention") or {}
            local_fields = _checked(local)
            if _kind(local) != "default":
                raise ModelLoadError(f"{_WHERE}: sliding_attention: rope_type {_kind(local)!r} is not supported")
            windowed_theta = local_fields.number("rope_theta", windowed_theta)
    own = _checked(spelled)
    theta = own.number("rope_theta", fields.number("rope_theta", 10_000.0))
    return HfRope(theta, _scaling(own, _kind(spelled), fields), windowed_theta)


def _kind(spelled: Mapping[str, Any]) -> Any:
    return spelled.get("rope_type", spelled.get("type", "default"))


def _checked(spelled: object) -> ConfigFields:
    if not isinstance(spelled, Mapping):
        raise ModelLoadError(f"{_WHERE} must be an object, got {spelled!r}")
    kind = _kind(spelled)
    if not isinstance(kind, str) or kind not in _BY_KIND:
        raise ModelLoadError(f"{_WHERE}: rope_type {kind!r} is not supported; supported: {', '.join(_BY_KIND)}")
    fields = ConfigFields(spelled, _WHERE)
    fields.refuse_others(frozenset(_BY_KIND[kind]))
    fields.require("partial_rotary_factor", None, (None, 1))
    return fields


def _scaling(own: ConfigFields, kind: str, model: ConfigFields) -> RopeScaling | None:
    if kind == "default":
        return None
    factor = own.number("factor")
    if kind == "linear":
        return LinearRopeScaling(factor)
    # A value beside the scaling wins over one within it, as in transformers.
    original = model.integer_or_none("original_max_position_embeddings") or own.integer(
        "original_max_position_embeddings", model.integer("max_position_embeddings")
    )
    if kind == "llama3":
        return Llama3RopeScaling(factor, own.number("low_freq_factor"), own.number("high_freq_factor"), original)
    return YarnRopeScaling(
        factor=factor,
        original_max_tokens=original,
        beta_fast=own.number("beta_fast", 32.0),
        beta_slow=own.number("beta_slow", 1.0),
        attention_factor=own.number("attention_factor", _yarn_attention_factor(own, factor)),
        whole_borders=own.flag("truncate", True),
    )


def _yarn_attention_factor(own: ConfigFields, factor: float) -> float:
    """What the YaRN paper recommends; two fields may weigh it (DeepSeek's addition)."""

    def stretched(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    over, under = own.number_or_none("mscale"), own.number_or_none("mscale_all_dim")
    return stretched(over) / stretched(under) if over and under else stretched(1.0)
