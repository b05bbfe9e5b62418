"""How much of a problem one program of an attention kernel takes on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """Constants of one compiled attention kernel. Powers of two."""

    rows: int  # query rows (heads of a group, times tokens when prefilling) that share each key and value loaded
    context: int  # positions per turn of the loop
    head_dim: int  # padded
    warps: int
    stages: int  # turns whose loads are under way at once


def decode_tile(group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """``group`` query heads per key head. 16 rows are the least that the tensor cores of all targets take."""
    width = next_power_of_two(head_dim)
    if dtype is torch.float32:
        return Tile(max(16, next_power_of_two(group)), 16, width, 4, 1)
    return Tile(max(16, next_power_of_two(group)), 64 if width <= 128 else 32, width, 4, 2)


def prefill_tile(group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """``group`` query heads per key head. More rows than these spill registers on compute capability 8.0."""
    width = next_power_of_two(head_dim)
    if dtype is torch.float32:
        return Tile(max(32 if width <= 128 else 16, next_power_of_two(group)), 16, width, 4, 1)
    rows, context, warps = (64, 64, 4) if width <= 64 else (128, 64, 8) if width <= 128 else (64, 32, 8)
    return Tile(max(rows, next_power_of_two(group)), context, width, warps, 2)


def next_power_of_two(number: int) -> int:
    """The least power of two that is at least ``number`` (>= 1)."""
    return 1 << (number - 1).bit_length()
