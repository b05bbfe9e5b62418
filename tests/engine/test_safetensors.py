"""Folders of safetensors: one file and shards, names, dtypes, and damaged or incomplete folders."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine_models.written_files import HF, WEIGHTS, shard, write_folder
from splitserve.engine.weights import safetensors_model
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.loading import check_fit
from splitserve.engine.weights.safetensors_model import SafetensorsModel

SEEING = {  # what is around the language model of a Gemma 3 that sees; a Llama stands for it here
    "vision_tower.vision_model.embeddings.patch_embedding.weight": torch.zeros(4, 4),
    "multi_modal_projector.mm_input_projection_weight": torch.zeros(4, 4),
}


def assert_weights(folder: Path) -> SafetensorsModel:
    files = SafetensorsModel(folder)
    check_fit(files)
    read = dict(files.tensors())
    assert read.keys() == files.index.keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, WEIGHTS[name])
        assert files.index[name].stored_bytes == tensor.nbytes
    return files


def renamed(rename: Callable[[str], str]) -> dict[str, torch.Tensor]:
    return {rename(name): tensor for name, tensor in WEIGHTS.items()}


def test_one_file_and_shards_hold_the_same(tmp_path: Path) -> None:
    one = assert_weights(write_folder(tmp_path, WEIGHTS))
    assert one.index.keys() == WEIGHTS.keys()
    shard(tmp_path)
    assert assert_weights(tmp_path).index == one.index


def test_a_file_that_is_mapped_in_pieces_holds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_model, "_GROUP_BYTES", 10_000)  # a few of the tensors
    assert assert_weights(write_folder(tmp_path, WEIGHTS)).index.keys() == WEIGHTS.keys()


def test_a_shard_with_nothing_of_the_language_model_is_passed_over(tmp_path: Path) -> None:
    write_folder(tmp_path, WEIGHTS)
    shard(tmp_path)
    save_file(SEEING, tmp_path / "model-0.safetensors")
    file = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(file.read_text())["weight_map"] | dict.fromkeys(SEEING, "model-0.safetensors")
    file.write_text(json.dumps({"weight_map": weight_map}))
    assert assert_weights(tmp_path).index.keys() == WEIGHTS.keys()


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds no weights"):
        SafetensorsModel(write_folder(tmp_path, SEEING))


@pytest.mark.parametrize(
    "weights",
    [
        renamed(lambda name: f"language_model.{name}") | SEEING,
        renamed(lambda name: name.replace("model.", "model.language_model.", 1))
        | {f"model.{name}": tensor for name, tensor in SEEING.items()},
        WEIGHTS | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)},
    ],
    ids=["language_model.model", "model.language_model", "rotary tables"],
)
def test_all_spellings_of_names_are_known_and_other_parts_left_out(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert assert_weights(write_folder(tmp_path, weights)).index.keys() == WEIGHTS.keys()


def test_a_decoder_without_head_may_lack_the_prefix(tmp_path: Path) -> None:
    weights = {name.removeprefix("model."): tensor for name, tensor in WEIGHTS.items() if name != "lm_head.weight"}
    assert_weights(write_folder(tmp_path, weights, tie_word_embeddings=True))


def test_a_tied_head_that_is_stored_as_well_is_left_out(tmp_path: Path) -> None:
    assert "lm_head.weight" not in assert_weights(write_folder(tmp_path, WEIGHTS, tie_word_embeddings=True)).index


@pytest.mark.parametrize(
    ("config", "stored", "native"),
    [
        ({"torch_dtype": "bfloat16"}, torch.float32, "bfloat16"),
        ({"dtype": "float16"}, torch.float32, "float16"),
        ({"text_config": HF | {"dtype": "float16"}}, torch.float32, "float16"),
        ({}, torch.bfloat16, "bfloat16"),
        ({"torch_dtype": "auto"}, torch.float32, "float32"),
        ({"torch_dtype": ["bfloat16"]}, torch.float16, "float16"),
    ],
)
def test_the_native_dtype_is_what_the_config_says_or_how_most_is_stored(
    config: dict[str, Any], stored: torch.dtype, native: str, tmp_path: Path
) -> None:
    weights = {name: t.to(stored) if t.ndim > 1 else t for name, t in WEIGHTS.items()}
    assert SafetensorsModel(write_folder(tmp_path, weights, **config)).native_dtype == native


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.int64, "I64")], ids=str
)
def test_quantised_weights_are_refused_by_their_dtype(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    weights = WEIGHTS | {"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 32, dtype=dtype)}
    write_folder(tmp_path, weights)
    with pytest.raises(ModelLoadError, match=rf"model\.layers\.0\.mlp\.up_proj\.weight has dtype {name}, which is not"):
        SafetensorsModel(tmp_path)


def test_a_quantised_config_is_refused_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"quantization_config=.*fp8.*not supported"):
        SafetensorsModel(write_folder(tmp_path, WEIGHTS, quantization_config={"quant_method": "fp8"}))


def test_a_folder_without_weights_says_what_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsModel(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_never_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelLoadError, match=rf"pickled weights \({name}\), which are never read"):
        SafetensorsModel(tmp_path)


def test_a_folder_around_a_gguf_file_says_to_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"name the file itself: .*/m\.gguf"):
        SafetensorsModel(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json cannot be read: .*No such file"),
        (b"", "config.json cannot be read"),
        (b"\xff\xfe", "config.json cannot be read"),
        (b"[1]", "config.json must hold a JSON object"),
        (b"[" * 100_000, "config.json cannot be read"),
        (b" " * (64 << 20) + b"{}", r"config.json has \d+ bytes, more than 67108864"),
        (json.dumps(HF | {"hidden_size": 10**30}).encode(), "hidden_size is 10{30}, no tensor is so large"),
        (json.dumps(HF | {"num_attention_heads": 2**40}).encode(), r"heads \* head_dim is|head_dim must"),
        (json.dumps(HF | {"intermediate_size": 2**62}).encode(), "no model can have the sizes|instead of"),
        (json.dumps(HF | {"num_hidden_layers": 4000}).encode(), "21 tensors for 4000 layers"),
    ],
    ids=["absent", "empty", "no text", "no object", "deep", "long", "wide", "many heads", "wide network", "layers"],
)
def test_a_config_that_cannot_be_is_refused_before_memory_is_taken(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, WEIGHTS)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        check_fit(SafetensorsModel(tmp_path))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../model.safetensors"}, "'../model.safetensors' for a, outside the folder"),
        ({"a": ["model.safetensors"]}, "names the file .* outside the folder"),
        ({"a": "model.safetensors", "b": "gone.safetensors"}, r"gone\.safetensors is missing"),
        ({"model.norm.weight": "model.safetensors", "b": "model.safetensors"}, "names tensors that its files lack: b"),
        ({}, "has no weight_map"),
        ("model.safetensors", "has no weight_map"),
    ],
)
def test_an_index_that_its_shards_do_not_fit_is_refused(weight_map: object, message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, WEIGHTS)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsModel(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, WEIGHTS)
    shard(tmp_path)
    save_file(WEIGHTS, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors: tensor model\.layers\..* is stored twice"):
        SafetensorsModel(tmp_path)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    weights = dict(WEIGHTS)
    weights["model.surplus"] = weights.pop("model.norm.weight")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 32)
    with pytest.raises(ModelLoadError) as caught:
        check_fit(SafetensorsModel(write_folder(tmp_path, weights)))
    message = str(caught.value)
    assert "missing model.norm.weight" in message
    assert "unexpected model.surplus" in message
    assert "model.layers.1.mlp.up_proj.weight has shape [3, 32] instead of [64, 32]" in message


def test_the_fingerprint_follows_the_content_and_not_the_folder(tmp_path: Path) -> None:
    def fingerprint(name: str, weights: dict[str, torch.Tensor], **changes: Any) -> str:
        return SafetensorsModel(write_folder(tmp_path / name, weights, **changes)).fingerprint

    first = fingerprint("a", WEIGHTS)
    assert first == fingerprint("b", WEIGHTS)
    assert first != fingerprint("c", WEIGHTS, rope_theta=5e5)
    tuned = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    assert first != fingerprint("d", tuned)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("intact"), WEIGHTS)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(data: st.DataObject, intact: Path) -> None:
    file = intact / "model.safetensors"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
            SafetensorsModel(intact)
    finally:
        file.write_bytes(whole)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject, intact: Path) -> None:
    """In the config or in the head of the weights: never another exception, never memory for sizes only claimed."""
    file = intact / data.draw(st.sampled_from(["model.safetensors", "config.json"]))
    whole = file.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little") if file.suffix == ".safetensors" else len(whole)
    damaged = bytearray(whole)
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, head - 1), st.integers(0, 255)), max_size=3)):
        damaged[at] = value
    try:
        file.write_bytes(damaged)
        with suppress(ModelLoadError):
            files = SafetensorsModel(intact)
            check_fit(files)
            assert len(dict(files.tensors())) == len(files.index)
    finally:
        file.write_bytes(whole)
