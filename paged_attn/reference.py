"""Plain twins of every op: loops over sequences and tokens, float64 inside, obvious before fast.

They read tensor contents on the host, so they are for checking and for reading, not for serving. They share no code
with the kernels. Shapes use the words of the documentation: S sequences, T query tokens, Hq query heads, Hkv KV heads,
D head dimension, NB blocks of BS token slots, M columns of the block table.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

Caches = Tensor | Sequence[Tensor]

QUANTISED_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window_size: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    max_seqlen_q: int | None = None,
    metadata_ready: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query token over its sequence's cached keys and values.

    ``batch_invariant``, ``max_seqlen_q``, ``metadata_ready`` and ``backend`` choose how a kernel works, never what it
    returns; they are accepted and ignored here.

    Args:
        query: ``[T, Hq, D]``.
        key_cache, value_cache: ``[NB, BS, Hkv, D]``.
        block_table: ``[S, M]``; logical block j of sequence i is ``block_table[i, j]``.
        seq_lens: ``[S]``, tokens of each sequence in the cache, this call's query tokens included.
        cu_seqlens_q: ``[S + 1]``, prefix sums of the query lengths; omitted: one query token a sequence.
        scale: factor on q.k, ``D ** -0.5`` by default.
        window_size: keys a token sees, itself included.
        softcap: c > 0 turns a score s into ``c * tanh(s / c)``.
        alibi_slopes: ``[Hq]``; adds ``slope * (key position - query position)``.
        sinks: ``[Hq]``; one more term ``exp(sink)`` in each row's denominator, without a value.
        k_scale, v_scale: one element, ``[Hkv]`` or ``[NB, BS, Hkv]``; only with a quantised cache.

    Returns:
        Output ``[T, Hq, D]`` in the query's dtype, with ``return_lse`` also the natural log-sum-exp, float32
        ``[T, Hq]``.

    Raises:
        ValueError: options that contradict each other, lengths or block ids that the table or the cache does not hold.
    """
    _check_attention(query, key_cache, window_size, causal, softcap, scale, k_scale, v_scale)
    num_tokens, num_heads, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    lengths = seq_lens.tolist()
    if cu_seqlens_q is None and num_tokens != len(lengths):
        raise ValueError(f"query: expected {len(lengths)} tokens, one a sequence, got {num_tokens}")
    starts = list(range(len(lengths) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    _check_lengths(lengths, starts, num_tokens, block_table.shape[1] * key_cache.shape[1])

    output = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64, device=query.device)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64, device=query.device)
    if sinks is not None:
        lse[:] = sinks.double()

    for sequence, length in enumerate(lengths):
        query_len = starts[sequence + 1] - starts[sequence]
        positions = [_query_position(i, query_len, length) for i in range(query_len)]
        visible = [_visible_keys(position, length, causal, window_size) for position in positions]
        used = [(first, last) for first, last in visible if first < last]
        if not used:
            continue
        base, end = min(first for first, _ in used), max(last for _, last in used)
        keys = _read_tokens(key_cache, block_table[sequence], base, end, k_scale)
        values = _read_tokens(value_cache, block_table[sequence], base, end, v_scale)
        for token, position, (first, last) in zip(itertools.count(starts[sequence]), positions, visible, strict=False):
            if first >= last:
                continue
            products = _products(query[token].double(), keys[first - base : last - base])
            distance = torch.arange(first, last, dtype=torch.float64, device=query.device) - position
            scores = _modify_scores(products, scale, softcap, alibi_slopes, distance)
            weights, lse[token] = _softmax(scores, sinks)
            output[token] = _weighted_sum(weights, values[first - base : last - base])

    output = output.to(query.dtype) if out is None else out.copy_(output)
    return (output, lse.float()) if return_lse else output


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Scatter rows of keys and values into their cache slots, in place.

    A quantised cache stores value / scale (divided in float32), rounded to nearest even and saturated; NaN stays NaN
    (int8: 0). Scales of shape ``[NB, BS, Hkv]`` are outputs: the row's largest finite magnitude over the largest number
    of the cache's dtype, 1 where the row has none above zero.

    Args:
        key, value: ``[T, Hkv, D]``.
        key_cache, value_cache: ``[NB, BS, Hkv, D]``; written.
        slot_mapping: ``[N]`` with ``N <= T``; slot ``block * BS + offset``, negative to skip the row.
        k_scale, v_scale: one element, ``[Hkv]`` or ``[NB, BS, Hkv]`` (written); only with a quantised cache.

    Raises:
        ValueError: a slot past the end, or more slots than rows; nothing has changed then.
    """
    _check_scales(key_cache, k_scale, v_scale)
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if rows.shape != (key.shape[0], *cache.shape[2:]) or cache.shape != key_cache.shape:
            raise ValueError(f"{name}: {list(rows.shape)} does not fit {name}_cache {list(cache.shape)} and key")
    if slot_mapping.numel() > key.shape[0]:
        raise ValueError(f"slot_mapping: expected at most {key.shape[0]} slots like key, got {slot_mapping.numel()}")
    num_blocks, block_size = key_cache.shape[:2]
    slots = slot_mapping.tolist()
    if max(slots, default=0) >= num_blocks * block_size:
        raise ValueError(f"slot_mapping: expected slots below {num_blocks * block_size}, got {max(slots)}")
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        _write_row(key[row], key_cache, block, offset, k_scale)
        _write_row(value[row], value_cache, block, offset, v_scale)


def rope_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Rotate queries and keys by their positions, in place, then ``write_kv``.

    Args:
        query: ``[T, Hq, D]``; rotated.
        key, value: ``[T, Hkv, D]``; ``key`` is rotated.
        positions: ``[T]``. One outside ``cos_sin`` turns its token's rotated part into NaN.
        cos_sin: ``[P, R]``: row p holds the R / 2 cosines of position p, then the sines; R <= D.
        key_cache, value_cache, slot_mapping, k_scale, v_scale: as in ``write_kv``.
        interleaved: pairs are elements 2i and 2i + 1, otherwise i and i + R / 2.
    """
    for rows in (query, key):
        for row, position in zip(rows, positions.tolist()):
            row.copy_(_rotate(row, _angles(cos_sin, position), interleaved))
    write_kv(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def copy_blocks(caches: Caches, block_mapping: Tensor) -> None:
    """Copy whole blocks inside each cache, as if every source were read before any destination is written.

    Args:
        caches: list of ``[NB, BS, Hkv, D]``, or one ``[L, NB, BS, Hkv, D]``; written.
        block_mapping: ``[n, 2]`` pairs of source and destination block.

    Raises:
        ValueError: an id out of range, or a destination named twice; nothing has changed then.
    """
    swap_blocks(caches, caches, block_mapping)


def swap_blocks(src: Caches, dst: Caches, block_mapping: Tensor) -> None:
    """Copy whole blocks from the caches in ``src`` to those in ``dst``, between any two devices.

    Every source is read before any destination is written, whatever memory they share.

    Args:
        src, dst: lists of ``[NB, BS, Hkv, D]``, or stacked ``[L, NB, BS, Hkv, D]``; ``dst`` is written.
        block_mapping: ``[n, 2]`` pairs of source and destination block.

    Raises:
        ValueError: an id out of range, or a destination named twice; nothing has changed then.
    """
    pairs = block_mapping.tolist()
    for name, caches in (("src", src), ("dst", dst)):
        if isinstance(caches, Tensor) and caches.dim() != 5:
            raise ValueError(f"{name}: expected a list of tensors, or one of 5 dimensions, got {list(caches.shape)}")
    if len(src) != len(dst):
        raise ValueError(f"dst: expected {len(src)} caches like src, got {len(dst)}")
    for source, destination in zip(src, dst, strict=True):
        _check_pairs(pairs, source.shape[0], destination.shape[0])
    read = [[source[from_block].clone() for from_block, _ in pairs] for source in src]
    for blocks, destination in zip(read, dst, strict=True):
        for block, (_, to_block) in zip(blocks, pairs, strict=True):
            destination[to_block].copy_(block)


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    total_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens ``seq_starts[i] .. seq_starts[i] + seq_lens[i] - 1`` of each sequence, packed one after another.

    Args:
        key_cache, value_cache: ``[NB, BS, Hkv, D]``.
        block_table: ``[S, M]``.
        seq_lens: ``[S]``, tokens to gather of each sequence.
        seq_starts: ``[S]``, first token of each; 0 by default.
        k_scale, v_scale: one element, ``[Hkv]`` or ``[NB, BS, Hkv]``; only with a quantised cache.
        out_dtype: dtype of the results; by default the cache's, for a quantised cache bfloat16.
        total_tokens: rows of the results, instead of the sum of ``seq_lens``; rows past the sum are 0, and so are
            tokens past the row of the table.

    Returns:
        Keys and values, each ``[sum of seq_lens, Hkv, D]``.

    Raises:
        ValueError: without ``total_tokens``, tokens past the row of the table.
    """
    _check_scales(key_cache, k_scale, v_scale)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if key_cache.dtype in QUANTISED_MAX else key_cache.dtype
    capacity = block_table.shape[1] * key_cache.shape[1]
    lengths = seq_lens.tolist()
    starts = [0] * len(lengths) if seq_starts is None else seq_starts.tolist()
    for start, length in zip(starts, lengths, strict=True):
        if start < 0 or length < 0 or (start + length > capacity and length > 0 and total_tokens is None):
            raise ValueError(f"seq_lens: tokens {start} to {start + length} pass the {capacity} slots of a table row")

    def gather(cache: Tensor, scale: Tensor | None) -> Tensor:
        num_tokens = sum(lengths) if total_tokens is None else total_tokens
        result = torch.zeros(num_tokens, *cache.shape[2:], dtype=out_dtype, device=cache.device)
        row = 0
        for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            end = max(start, min(start + length, capacity, start + num_tokens - row))
            tokens = _read_tokens(cache, block_table[sequence], start, end, scale, torch.float32)
            result[row : row + end - start] = tokens.to(out_dtype)
            row += length
        return result

    return gather(key_cache, k_scale), gather(value_cache, v_scale)


def merge_attn_states(
    output_a: Tensor,
    lse_a: Tensor,
    output_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    out_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine two attention results over disjoint keys: the outputs weighted by ``exp(lse)``.

    (0, -inf) is the identity, whatever values the empty side's output holds. An LSE of NaN makes its row NaN.

    Args:
        output_a, output_b: ``[T, Hq, D]``.
        lse_a, lse_b: float32 ``[T, Hq]``, natural logarithm.
        out, out_lse: where to write; either may be an operand.

    Returns:
        Output ``[T, Hq, D]`` in the dtype of ``output_a`` and LSE float32 ``[T, Hq]``.
    """
    lse = torch.logaddexp(lse_a.double(), lse_b.double())

    def share(output: Tensor, own: Tensor, other: Tensor) -> Tensor:
        present = (own != -math.inf).unsqueeze(-1)
        weight = torch.where(own == other, 0.5, torch.sigmoid(own.double() - other.double()))
        weight = torch.where((other == -math.inf) & ~own.isnan(), 1.0, weight).unsqueeze(-1)
        return torch.where(present, weight * output.double(), 0.0)

    output = share(output_a, lse_a, lse_b) + share(output_b, lse_b, lse_a)
    output = output.to(output_a.dtype) if out is None else out.copy_(output)
    return output, lse.float() if out_lse is None else out_lse.copy_(lse)


# Each rule of attention is one function below, so that tests can replace one of them by a wrong one.


def _query_position(index: int, query_len: int, length: int) -> int:
    """Position of query token ``index``: the last query token is the last token of the sequence."""
    return length - query_len + index


def _visible_keys(position: int, length: int, causal: bool, window_size: int | None) -> tuple[int, int]:
    """First visible key and one past the last."""
    last = min(position + 1, length) if causal else length
    first = 0 if window_size is None else max(0, position - window_size + 1)
    return first, last


def _locate(table_row: Tensor, first: int, last: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Block ids and offsets of tokens ``first .. last - 1``."""
    positions = torch.arange(first, last, device=table_row.device)
    return table_row[positions // block_size].long(), positions % block_size


def _read_tokens(
    cache: Tensor, table_row: Tensor, first: int, last: int, scale: Tensor | None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Tokens ``first .. last - 1`` of one sequence as ``[last - first, Hkv, D]``, dequantised."""
    blocks, offsets = _locate(table_row, first, last, cache.shape[1])
    if last > first and not 0 <= blocks.min() <= blocks.max() < cache.shape[0]:
        raise ValueError(f"block_table: expected ids below {cache.shape[0]}, got {sorted(set(blocks.tolist()))}")
    tokens = cache[blocks, offsets].to(dtype)
    return tokens if scale is None else tokens * _scale_of(scale, cache, blocks, offsets).to(dtype)


def _is_per_token(scale: Tensor, cache: Tensor) -> bool:
    return scale.shape == cache.shape[:3]


def _scale_of(scale: Tensor, cache: Tensor, blocks: Tensor | int, offsets: Tensor | int) -> Tensor:
    """The scale in a shape that broadcasts over ``[tokens, Hkv, D]``."""
    return scale[blocks, offsets].unsqueeze(-1) if _is_per_token(scale, cache) else scale.reshape(-1, 1)


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """q.k of one query token ``[Hq, D]`` with keys ``[L, Hkv, D]``, as ``[Hq, L]``; head h reads KV head h // group."""
    num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.view(num_kv_heads, num_heads // num_kv_heads, head_dim)
    return torch.einsum("hgd,lhd->hgl", grouped, keys).reshape(num_heads, -1)


def _modify_scores(products: Tensor, scale: float, softcap: float, slopes: Tensor | None, distance: Tensor) -> Tensor:
    """Scale, then soft cap, then ALiBi, on ``[Hq, L]``; ``distance`` is key position - query position."""
    scores = scale * products
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes.double().unsqueeze(-1) * distance
    return scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights ``[Hq, L]`` and the log of their denominator ``[Hq]``, the sink's term included."""
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double())
    return torch.exp(scores - lse.unsqueeze(-1)), lse


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Weights ``[Hq, L]`` times values ``[L, Hkv, D]``, as ``[Hq, D]``."""
    num_heads, num_kv_heads = weights.shape[0], values.shape[1]
    grouped = weights.view(num_kv_heads, num_heads // num_kv_heads, -1)
    return torch.einsum("hgl,lhd->hgd", grouped, values).reshape(num_heads, -1)


def _angles(cos_sin: Tensor, position: int) -> Tensor:
    """Cosines and sines of a position, NaN for one that the table does not hold."""
    is_held = 0 <= position < cos_sin.shape[0]
    return cos_sin[position] if is_held else torch.full_like(cos_sin[:1], math.nan).squeeze(0)


def _rotate(row: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the heads of one token, ``[H, D]``, by the angles whose cosines and sines are given."""
    cosines, sines = cos_sin.double().chunk(2)
    pairs = range(len(cosines))
    firsts = [2 * i if interleaved else i for i in pairs]
    seconds = [2 * i + 1 if interleaved else i + len(cosines) for i in pairs]
    rotated = row.double()
    x, y = rotated[:, firsts], rotated[:, seconds]
    rotated[:, firsts] = x * cosines - y * sines
    rotated[:, seconds] = y * cosines + x * sines
    return rotated


def _write_row(row: Tensor, cache: Tensor, block: int, offset: int, scale: Tensor | None) -> None:
    """Store one token's ``[Hkv, D]`` row."""
    if cache.dtype not in QUANTISED_MAX:
        cache[block, offset] = row
        return
    row = row.float()
    if scale is not None and _is_per_token(scale, cache):
        scale[block, offset] = _row_scale(row, cache.dtype)
    if scale is not None:
        row = row / _scale_of(scale, cache, block, offset).float()
    cache[block, offset] = _quantise(row, cache.dtype)


def _row_scale(row: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale ``[Hkv]`` that maps each head's largest finite magnitude to the largest number of ``dtype``."""
    largest = torch.where(row.isfinite(), row.abs(), 0.0).amax(dim=-1)
    scale = largest / QUANTISED_MAX[dtype]
    return torch.where(scale > 0, scale, 1.0)


def _quantise(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even and saturate, infinities too; NaN stays NaN (int8: 0)."""
    limit = QUANTISED_MAX[dtype]
    if dtype == torch.int8:
        values = values.nan_to_num(nan=0.0, posinf=limit, neginf=-limit).round()
    return values.clamp(-limit, limit).to(dtype)


def _check_attention(
    query: Tensor,
    key_cache: Tensor,
    window_size: int | None,
    causal: bool,
    softcap: float,
    scale: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    if window_size is not None and window_size <= 0:
        raise ValueError(f"window_size: expected at least 1 (a token sees itself) or None, got {window_size}")
    if window_size is not None and not causal:
        raise ValueError("window_size: needs causal=True")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected 0 (off) or a positive number, got {softcap}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if key_cache.dtype not in QUANTISED_MAX and key_cache.dtype != query.dtype:
        raise ValueError(
            f"key_cache: expected dtype {query.dtype} like query, or a quantised one, got {key_cache.dtype}"
        )
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"query: expected a multiple of {key_cache.shape[2]} heads, got {query.shape[1]}")
    _check_scales(key_cache, k_scale, v_scale)


def _check_lengths(lengths: list[int], starts: list[int], num_tokens: int, capacity: int) -> None:
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_tokens:
        raise ValueError(f"cu_seqlens_q: expected sums from 0 up to {num_tokens} tokens of query, got {starts}")
    for length in lengths:
        if not 0 <= length <= capacity:
            raise ValueError(f"seq_lens: expected 0 to {capacity}, what a row of block_table holds, got {length}")


def _check_scales(cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if cache.dtype not in QUANTISED_MAX:
            raise ValueError(f"{name}: only a quantised cache takes a scale, got a cache of {cache.dtype}")
        shapes = ((cache.shape[2],), tuple(cache.shape[:3]))
        if scale.numel() != 1 and tuple(scale.shape) not in shapes:
            raise ValueError(f"{name}: expected one element, or a shape of {shapes}, got {tuple(scale.shape)}")


def _check_pairs(pairs: list[list[int]], num_sources: int, num_destinations: int) -> None:
    for source, destination in pairs:
        if not (0 <= source < num_sources and 0 <= destination < num_destinations):
            raise ValueError(
                f"block_mapping: expected ids below {num_sources} and {num_destinations}, got ({source}, {destination})"
            )
    destinations = [destination for _, destination in pairs]
    if len(set(destinations)) < len(destinations):
        raise ValueError("block_mapping: a destination is named twice")
