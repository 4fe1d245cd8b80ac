"""Attention for transformers' continuous batching, ``generate_batch()`` with ``"paged|paged_attn"``."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import paged_attn
from paged_attn.integrations._options import AttentionOptions

_OF_THE_BATCH = {
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "read_index",
    "write_index",
    "block_table",
    "logits_indices",
    "logits_processor_args",
}

# Tables of the forward pass in flight, for each layer group of a cache: made by the group's first layer.
_tables: WeakKeyDictionary[Any, dict[int, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


def continuous_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cache: Any = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """One packed batch: ``query [1, Hq, T, D]``, new keys and values ``[1, Hkv, T, D]``; returns ``[1, T, Hq, D]``.

    Nothing here reads a tensor on the host, so a batch can be captured in a CUDA graph.
    """
    if cache is None:
        raise ValueError('"paged|paged_attn" is for generate_batch(); use "paged_attn" elsewhere')
    options = AttentionOptions.of(
        module, query, key, value, {name: setting for name, setting in kwargs.items() if name not in _OF_THE_BATCH}
    )
    layer_idx = module.layer_idx
    windowed = cache.sliding_windows[layer_idx] != 1
    kind = "sliding_attention" if windowed else "full_attention"
    cu_seqlens_k, max_seqlen_k = _of_kind(kwargs["cu_seq_lens_k"], kind), _of_kind(kwargs["max_seqlen_k"], kind)

    if windowed:
        # These layers write over old slots of a ring, so what is read must be read first: transformers' own update.
        keys, values = cache.update(key, value, layer_idx, kwargs["read_index"], kwargs["write_index"])
        key_cache, value_cache = keys[:, None], values[:, None]
        tables = _contiguous_tables(cu_seqlens_k, max_seqlen_k)
    else:
        group, index = cache.layer_index_to_group_indices[layer_idx]
        key_cache = cache.key_cache[index].unflatten(0, (-1, cache.block_size))
        value_cache = cache.value_cache[index].unflatten(0, (-1, cache.block_size))
        slots = kwargs["write_index"][group]
        paged_attn.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), key_cache, value_cache, slots)
        of_cache = _tables.setdefault(cache, {})
        if index == 0:
            read = kwargs["read_index"][group]
            of_cache[group] = _block_tables(slots if read.numel() == 0 else read, cu_seqlens_k, max_seqlen_k, cache)
        tables = of_cache[group]

    block_table, seq_lens = tables
    output = paged_attn.paged_attention(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q=kwargs["cu_seq_lens_q"],
        max_seqlen_q=kwargs["max_seqlen_q"],
        **options.as_kwargs(),
    )
    return output[None], None


def _of_kind(setting: Any, kind: str) -> Any:
    return setting[kind] if isinstance(setting, dict) else setting


def _block_tables(slots: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, cache: Any) -> tuple[Tensor, Tensor]:
    """Block table and lengths from the slots of all tokens in order: every block's first token names its block."""
    width = -(-max(int(max_seqlen_k), 1) // cache.block_size)
    firsts = cu_seqlens_k[:-1, None] + torch.arange(0, width * cache.block_size, cache.block_size, device=slots.device)
    firsts = firsts.clamp_(max=slots.numel() - 1)  # entries past a sequence's end are never read
    return (slots[firsts] // cache.block_size).to(torch.int32), cu_seqlens_k.diff()


def _contiguous_tables(cu_seqlens_k: Tensor, max_seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Tables of tokens that lie one after the other in blocks of one slot."""
    steps = torch.arange(int(max_seqlen_k), dtype=torch.int32, device=cu_seqlens_k.device)
    return cu_seqlens_k[:-1, None] + steps, cu_seqlens_k.diff()
