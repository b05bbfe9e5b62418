"""Which dtype a model gets."""

import pytest
import torch

from splitserve.engine.model_dtype import choose_dtype


@pytest.mark.parametrize(
    ("wanted", "device", "native", "chosen"),
    [
        ("auto", "cpu", "bfloat16", "float32"),
        ("auto", "cpu", None, "float32"),
        ("auto", "cuda", "bfloat16", "bfloat16"),
        ("auto", "cuda", "float16", "float16"),
        ("auto", "cuda", "float32", "bfloat16"),
        ("auto", "cuda", None, "bfloat16"),
        ("float16", "cpu", "bfloat16", "float16"),
        ("float32", "cuda", "bfloat16", "float32"),
    ],
)
def test_auto_follows_device_and_model_and_a_name_wins(
    wanted: str, device: str, native: str | None, chosen: str
) -> None:
    assert choose_dtype(wanted, torch.device(device), native) == chosen


@pytest.mark.parametrize(
    ("wanted", "device", "message"),
    [("int4", "cpu", "dtype 'int4' is not supported"), ("auto", "meta", "device 'meta' is not supported")],
)
def test_what_is_not_supported_is_named(wanted: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_dtype(wanted, torch.device(device), None)
