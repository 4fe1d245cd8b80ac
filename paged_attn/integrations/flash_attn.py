"""FlashAttention's inference functions over pages: change ``from flash_attn import ...`` and keep the calls.

Signatures follow flash-attn 2.8 (``flash_attn_with_kvcache``, ``flash_attn_varlen_func``). Arguments that the ops do
not offer are refused by name; gradients are not computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

import paged_attn


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new query tokens over a cache, which ``k`` and ``v`` are appended to first, in place.

    Args:
        q: ``[batch, seqlen_q, num_heads, head_dim]``.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` with a ``block_table``, else
            ``[batch_cache, seqlen_cache, num_kv_heads, head_dim]``.
        k, v: ``[batch, seqlen_new, num_kv_heads, head_dim]``, written at ``cache_seqlens`` onwards.
        rotary_cos, rotary_sin: ``[seqlen_ro, rotary_dim / 2]``, with ``k``, which is rotated at ``cache_seqlens`` + its
            index; ``q`` likewise if causal, else all of it at ``cache_seqlens``.
        cache_seqlens: int32 ``[batch]`` or a number: tokens in the cache before ``k``. Default: the whole cache.
        cache_batch_idx: int32 ``[batch]``, rows of an unpaged cache.
        block_table: int32 ``[batch, max_blocks]``.
        causal: the mask is aligned at the bottom right.
        window_size: ``(left, right)``, keys seen besides the own one, -1: no limit; ``right`` is 0 where the mask is
            causal, and a right of 0 makes it so.
        rotary_interleaved: pair neighbouring dimensions (GPT-J); False: halves (GPT-NeoX).
        num_splits: accepted; the kernels split by themselves.
        return_softmax_lse: also return the log-sum-exp; -inf for a row that sees nothing.

    Returns:
        ``[batch, seqlen_q, num_heads, head_dim]``, and float32 ``[batch, num_heads, seqlen_q]`` if asked for.

    Raises:
        ValueError: ``cache_leftpad``, a window to the right or per-row ``alibi_slopes``, or arguments that contradict
            each other.
    """
    _refuse("cache_leftpad", cache_leftpad)
    batch, seqlen_q, num_heads, head_dim = q.shape
    block_table, capacity = _table(k_cache, block_table, cache_batch_idx, batch)
    if (k is None) != (v is None):
        raise ValueError("v: expected together with k")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_sin: expected together with rotary_cos")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos: expected together with k")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: expected with k, got None")
    window, causal = _window(window_size, causal, seqlen_q, alibi_slopes)
    seq_lens = capacity if cache_seqlens is None else cache_seqlens
    if isinstance(seq_lens, int):
        seq_lens = torch.full((batch,), seq_lens, dtype=torch.int32, device=q.device)
    if k is not None:
        starts = seq_lens[:, None].long()
        positions = starts + torch.arange(k.shape[1], device=q.device)
        if rotary_cos is not None:
            steps = torch.arange(seqlen_q, device=q.device) * int(causal)
            q = _rotate(q, rotary_cos, rotary_sin, starts + steps, rotary_interleaved)
            k = _rotate(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
        slots = _slots(block_table, positions, k_cache.shape[1])
        paged_attn.write_kv(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots)
        seq_lens = seq_lens + k.shape[1]
    output = paged_attn.paged_attention(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        block_table,
        seq_lens.to(torch.int32),
        cu_seqlens_q=_starts(batch, seqlen_q, q.device),
        max_seqlen_q=seqlen_q,
        scale=softmax_scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )
    if not return_softmax_lse:
        return output.view(batch, seqlen_q, num_heads, head_dim)
    output, lse = output
    return output.view(batch, seqlen_q, num_heads, head_dim), lse.view(batch, seqlen_q, num_heads).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of packed sequences of different lengths.

    Args:
        q: ``[total_q, num_heads, head_dim]``.
        k, v: ``[total_k, num_kv_heads, head_dim]``, or with a ``block_table``
            ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``, prefix sums of the lengths.
        causal, window_size, softcap, alibi_slopes: as in :func:`flash_attn_with_kvcache`.
        deterministic: accepted; the kernels always are.
        return_attn_probs: also return the log-sum-exp, float32 ``[num_heads, total_q]``, and None in place of the
            probabilities.

    Raises:
        ValueError: dropout, a window to the right or per-row ``alibi_slopes``.
    """
    if dropout_p > 0.0:
        raise ValueError(f"dropout_p: paged_attn has no dropout, got {dropout_p}")
    seq_lens = cu_seqlens_k.diff()
    if block_table is None:
        steps = torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
        block_table = cu_seqlens_k[:-1, None].to(torch.int32) + steps
        k, v = k[:, None], v[:, None]
    window, causal = _window(window_size, causal, max_seqlen_q, alibi_slopes)
    output = paged_attn.paged_attention(
        q,
        k,
        v,
        block_table,
        seq_lens.to(torch.int32),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        scale=softmax_scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_attn_probs,
    )
    return (output[0], output[1].t(), None) if return_attn_probs else output


def _refuse(name: str, setting: object) -> None:
    if setting is not None:
        raise ValueError(f"{name}: paged_attn does not offer it")


def _table(k_cache: Tensor, block_table: Tensor | None, batch_idx: Tensor | None, batch: int) -> tuple[Tensor, int]:
    """The block table and the slots a row of it names; an unpaged cache is one block a row."""
    if block_table is not None:
        _refuse("cache_batch_idx", batch_idx)
        return block_table, block_table.shape[1] * k_cache.shape[1]
    if batch_idx is None:
        batch_idx = torch.arange(batch, device=k_cache.device)
    return batch_idx[:, None].to(torch.int32), k_cache.shape[1]


def _window(
    window_size: tuple[int, int], causal: bool, seqlen_q: int, alibi_slopes: Tensor | None
) -> tuple[int | None, bool]:
    """FlashAttention's (left, right) as keys seen, the own one included, and whether the mask is causal."""
    left, right = window_size
    causal = causal or right == 0 or seqlen_q == 1  # a lone query token stands last: nothing lies to its right
    if not causal:
        if left >= 0 or right >= 0:
            raise ValueError(f"window_size: paged_attn has no window to the right, got {tuple(window_size)}")
        if alibi_slopes is not None:
            raise ValueError("alibi_slopes: paged_attn has FlashAttention's bias for causal attention only")
    if alibi_slopes is not None and alibi_slopes.ndim != 1:
        raise ValueError(f"alibi_slopes: expected [num_heads], got {tuple(alibi_slopes.shape)}")
    return (left + 1 if left >= 0 else None), causal


def _starts(batch: int, seqlen_q: int, device: torch.device) -> Tensor:
    return seqlen_q * torch.arange(batch + 1, dtype=torch.int32, device=device)


def _slots(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slot of each position ``[batch, n]`` of its row, flat."""
    blocks = block_table.gather(1, positions // block_size).long()
    return (blocks * block_size + positions % block_size).flatten()


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (Su et al., https://arxiv.org/abs/2104.09864) of ``[B, T, H, D]`` at ``positions [B, T]``."""
    cos, sin = cos[positions][:, :, None].float(), sin[positions][:, :, None].float()
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = states[..., :rotary_dim].float(), states[..., rotary_dim:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(states.dtype), rest), dim=-1)
