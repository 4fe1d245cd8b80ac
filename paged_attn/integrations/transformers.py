"""Attention over pages for Hugging Face transformers.

    from paged_attn.integrations import transformers as paged
    paged.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="paged_attn")
    model.generate(**inputs)                                              # the library's own caches
    model.generate(**inputs, past_key_values=paged.PagedCache.for_model(model, num_blocks=1024))    # our pages

Continuous batching: ``model.set_attn_implementation("paged|paged_attn")`` and ``model.generate_batch(...)``.
Tested with transformers 5.17 to 5.24, ``generate_batch`` with 5.17 alone: later ones take no attention there but their
own. What a model asks of its attention and the ops do not offer is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor

import paged_attn
from paged_attn.integrations._options import TRANSFORMERS_VERSION, AttentionOptions
from paged_attn.integrations._paged_cache import PagedCache, StepCache, cache_shape, pending_update, scale_options
from paged_attn.integrations._paged_continuous import ask_for_decode_tables, continuous_attention, order_inputs

__all__ = ["NAME", "PagedCache", "StepCache", "cache_shape", "register", "scale_options"]

NAME = "paged_attn"


def register(*, decode_tables: bool = False) -> None:
    """Make ``attn_implementation="paged_attn"`` known to transformers; may be repeated.

    With transformers 5.17 also ``"paged|paged_attn"``, for ``generate_batch()``, whose copies of inputs it puts in
    order, for every attention (docs/transformers.md).

    Args:
        decode_tables: for ``generate_batch()``, get block tables in steps of decodes alone. It replaces a function
            inside transformers, for good, with an effect on ``"paged|paged_attn"`` only.

    Raises:
        ValueError: ``decode_tables`` with a transformers newer than 5.17.
    """
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, padding_mask)
    if TRANSFORMERS_VERSION == (5, 17):
        transformers.AttentionInterface.register(f"paged|{NAME}", continuous_attention)
        order_inputs()
        if decode_tables:
            ask_for_decode_tables(f"paged|{NAME}")
    elif decode_tables:
        raise ValueError(f"decode_tables: generate_batch() needs transformers 5.17, found {transformers.__version__}")


@torch.compiler.disable
def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function: ``query [B, Hq, T, D]``, returns ``[B, T, Hq, D]``.

    ``key`` and ``value`` are ``[B, Hkv, S, D]``: all tokens so far from one of the library's caches, or the new tokens
    alone when they passed through a :class:`PagedCache`. ``attention_mask`` is what :func:`padding_mask` made.
    """
    options = AttentionOptions.of(module, query, key, value, kwargs)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask: paged_attn takes a [batch, tokens] padding mask, got {attention_mask.ndim} dimensions"
        )
    update = pending_update(key)
    if update is not None:
        return update.cache.attend(update, query, attention_mask, options), None
    if attention_mask is None:
        return _attend_rows(query, key, value, options), None
    return _attend_padded(query, key, value, attention_mask, options), None


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Rows without padding: each row's S keys are one block of S slots, read where they lie."""
    batch, num_heads, query_len, head_dim = query.shape
    kv_len, device = key.shape[2], query.device
    output = paged_attn.paged_attention(
        _packed(query),
        key.transpose(1, 2),
        value.transpose(1, 2),
        torch.arange(batch, dtype=torch.int32, device=device)[:, None],
        torch.full((batch,), kv_len, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(0, (batch + 1) * query_len, query_len, dtype=torch.int32, device=device),
        max_seqlen_q=query_len,
        **options.as_kwargs(),
    )
    return output.view(batch, query_len, num_heads, head_dim)


def _attend_padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Rows with padding: the tokens that count, packed into a pool of one-slot blocks. Padding rows give 0."""
    batch, num_heads, query_len, head_dim = query.shape
    seen = mask.shape[1]  # a static cache hands over more slots than tokens seen
    options.check_mask(mask)
    query_mask = mask[:, seen - query_len :]
    lengths = mask.sum(-1, dtype=torch.int32)
    starts = (lengths.cumsum(0, dtype=torch.int32) - lengths)[:, None]
    output = query.new_zeros(batch, query_len, num_heads, head_dim)
    output[query_mask] = paged_attn.paged_attention(
        query.transpose(1, 2)[query_mask],
        key[:, :, :seen].transpose(1, 2)[mask][:, None],
        value[:, :, :seen].transpose(1, 2)[mask][:, None],
        starts + torch.arange(seen, dtype=torch.int32, device=query.device),
        lengths,
        cu_seqlens_q=prefix_sums(query_mask.sum(-1)),
        max_seqlen_q=query_len,
        **options.as_kwargs(),
    )
    return output


def _packed(query: Tensor) -> Tensor:
    """``[B, Hq, T, D]`` as ``[B * T, Hq, D]``."""
    return query.transpose(1, 2).reshape(-1, query.shape[1], query.shape[3])


def prefix_sums(lengths: Tensor) -> Tensor:
    """int32 ``[S + 1]``: 0 and the running sums of ``lengths [S]``."""
    sums = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, out=sums[1:])
    return sums


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_,
) -> Tensor | None:
    """transformers' mask function: None, or bool ``[B, W]`` with True for the first W <= kv_length keys that count.

    Causality and the window are the attention function's own; any other pattern is refused by name.
    """
    _check_pattern(mask_function)
    seen = min(int(kv_length), int(q_offset) + q_length - int(kv_offset))
    if attention_mask is not None:
        mask = attention_mask[:, -int(kv_length) :][:, :seen].bool()
        if mask.shape[1] < seen:
            raise ValueError(f"attention_mask: expected at least {seen} columns, got {mask.shape[1]}")
        if seen < kv_length or not mask.all():
            return mask
    elif seen < kv_length:
        return torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    return None


_KNOWN_PATTERNS = {"causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay"}


def _check_pattern(mask_function: Callable | None) -> None:
    """Refuse a mask that is not causal, sliding causal or bidirectional: transformers composes masks of closures."""
    if mask_function is None:
        return
    name = mask_function.__qualname__.split(".")[0]
    if name == "and_masks":
        for cell in mask_function.__closure__ or ():
            for part in cell.cell_contents:
                _check_pattern(part)
    elif name not in _KNOWN_PATTERNS:
        raise ValueError(f"attention_mask: paged_attn has no mask pattern like transformers' {name}")
