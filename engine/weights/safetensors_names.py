"""Which stored tensors are weights of the language model, and under which name a model knows them."""

_NO_WEIGHTS = (  # tables that follow from the config, as old files store them
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
_OTHER_PARTS = (  # of models that see as well
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    # without an output head, as the bare decoder is saved
    ("embed_tokens.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
)


def weight_name(stored: str) -> str | None:
    """The model's name of a stored tensor, or None for one that is no weight of the language model."""
    if stored.endswith(_NO_WEIGHTS) or stored.startswith(_OTHER_PARTS):
        return None
    for prefix, own in _PREFIXES:
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored
