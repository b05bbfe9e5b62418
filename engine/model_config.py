"""The shape of a model, read from a Hugging Face ``config.json`` or from GGUF metadata."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitserve.engine.weights.errors import ModelLoadError

HF_ARCHITECTURES = {"LlamaForCausalLM": "llama"}
GGUF_ARCHITECTURES = {"llama": "llama"}


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Stretches the long wavelengths of the rotary embedding, as Llama 3.1 does."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_tokens: int


@dataclass(frozen=True, slots=True)
class RopeDivisors:
    """One divisor for each of the ``head_dim / 2`` rotary frequencies: the form in which GGUF files store a scaling."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the engine must know of a decoder to build it. Sizes are counts of elements."""

    architecture: str  # a key of ``models.registry.MODELS``
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_tokens: int  # prompt and output
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | RopeDivisors | None
    tied_embeddings: bool  # the output head is the embedding table
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_model_tokens < 1:
            raise ModelLoadError(f"max_model_tokens must be at least 1, got {self.max_model_tokens}")
        if self.heads % self.kv_heads:
            raise ModelLoadError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.rms_norm_eps <= 0 or self.rope_theta <= 0:
            raise ModelLoadError(
                f"rms_norm_eps and rope_theta must be positive, got {self.rms_norm_eps}, {self.rope_theta}"
            )
        if isinstance(self.rope_scaling, RopeDivisors) and len(self.rope_scaling.divisors) != self.head_dim // 2:
            raise ModelLoadError(
                f"rope_freqs must hold {self.head_dim // 2} values, got {len(self.rope_scaling.divisors)}"
            )
        if wrong := [token for token in self.eos_token_ids if not 0 <= token < self.vocab_size]:
            raise ModelLoadError(f"eos_token_ids {wrong} lie outside the vocabulary of {self.vocab_size}")

    @property
    def rope_key(self) -> str:
        """Text that is equal for two models exactly when their rotary settings are."""
        return f"theta={self.rope_theta!r} scaling={self.rope_scaling!r}"


class _Fields:
    """Typed access to a dict that came from a file; every error names the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelLoadError(f"{self._where}: {name} must be an integer, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{self._where}: {name} must be a number, got {value!r}")
        return float(value)

    def require(self, name: str, default: Any, accepted: tuple[Any, ...]) -> None:
        value = self._values.get(name, default)
        if value not in accepted:
            raise ModelLoadError(f"{self._where}: {name}={value!r} is not supported; supported: {accepted}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self._where}: {name} is missing")
        return value


def _supported(name: object, known: Mapping[str, str], where: str) -> str:
    if not isinstance(name, str) or name not in known:
        raise ModelLoadError(f"{where}: architecture {name!r} is not supported; supported: {', '.join(sorted(known))}")
    return known[name]


def _token_ids(value: object, where: str) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelLoadError(f"{where}: eos_token_id must be an integer or a list of integers, got {value!r}")
    return frozenset(ids)


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Both spellings: ``rope_parameters`` of transformers 5, and the older ``rope_theta`` with ``rope_scaling``."""
    spelled = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(spelled, Mapping):
        raise ModelLoadError(f"config.json: rope_parameters must be an object, got {spelled!r}")
    fields = _Fields(spelled, "config.json: rope_parameters")
    theta = fields.number("rope_theta", _Fields(config, "config.json").number("rope_theta", 10_000.0))
    kind = spelled.get("rope_type", spelled.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelLoadError(f"config.json: rope_type {kind!r} is not supported; supported: default, llama3")
    scaling = Llama3RopeScaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_tokens=fields.integer("original_max_position_embeddings"),
    )
    return theta, scaling


def config_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the parsed ``config.json``, with the end-of-sequence tokens of ``generation_config.json`` added.

    Raises ModelLoadError naming the field that is missing, wrong or not supported.
    """
    where = "config.json"
    names = config.get("architectures") or [None]
    architecture = _supported(names[0], HF_ARCHITECTURES, where)
    fields = _Fields(config, where)
    fields.require("hidden_act", "silu", ("silu",))
    for flag in ("attention_bias", "mlp_bias"):
        fields.require(flag, False, (False, None))
    for absent in ("quantization_config", "sliding_window"):
        fields.require(absent, None, (None,))
    theta, scaling = _hf_rope(config)
    heads = fields.integer("num_attention_heads")
    eos = _token_ids(config.get("eos_token_id"), where)
    if generation_config is not None:
        eos |= _token_ids(generation_config.get("eos_token_id"), "generation_config.json")
    return ModelConfig(
        architecture=architecture,
        hidden_size=fields.integer("hidden_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", fields.integer("hidden_size") // max(heads, 1)),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_model_tokens=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=eos,
    )


def config_from_gguf(
    metadata: Mapping[str, Any], *, tied_embeddings: bool, rope_divisors: tuple[float, ...] | None = None
) -> ModelConfig:
    """Read GGUF metadata. What GGUF says through tensors is passed in: whether there is an output head of its own, and
    the content of ``rope_freqs.weight``. Raises ModelLoadError naming the key that is missing, wrong or not supported.
    """
    where = "GGUF metadata"
    architecture = _supported(metadata.get("general.architecture"), GGUF_ARCHITECTURES, where)
    fields = _Fields(metadata, where)
    key = metadata["general.architecture"]
    fields.require(f"{key}.expert_count", 0, (0,))
    fields.require(f"{key}.rope.scaling.type", "none", ("none",))
    heads = fields.integer(f"{key}.attention.head_count")
    hidden_size = fields.integer(f"{key}.embedding_length")
    head_dim = fields.integer(f"{key}.attention.key_length", hidden_size // max(heads, 1))
    for same in ("attention.value_length", "rope.dimension_count"):
        fields.require(f"{key}.{same}", head_dim, (head_dim,))
    ends = ("eos", "eot", "eom")
    eos = frozenset[int]().union(*(_token_ids(metadata.get(f"tokenizer.ggml.{end}_token_id"), where) for end in ends))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        layers=fields.integer(f"{key}.block_count"),
        heads=heads,
        kv_heads=fields.integer(f"{key}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer(f"{key}.feed_forward_length"),
        vocab_size=fields.integer(f"{key}.vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        max_model_tokens=fields.integer(f"{key}.context_length"),
        rms_norm_eps=fields.number(f"{key}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(f"{key}.rope.freq_base", 10_000.0),
        rope_scaling=RopeDivisors(rope_divisors) if rope_divisors is not None else None,
        tied_embeddings=tied_embeddings,
        eos_token_ids=eos,
    )
