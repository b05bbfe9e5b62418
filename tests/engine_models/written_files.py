"""Tiny models on disk as others write them: GGUF as llama.cpp's converter does, folders as transformers does."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from engine_models.random_model import RandomModel
from splitserve.engine.model_config import Experts, ModelConfig, Variation

PLAIN = ModelConfig(
    architecture="llama",
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=50,
    max_model_tokens=128,
    rms_norm_eps=2**-20,  # the same in float32, as GGUF stores it
    rope_theta=10_000.0,
    rope_scaling=None,
    tied_embeddings=False,
    eos_token_ids=frozenset([2]),
)
CONFIGS = {
    "llama": PLAIN,
    "mixtral": replace(PLAIN, architecture="mixtral", variation=Variation(experts=Experts(3, 2, 64, True))),
    "qwen2": replace(PLAIN, architecture="qwen2", variation=Variation(projection_bias=True)),
    "qwen3": replace(PLAIN, architecture="qwen3", head_dim=128),  # what transformers takes whatever a GGUF file says
    "qwen3_moe": replace(PLAIN, architecture="qwen3_moe", variation=Variation(experts=Experts(3, 2, 32, True))),
    "gemma2": replace(
        PLAIN,
        architecture="gemma2",
        tied_embeddings=True,
        variation=Variation(attention_soft_cap=50.0, logit_soft_cap=30.0, windows=(8, None)),
    ),
    "gemma3": replace(
        PLAIN,
        architecture="gemma3",
        tied_embeddings=True,
        variation=Variation(windows=(8, 8), windowed_rope_theta=10_000.0),
    ),
}
HF: dict[str, Any] = {  # config.json of PLAIN
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2**-20,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
WEIGHTS = dict(RandomModel(PLAIN).tensors())
_GGUF_NAMES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}


def write_folder(folder: Path, weights: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """``changes`` replace fields of config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF | changes))
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def shard(folder: Path) -> None:
    """Split the one file of PLAIN's weights in two, by whether a tensor belongs to a layer."""
    parts: dict[str, dict[str, torch.Tensor]] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for name, tensor in WEIGHTS.items():
        parts["model-1.safetensors" if "layers" in name else "model-2.safetensors"][name] = tensor
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink(missing_ok=True)


def write_gguf(
    file: Path,
    config: ModelConfig = PLAIN,
    weights: Mapping[str, torch.Tensor] = WEIGHTS,
    *,
    kind_of: Callable[[str], Kind] = lambda name: Kind.F32,
    divisors: Sequence[float] | None = None,
    most_tensors: int = 0,
) -> Path:
    """``kind_of`` a stored tensor's name; ``most_tensors`` in one part, 0: one file. Returns the first file."""
    architecture = _GGUF_NAMES.get(config.architecture, config.architecture)
    writer = gguf.GGUFWriter(str(file), architecture, split_max_tensors=most_tensors)
    _write_metadata(writer, config)
    model = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(model, config.layers)
    for name, tensor in stacked(weights).items():
        array = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = paired(array, config.heads if "q_proj" in name else config.kv_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + np.float32(1)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        kind = kind_of(stored) if array.ndim > 1 else Kind.F32
        writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(file.parent.glob(f"{file.stem}*.gguf")) if most_tensors else file


def stacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With one tensor for all experts in place of one for each."""
    result: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        before, among, after = name.partition(".experts.")
        if among:
            experts.setdefault(f"{before}{among}{after.partition('.')[2]}", []).append(tensor)
        else:
            result[name] = tensor
    return result | {name: torch.stack(parts) for name, parts in experts.items()}


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of query and key in GGUF's order for Llama: the two halves of a head take turns."""
    order = np.arange(weight.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    return weight[order]


def _write_metadata(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_model_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if experts := config.variation.experts:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.used)
        writer.add_expert_feed_forward_length(experts.intermediate_size)
    if windows := [window for window in config.variation.windows if window]:
        writer.add_sliding_window(windows[0])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_token_scores([0.5] * config.vocab_size)
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(min(config.eos_token_ids))
