"""What the engine must know of a model to build it; read by ``hf_config`` and ``gguf_config``."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from splitserve.engine.weights.errors import ModelLoadError

MOST_LAYERS = 4096  # a file that claims more is damaged


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Stretches the long wavelengths of the rotary embedding, as Llama 3.1 does."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_tokens: int


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Divides all positions by the factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """Stretches wavelengths by how often they turn within the original context (arXiv 2309.00071)."""

    factor: float
    original_max_tokens: int
    beta_fast: float  # turns from which on a wavelength is left alone
    beta_slow: float  # turns up to which it is stretched in full
    attention_factor: float  # of cosine and sine, so squared in the scores
    whole_borders: bool  # the two borders are rounded outwards to whole rotary pairs


@dataclass(frozen=True, slots=True)
class RopeDivisors:
    """One divisor for each of the ``head_dim / 2`` rotary frequencies: the form in which GGUF files store a scaling."""

    divisors: tuple[float, ...]


RopeScaling = Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | RopeDivisors


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated networks of which a router picks a few for each token."""

    count: int
    used: int  # per token
    intermediate_size: int  # of one expert
    normalised: bool  # the weights of the picked ones sum to 1
    dense_layers: tuple[int, ...] = ()  # layers with one network for all tokens instead


@dataclass(frozen=True, slots=True)
class Variation:
    """Where a model departs from the plain Llama decoder, which the defaults describe."""

    projection_bias: bool = False  # of query, key and value
    output_bias: bool = False  # of the projection after attention
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()  # per layer, in tokens, the token itself included; empty: none has one
    windowed_rope_theta: float | None = None  # layers with a window rotate by this base, unscaled; None: as all do
    experts: Experts | None = None


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
    rope_scaling: RopeScaling | None
    tied_embeddings: bool  # the output head is the embedding table
    eos_token_ids: frozenset[int]
    variation: Variation = Variation()

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
        if isinstance(self.rope_scaling, RopeDivisors) and len(self.rope_scaling.divisors) != self.head_dim // 2:
            raise ModelLoadError(
                f"rope_freqs must hold {self.head_dim // 2} values, got {len(self.rope_scaling.divisors)}"
            )
        if wrong := [token for token in self.eos_token_ids if not 0 <= token < self.vocab_size]:
            raise ModelLoadError(f"eos_token_ids {wrong} lie outside the vocabulary of {self.vocab_size}")
        if self.variation.windows and len(self.variation.windows) != self.layers:
            raise ModelLoadError(f"windows must name {self.layers} layers, got {len(self.variation.windows)}")
        if wrong_signs := [f"{name}={value}" for name, value in self._positive() if not 0 < value < float("inf")]:
            raise ModelLoadError(f"must be positive and finite: {', '.join(wrong_signs)}")
        if (experts := self.variation.experts) and not 1 <= experts.used <= experts.count:
            raise ModelLoadError(f"experts used per token must lie in [1, {experts.count}], got {experts.used}")

    def window(self, layer: int) -> int | None:
        """Positions that a token sees in ``layer``, its own included; None: all up to its own."""
        return self.variation.windows[layer] if self.variation.windows else None

    @property
    def cache_key(self) -> str:
        """Text that differs whenever two configs compute other keys and values."""
        return " ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in _NOT_IN_PAGES)

    def _positive(self) -> Iterator[tuple[str, float]]:
        """Name and value of each number that only makes sense above zero."""
        variation, scaling, experts = self.variation, self.rope_scaling, self.variation.experts
        named: list[tuple[str, float | None]] = [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("attention_scale", variation.attention_scale),
            ("attention_soft_cap", variation.attention_soft_cap),
            ("logit_soft_cap", variation.logit_soft_cap),
            ("windowed_rope_theta", variation.windowed_rope_theta),
            *(("sliding_window", window) for window in variation.windows),
        ]
        if isinstance(scaling, RopeDivisors):
            named += [("rope_freqs", divisor) for divisor in scaling.divisors]
        elif scaling is not None:
            named.append(("rope factor", scaling.factor))
        if isinstance(scaling, Llama3RopeScaling | YarnRopeScaling):
            named.append(("original_max_position_embeddings", scaling.original_max_tokens))
        if isinstance(scaling, Llama3RopeScaling):
            named.append(("high_freq_factor above low_freq_factor", scaling.high_freq_factor - scaling.low_freq_factor))
        if isinstance(scaling, YarnRopeScaling):
            named += [("beta_slow", scaling.beta_slow), ("attention_factor", scaling.attention_factor)]
            named.append(("beta_fast above beta_slow", scaling.beta_fast - scaling.beta_slow))
            named.append(("rope_theta above 1", self.rope_theta - 1))
        if experts is not None:
            named.append(("expert intermediate size", experts.intermediate_size))
        return ((name, value) for name, value in named if value is not None)


_NOT_IN_PAGES = {"vocab_size", "max_model_tokens", "tied_embeddings", "eos_token_ids"}
