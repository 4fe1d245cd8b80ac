"""How much memory the cache takes, and what fits into a given amount."""

import os
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
KV_SCALES = ("tensor", "head", "token_head")
MAX_HEAD_DIM = 256
_SAME_FOR_ALL = {
    "num_blocks",
    "device",
    "layout",
    "num_host_blocks",
    "enable_prefix_caching",
    "watermark",
    "partial_match",
    "events",
}


def check_count(name: str, value: int, least: int) -> int:
    """``value`` as an int; block ids and positions are 32 bits wide."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value < 2**31:
        raise ValueError(f"{name}: expected an integer of at least {least} and below 2**31, got {value!r}")
    return int(value)


def check_config(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    kv_scale: str,
) -> tuple[int, int, int, int]:
    """Refuse a cache configuration by the name of what is wrong in it; the four sizes as ints."""
    num_layers = check_count("num_layers", num_layers, 1)
    num_kv_heads = check_count("num_kv_heads", num_kv_heads, 1)
    head_dim = check_count("head_dim", head_dim, 1)
    block_size = check_count("block_size", block_size, 1)
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: expected a multiple of 8 up to {MAX_HEAD_DIM}, as the ops take, got {head_dim}")
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
    if kv_dtype is not None and kv_dtype not in QUANTISED_DTYPES:
        raise ValueError(f"kv_dtype: expected None, float8_e4m3fn, float8_e5m2 or int8, got {kv_dtype}")
    if kv_scale not in KV_SCALES:
        raise ValueError(f"kv_scale: expected one of {', '.join(KV_SCALES)}, got {kv_scale!r}")
    if kv_dtype is None and kv_scale != "tensor":
        raise ValueError(f"kv_scale: {kv_scale!r} needs a quantised kv_dtype")
    return num_layers, num_kv_heads, head_dim, block_size


def bytes_per_block(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    kv_scale: str = "tensor",
    **others: Any,
) -> int:
    """Bytes of one block over all layers, K and V, scales a token included.

    Takes the constructor's keywords; those that do not matter here are ignored.
    """
    for name in others.keys() - _SAME_FOR_ALL:
        raise TypeError(f"bytes_per_block() got an unexpected keyword argument {name!r}")
    num_layers, num_kv_heads, head_dim, block_size = check_config(
        num_layers, num_kv_heads, head_dim, block_size, dtype, kv_dtype, kv_scale
    )
    row = head_dim * (kv_dtype or dtype).itemsize
    if kv_dtype is not None and kv_scale == "token_head":
        row += torch.float32.itemsize
    return 2 * num_layers * block_size * num_kv_heads * row


def free_memory(device: torch.device) -> int:
    """Bytes that an allocation on ``device`` may take: unused by any process, or held idle by torch."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def blocks_in_budget(
    bytes_or_fraction: int | float,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> int:
    """Blocks that fit into a number of bytes (int) or a share of the device's free memory (float in (0, 1])."""
    if isinstance(bytes_or_fraction, bool) or not isinstance(bytes_or_fraction, (Integral, float)):
        raise ValueError(f"bytes_or_fraction: expected an int or a float, got {bytes_or_fraction!r}")
    if isinstance(bytes_or_fraction, float):
        if not 0 < bytes_or_fraction <= 1:
            raise ValueError(f"bytes_or_fraction: expected a share in (0, 1], got {bytes_or_fraction}")
        free = free_memory(torch.get_default_device() if device is None else torch.device(device))
        budget = int(bytes_or_fraction * free)
        what = f"{bytes_or_fraction} of {free} free bytes"
    else:
        budget = int(bytes_or_fraction)
        what = f"{budget} bytes"
    block = bytes_per_block(num_layers, num_kv_heads, head_dim, **options)
    if budget < block:
        raise ValueError(f"bytes_or_fraction: no block fits, {what} against {block} bytes a block")
    return budget // block


@dataclass(frozen=True)
class Use:
    """What live sequences take while they decode, averaged over decode steps.

    Attributes:
        reserved: slots a sequence.
        filled: tokens a sequence.
        refused: share of the requests that are too long.
    """

    reserved: float
    filled: float
    refused: float = 0.0

    @property
    def waste(self) -> float:
        """Reserved but empty slots over reserved slots."""
        return 1 - self.filled / self.reserved


def paged_use(input_lens: np.ndarray, output_lens: np.ndarray, block_size: int) -> Use:
    """Requests of these lengths in blocks: slots in whole blocks up to the current length."""
    steps = np.maximum(output_lens, 1)
    filled = steps * input_lens + steps * (steps + 1) // 2
    reserved = _reserved_up_to(input_lens + steps, block_size) - _reserved_up_to(input_lens, block_size)
    return Use(reserved.sum() / steps.sum(), filled.sum() / steps.sum())


def _reserved_up_to(length: np.ndarray, block_size: int) -> np.ndarray:
    """Sum of ``ceil(n / block_size) * block_size`` for n from 1 to ``length``."""
    whole, rest = length // block_size, length % block_size
    return block_size * (block_size * (whole * (whole + 1) // 2) + rest * (whole + 1))


def contiguous_use(input_lens: np.ndarray, output_lens: np.ndarray, max_len: int) -> Use:
    """The same requests, each with a reservation of ``max_len`` slots; longer ones are refused."""
    fits = input_lens + output_lens <= max_len
    if not fits.any():
        return Use(max_len, 0.0, 1.0)
    return Use(max_len, paged_use(input_lens[fits], output_lens[fits], 1).filled, 1 - fits.mean())
