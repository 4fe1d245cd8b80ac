"""Attention for transformers' continuous batching, ``generate_batch()`` with ``"paged|paged_attn"``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
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

# Block table, lengths and slots of the forward pass in flight, for each layer group of a cache: made by the group's
# first layer.
_tables: WeakKeyDictionary[Any, dict[int, tuple[Tensor, Tensor, Tensor]]] = WeakKeyDictionary()


def ask_for_decode_tables(name: str) -> None:
    """Let transformers hand block tables to ``name`` in steps of decodes alone.

    transformers does that for its flash attentions only; this replaces the function that decides. Without, the
    table is derived from the slots of all tokens, which have to be uploaded each step.
    """
    from transformers.generation.continuous_batching import initialization

    decide = initialization.ensure_decode_fast_path_is_available
    if getattr(decide, "asks_for", None) == name:
        return

    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
        if config._attn_implementation != name:
            decide(config, cb_config, user_requested)

    ensure_decode_fast_path_is_available.asks_for = name
    initialization.ensure_decode_fast_path_is_available = ensure_decode_fast_path_is_available


def order_inputs() -> None:
    """Let transformers' copies of its inputs, and its forward passes, wait for what fills these inputs.

    transformers resets its input tensors on the current stream and copies and computes on streams of its own, which
    wait for one another but not for that one: where it lags behind, as on a GPU that several processes share, the reset
    wipes out the inputs of the first batch, and its tokens are wrong, by any attention.
    """
    from transformers.generation.continuous_batching import input_outputs

    for inputs in (input_outputs.ContinuousBatchingIOs, input_outputs.ContinuousBatchingAsyncIOs):
        if not hasattr(inputs.get_model_kwargs, "waits_for_current_stream"):
            inputs.get_model_kwargs = _after_current_stream(inputs.get_model_kwargs)


def _after_current_stream(get_model_kwargs: Callable) -> Callable:
    @wraps(get_model_kwargs)
    def ordered(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        stream = getattr(inputs, "h2d_stream", inputs.compute_stream)  # None on the CPU
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return get_model_kwargs(inputs, *args, **kwargs)

    ordered.waits_for_current_stream = True
    return ordered


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
        block_table, seq_lens = _contiguous_tables(cu_seqlens_k, max_seqlen_k)
    else:
        group, index = cache.layer_index_to_group_indices[layer_idx]
        key_cache = cache.key_cache[index].unflatten(0, (-1, cache.block_size))
        value_cache = cache.value_cache[index].unflatten(0, (-1, cache.block_size))
        of_cache = _tables.setdefault(cache, {})
        if index == 0:
            of_cache[group] = _group_tables(group, cu_seqlens_k, max_seqlen_k, cache, kwargs)
        block_table, seq_lens, slots = of_cache[group]
        paged_attn.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), key_cache, value_cache, slots)

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


def _group_tables(
    group: int, cu_seqlens_k: Tensor, max_seqlen_k: int, cache: Any, kwargs: dict
) -> tuple[Tensor, Tensor, Tensor]:
    """Block table, lengths, and the slots of the new tokens. Without a table from transformers, the slots of all tokens
    in order tell: every block's first token names its block."""
    seq_lens, size = cu_seqlens_k.diff(), cache.block_size
    if kwargs.get("block_table") is not None:
        block_table = kwargs["block_table"][group]
        last = seq_lens[:, None] - 1  # -1 for a row of padding
        blocks = block_table.gather(1, (last.clamp(min=0) // size).long())
        slots = torch.where(last < 0, -1, blocks * size + last % size)[:, 0]
        return block_table, seq_lens, slots
    slots, read = kwargs["write_index"][group], kwargs["read_index"][group]
    every = slots if read.numel() == 0 else read
    width = -(-max(int(max_seqlen_k), 1) // size)
    firsts = cu_seqlens_k[:-1, None] + torch.arange(0, width * size, size, device=slots.device)
    firsts = firsts.clamp_(max=every.numel() - 1)  # entries past a sequence's end are never read
    return (every[firsts] // size).to(torch.int32), seq_lens, slots


def _contiguous_tables(cu_seqlens_k: Tensor, max_seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Tables of tokens that lie one after the other in blocks of one slot."""
    steps = torch.arange(int(max_seqlen_k), dtype=torch.int32, device=cu_seqlens_k.device)
    return cu_seqlens_k[:-1, None] + steps, cu_seqlens_k.diff()
