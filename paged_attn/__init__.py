"""Paged KV cache and paged attention for PyTorch."""

from . import reference
from ._version import __version__
from .cache import Admission, CacheCorrupted, OutOfBlocks, PagedKVCache
from .ops import copy_blocks, gather_kv, merge_attn_states, paged_attention, rope_write_kv, swap_blocks, write_kv

__all__ = [
    "Admission",
    "CacheCorrupted",
    "OutOfBlocks",
    "PagedKVCache",
    "__version__",
    "copy_blocks",
    "gather_kv",
    "merge_attn_states",
    "paged_attention",
    "reference",
    "rope_write_kv",
    "swap_blocks",
    "write_kv",
]
