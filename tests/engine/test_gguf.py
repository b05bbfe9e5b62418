"""GGUF files: names, row order and values of every architecture and type, parts, and damaged files."""

import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_models.random_model import RandomModel
from engine_models.written_files import CONFIGS, PLAIN, WEIGHTS, write_gguf
from splitserve.engine.model_config import ModelConfig, RopeDivisors
from splitserve.engine.weights.errors import ModelLoadError
from splitserve.engine.weights.gguf_model import GgufModel
from splitserve.engine.weights.loading import check_fit

ELEMENTS = 256  # of a block of the K types


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    return dict(RandomModel(config).tensors())


def read(file: Path) -> dict[str, torch.Tensor]:
    """Everything in the file, checked against its own index and config."""
    files = GgufModel(file)
    check_fit(files)
    tensors = dict(files.tensors())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: info.shape for name, info in files.index.items()
    }
    return tensors


def assert_same(read: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert read.keys() == expected.keys()
    for name, tensor in read.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_gives_the_weights_that_were_converted(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    file = write_gguf(tmp_path / "m.gguf", config, weights_of(config))
    assert GgufModel(file).config == config
    # Only Gemma's norms, which are stored plus 1, lose the last bits of a float32.
    assert_same(read(file), weights_of(config), 2e-7 if name.startswith("gemma") else 0.0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_transformers_reads_the_same_from_the_same_file(name: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", CONFIGS[name], weights_of(CONFIGS[name]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    expected = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    assert_same(read(file), expected, 0.0)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_cut_out_of_quantised_tensors(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    file = write_gguf(
        tmp_path / "m.gguf",
        config,
        weights_of(config),
        kind_of=lambda stored: Kind.Q8_0 if "exps" in stored else Kind.F32,
    )
    assert_same(read(file), weights_of(config), 0.005)


@pytest.mark.parametrize(
    ("kind", "error"),  # the largest, as a share of a block's largest magnitude
    [
        (Kind.F32, 0.0),
        (Kind.F16, 2**-11),
        (Kind.BF16, 2**-8),
        (Kind.Q8_0, 0.5 / 127 + 1e-3),
        (Kind.Q4_0, 1 / 8 + 1e-3),
        (Kind.Q4_1, 1 / 15 + 2e-3),
        (Kind.Q5_0, 1 / 16 + 1e-3),
        (Kind.Q5_1, 1 / 31 + 2e-3),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_quantised_weights_come_back_within_their_precision(kind: Kind, error: float, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    file = write_gguf(tmp_path / "m.gguf", kind_of=lambda stored: kind if "ffn_down" in stored else Kind.F32)
    back, original = read(file)[name].reshape(-1, 32), WEIGHTS[name].reshape(-1, 32)
    assert back.dtype is torch.float32
    assert bool(((back - original).abs() <= error * original.abs().amax(dim=1, keepdim=True)).all())
    stored = GgufModel(file).index[name].stored_bytes
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    assert stored == original.numel() // elements * size


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, at)[0])


def scale_and_minimum(packed: bytes, part: int) -> tuple[int, int]:
    """Two numbers of 6 bits for each of 8 parts, packed into 12 bytes."""
    if part < 4:
        return packed[part] & 63, packed[part + 4] & 63
    low = packed[part + 4]
    return low & 15 | packed[part - 4] >> 6 << 4, low >> 4 | packed[part] >> 6 << 4


def q4_k(block: bytes, element: int) -> float:
    """Element of ggml's ``block_q4_K``: half d, half dmin, scales[12], qs[128]."""
    scale, minimum = scale_and_minimum(block[4:16], element // 32)
    byte = block[16 + element // 64 * 32 + element % 32]
    level = byte >> 4 if element // 32 % 2 else byte & 15
    return half(block, 0) * scale * level - half(block, 2) * minimum


def q5_k(block: bytes, element: int) -> float:
    """Element of ggml's ``block_q5_K``: half d, half dmin, scales[12], qh[32], qs[128]."""
    scale, minimum = scale_and_minimum(block[4:16], element // 32)
    byte = block[48 + element // 64 * 32 + element % 32]
    level = byte >> 4 if element // 32 % 2 else byte & 15
    level += 16 * (block[16 + element % 32] >> element // 32 & 1)
    return half(block, 0) * scale * level - half(block, 2) * minimum


def q6_k(block: bytes, element: int) -> float:
    """Element of ggml's ``block_q6_K``: ql[128], qh[64], signed scales[16], half d."""
    side, quarter, place = element // 128, element % 128 // 32, element % 32
    byte = block[64 * side + 32 * (quarter % 2) + place]
    level = byte >> 4 if quarter >= 2 else byte & 15
    level += 16 * (block[128 + 32 * side + place] >> 2 * quarter & 3)
    scale = int(np.frombuffer(block, np.int8, 16, 192)[8 * side + 2 * quarter + place // 16])
    return half(block, 208) * scale * (level - 32)


@pytest.mark.parametrize(
    ("kind", "halves", "element"),
    [(Kind.Q4_K, (0, 2), q4_k), (Kind.Q5_K, (0, 2), q5_k), (Kind.Q6_K, (208,), q6_k)],
    ids=["Q4_K", "Q5_K", "Q6_K"],
)
def test_blocks_of_k_types_are_read_as_published(kind, halves, element, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    size, rows, columns = gguf.GGML_QUANT_SIZES[kind][1], 8, 2 * ELEMENTS
    random = np.random.default_rng(1)
    stored = random.integers(0, 256, (rows, columns // ELEMENTS, size), np.uint8)
    for at in halves:  # any bits but those of an infinity
        stored[..., at : at + 2] = random.uniform(-2, 2, (*stored.shape[:2], 1)).astype(np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    for key, value in (("block_count", 1), ("embedding_length", columns), ("context_length", 8)):
        writer.add_uint32(f"llama.{key}", value)
    for key in ("feed_forward_length", "attention.head_count", "vocab_size"):
        writer.add_uint32(f"llama.{key}", rows)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", stored.reshape(rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = dict(GgufModel(tmp_path / "m.gguf").tensors())["model.embed_tokens.weight"]
    expected = [[element(block.tobytes(), n) for n in range(ELEMENTS)] for block in stored.reshape(-1, size)]
    torch.testing.assert_close(read, torch.tensor(expected).reshape(rows, columns), rtol=1e-6, atol=1e-5)


def test_a_file_without_output_head_is_tied_and_rope_divisors_are_read(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in WEIGHTS.items() if name != "lm_head.weight"}
    divisors = [1.0, 1.5, 2.0, 8.0]
    config = GgufModel(write_gguf(tmp_path / "m.gguf", weights=weights, divisors=divisors)).config
    assert config.tied_embeddings
    assert config.rope_scaling == RopeDivisors(tuple(divisors))


def test_all_parts_of_a_file_are_read_from_the_first(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", most_tensors=5)
    assert first.name.endswith("-00001-of-00005.gguf")
    assert_same(read(first), WEIGHTS, 0.0)
    with pytest.raises(ModelLoadError, match="part 3 of 5; name the first one, m-00001-of-00005"):
        GgufModel(tmp_path / "m-00003-of-00005.gguf")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", most_tensors=5)
    third, fourth = (tmp_path / f"m-0000{number}-of-00005.gguf" for number in (3, 4))
    kept = third.read_bytes()
    third.write_bytes(fourth.read_bytes())
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00005\.gguf says that it is part 4 of 5"):
        GgufModel(first)
    third.write_bytes(kept)
    fourth.unlink()
    with pytest.raises(ModelLoadError, match=r"m-00004-of-00005\.gguf cannot be read"):
        GgufModel(first)
    with pytest.raises(ModelLoadError, match="one of 5 parts, but not named like one"):
        GgufModel(first.rename(tmp_path / "renamed.gguf"))


def test_parts_of_another_model_are_noticed_by_their_tensors(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", most_tensors=5)
    smaller = replace(PLAIN, layers=1)
    write_gguf(tmp_path / "o.gguf", smaller, weights_of(smaller), most_tensors=3)
    second = tmp_path / "m-00002-of-00005.gguf"
    data = (tmp_path / "o-00002-of-00004.gguf").read_bytes()
    second.write_bytes(data.replace(b"split.count\x02\x00\x00\x00\x04", b"split.count\x02\x00\x00\x00\x05"))
    with pytest.raises(ModelLoadError, match=r"hold \d+ tensors instead of 21|is stored in two parts"):
        GgufModel(first)


def test_a_missing_tensor_is_named_before_anything_is_read(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in WEIGHTS.items() if name != "model.layers.0.self_attn.k_proj.weight"}
    with pytest.raises(ModelLoadError, match=r"missing model\.layers\.0\.self_attn\.k_proj\.weight"):
        check_fit(GgufModel(write_gguf(tmp_path / "m.gguf", weights=weights)))


@pytest.mark.parametrize(
    ("after", "skip", "value", "message"),
    [
        (b"", 0, b"GGML", "GGUF magic invalid"),
        (b"GGUF", 0, b"\x01", "version 1"),
        (b"output_norm.weight", 12, b"\x63", "is not a valid GGMLQuantizationType"),
        (b"output_norm.weight", 12, b"\x1a", "output_norm.weight of type I32 cannot be dequantised"),
        (b"general.architecture\x08\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00", 0, b"LLAMA", "'LLAMA' is not supp"),
    ],
    ids=["magic", "version", "unknown type", "type that is no weight", "architecture"],
)
def test_a_file_of_an_unknown_kind_is_refused(
    tmp_path: Path, after: bytes, skip: int, value: bytes, message: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    data = bytearray(file.read_bytes())
    at = data.index(after) + len(after) + skip  # a tensor's type stands behind its name and its one dimension
    data[at : at + len(value)] = value
    file.write_bytes(data)
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*{message}"):
        GgufModel(file)


def test_a_file_of_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="other byte order"):
        GgufModel(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CONFIGS["qwen3_moe"]
    return write_gguf(tmp_path_factory.mktemp("intact") / "m.gguf", config, weights_of(config))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(data: st.DataObject, intact: Path) -> None:
    whole = intact.read_bytes()
    tensors = gguf.GGUFReader(intact).tensors
    cut = data.draw(st.integers(0, max(int(tensor.data_offset + tensor.n_bytes) for tensor in tensors) - 1))
    file = intact.with_name("cut.gguf")
    file.write_bytes(whole[:cut])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        GgufModel(file)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_head_is_refused_or_harmless(data: st.DataObject, intact: Path) -> None:
    """Never another exception, never memory for sizes that the file only claims."""
    damaged = bytearray(intact.read_bytes())
    head = gguf.GGUFReader(intact).data_offset
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, head - 1), st.integers(0, 255)), max_size=3)):
        damaged[at] = value
    file = intact.with_name("damaged.gguf")
    file.write_bytes(damaged)
    with suppress(ModelLoadError):
        read(file)


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    config = replace(PLAIN, layers=8, hidden_size=128, intermediate_size=512)
    weights = weights_of(config)
    files = GgufModel(write_gguf(tmp_path / "m.gguf", config, weights, kind_of=lambda stored: Kind.Q4_1))
    tracemalloc.start()
    try:
        for _name, tensor in files.tensors():
            del tensor
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sum(tensor.nbytes for tensor in weights.values()) / 3
