"""In which dtype a model's weights, activations and pages are kept."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HALF = ("bfloat16", "float16")
_DEVICES = ("cpu", "cuda")


def choose_dtype(wanted: str, device: torch.device, native: str | None) -> str:
    """A key of ``DTYPES``: ``wanted``, or for "auto" what suits the device and the model.

    A CPU computes in float32. A GPU computes in the dtype the model was made for, ``native`` (see ``ModelFiles``), but
    in bfloat16 for a model of float32 or one that does not say: it has the same range at half the memory. Raises
    ValueError for a dtype or a device that is not supported.
    """
    if device.type not in _DEVICES:
        raise ValueError(f"device {device.type!r} is not supported; supported: {', '.join(_DEVICES)}")
    if wanted == "auto":
        if device.type == "cpu":
            return "float32"
        return native if native in _HALF else "bfloat16"
    if wanted not in DTYPES:
        raise ValueError(f"dtype {wanted!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    return wanted
