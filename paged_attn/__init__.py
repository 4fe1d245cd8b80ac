"""Paged KV cache and paged attention for PyTorch."""

from . import reference
from ._version import __version__
from .ops import copy_blocks, gather_kv, merge_attn_states, paged_attention, swap_blocks, write_kv

__all__ = [
    "__version__",
    "copy_blocks",
    "gather_kv",
    "merge_attn_states",
    "paged_attention",
    "reference",
    "swap_blocks",
    "write_kv",
]
