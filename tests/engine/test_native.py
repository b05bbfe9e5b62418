"""Compiled kernels against torch: the same numbers, NaN included, for every shape in the table."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from splitserve.engine.batch import build_batch
from splitserve.engine.native import compiling
from splitserve.engine.native.compiling import NotCompiled, compiled_library
from splitserve.engine.native.kernels import load_kernels
from splitserve.engine.native.native_operations import NativeOperations
from splitserve.engine.operations import AttentionSpec, Operations, Rotary
from splitserve.engine.platforms import choose_platform
from splitserve.engine.protocol import PageId, RequestId
from splitserve.engine.step import Chunk
from splitserve.engine.torch_operations import TorchOperations

CPU = torch.device("cpu")
TORCH = TorchOperations(CPU)
LAYERS = 3
PAGES = 200


@pytest.fixture(scope="module")
def native() -> Operations:
    try:
        return NativeOperations(load_kernels())
    except NotCompiled as reason:
        pytest.skip(str(reason))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 7, 64, 576])
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(native: Operations, rows: int, size: int, offset: float) -> None:
    hidden, residual, weight = random(rows, size), random(rows, size, seed=1), random(size, seed=2)
    torch.testing.assert_close(
        native.rms_norm(hidden, weight, 1e-5, offset), TORCH.rms_norm(hidden, weight, 1e-5, offset)
    )
    expected = TORCH.add_rms_norm(residual, hidden, weight, 1e-5, offset)
    torch.testing.assert_close(native.add_rms_norm(residual.clone(), hidden, weight, 1e-5, offset), expected)


def test_a_norm_of_heads_that_are_a_view(native: Operations) -> None:
    heads, weight = random(5, 12, 16)[:, 2:7], random(16, seed=1)
    torch.testing.assert_close(native.rms_norm(heads, weight, 1e-6), TORCH.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("activation", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 17), (64, 1536)])
def test_gates(native: Operations, activation: str, rows: int, size: int) -> None:
    gate_up = random(rows, 2 * size) * 5
    gate_up[0, 0], gate_up[-1, -1] = 200.0, -200.0
    torch.testing.assert_close(getattr(native, activation)(gate_up), getattr(TORCH, activation)(gate_up))


@pytest.mark.parametrize("operation", ["silu_mul", "gelu_mul", "rms_norm"])
def test_what_is_not_finite_stays_so_and_spreads_no_further(native: Operations, operation: str) -> None:
    rows = random(4, 32)
    rows[0, 3], rows[1, 20], rows[2, 5], rows[3, 30] = torch.nan, torch.nan, torch.inf, -torch.inf
    arguments = (random(32), 1e-5) if operation == "rms_norm" else ()
    got, expected = getattr(native, operation)(rows, *arguments), getattr(TORCH, operation)(rows, *arguments)
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite)
    torch.testing.assert_close(got[finite], expected[finite])


def attended(
    operations: Operations, chunks: Sequence[Chunk], page_tokens: int, kv_heads: int, group: int, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the pool afterwards. What no chunk's context holds is NaN, as another request might have left it."""
    head_dim = 2 * round(spec.scale**-2 / 2)
    pool = torch.full((PAGES, LAYERS, 2, kv_heads, page_tokens, head_dim), torch.nan)
    for chunk in chunks:
        for place in range(chunk.start):
            content = random(LAYERS, 2, kv_heads, head_dim, seed=place)
            pool[chunk.page_table[place // page_tokens], :, :, :, place % page_tokens] = content
    tokens = sum(len(chunk.token_ids) for chunk in chunks)
    projected = random(tokens, (group + 2) * kv_heads, head_dim, seed=99)
    query, key, value = projected.split([group * kv_heads, kv_heads, kv_heads], dim=1)
    batch = build_batch(chunks, page_tokens, CPU, operations)
    angles = batch.positions[:, None] * torch.linspace(0.01, 1, head_dim // 2)
    rotary = Rotary(angles.cos(), angles.sin())
    if isinstance(operations, TorchOperations):
        pool.nan_to_num_(0.0)  # torch weights such places with zero, and relies on their being clean
    output = operations.attend(query, key, value, rotary, pool[:, 1], batch, spec)
    return output, pool.nan_to_num(0.0)


def chunks_of(contexts: Sequence[tuple[int, int]], page_tokens: int) -> list[Chunk]:
    """One chunk for each (start, end), every one with pages of its own, in no order."""
    free = iter(torch.randperm(PAGES, generator=torch.Generator().manual_seed(4)).tolist())
    return [
        Chunk(
            RequestId(str(number)),
            list(range(end - start)),
            start,
            [PageId(next(free)) for _ in range(-(-end // page_tokens))],
            None,
        )
        for number, (start, end) in enumerate(contexts)
    ]


@pytest.mark.parametrize(
    "contexts",
    [[(0, 1)], [(15, 16), (16, 17), (129, 130), (0, 1)], [(0, 9), (40, 41), (20, 33)], [(0, 300), (137, 150)]],
)
@pytest.mark.parametrize("page_tokens", [4, 16])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 8), (3, 3, 64), (2, 4, 128), (1, 8, 80)])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, None), (None, 3.0), (17, 20.0)])
def test_attention(
    native: Operations,
    contexts: list[tuple[int, int]],
    page_tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    spec = AttentionSpec(head_dim**-0.5, window, soft_cap)
    chunks = chunks_of(contexts, page_tokens)
    output, pool = attended(native, chunks, page_tokens, kv_heads, group, spec)
    expected, expected_pool = attended(TORCH, chunks, page_tokens, kv_heads, group, spec)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool, expected_pool)


def test_a_context_with_nan_gives_nan_to_its_own_sequence_only(native: Operations) -> None:
    kv_heads, head_dim = 2, 8
    pool = random(PAGES, 1, 2, kv_heads, 4, head_dim)
    pool[1, 0, 0] = torch.nan
    chunks = [
        Chunk(RequestId(str(n)), [1], 5, [PageId(page), PageId(page + 10)], None) for n, page in enumerate((1, 2))
    ]
    batch = build_batch(chunks, 4, CPU, native)
    query, key = random(2, 2, head_dim), random(2, kv_heads, head_dim)
    rotary = Rotary(torch.ones(2, head_dim // 2), torch.zeros(2, head_dim // 2))
    output = native.attend(query, key, key, rotary, pool[:, 0], batch, AttentionSpec(1.0))
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_the_library_is_compiled_once_into_a_folder_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        library = compiled_library()
    except NotCompiled as reason:
        pytest.skip(str(reason))
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    assert library.parent.stat().st_mode & 0o077 == 0
    made = library.stat().st_mtime_ns
    assert compiled_library() == library
    assert library.stat().st_mtime_ns == made


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "splitserve").mkdir()
    os.chmod(tmp_path / "splitserve", 0o777)
    with pytest.raises(NotCompiled, match=r"compiler|others can write"):
        compiled_library()


def test_without_a_compiler_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "COMPILERS", ("no-such-compiler",))
    load_kernels.cache_clear()
    try:
        assert isinstance(choose_platform(CPU, torch.float32).operations, TorchOperations)
        assert "no C++ compiler" in caplog.text
        with pytest.raises(ValueError, match=r"native.*no C\+\+ compiler"):
            choose_platform(CPU, torch.float32, "native")
    finally:
        load_kernels.cache_clear()


@pytest.mark.parametrize(("attention", "dtype"), [("triton", torch.float32), ("native", torch.bfloat16)])
def test_what_a_cpu_cannot_do_is_refused(attention: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"attention '{attention}' does not work on cpu"):
        choose_platform(CPU, dtype, attention)  # type: ignore[arg-type]
