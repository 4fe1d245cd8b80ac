"""FlashAttention's signatures over our ops, against plain softmax attention."""

import math

import pytest
import torch

from paged_attn.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

BATCH, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 3, 4, 2, 16, 8


def plain(query, key, value, causal, window=None, softcap=0.0, slopes=None):
    """``[q, H, D]`` over ``[k, Hkv, D]``: output and log-sum-exp ``[H, q]``, the mask aligned at the bottom right."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1).double() for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * HEAD_DIM**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(key)) - (torch.arange(len(query)) + len(key) - len(query))[:, None]
    distance = distance.to(query.device)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    if causal:
        scores = scores.masked_fill(distance > 0, -math.inf)
    if window is not None:
        scores = scores.masked_fill(distance <= -window, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype), scores.logsumexp(-1).float()


@pytest.fixture
def paged(device):
    """Caches of 24 blocks, a scattered table of 4 blocks a row, and lengths."""
    torch.manual_seed(0)
    caches = [torch.randn(24, BLOCK, KV_HEADS, HEAD_DIM, device=device) * 2 for _ in range(2)]
    table = torch.randperm(24, device=device)[: BATCH * 4].view(BATCH, 4).to(torch.int32)
    return *caches, table, torch.tensor([5, 16, 0], dtype=torch.int32, device=device)


def rows(cache, table, row, length):
    return cache[table[row].long()].flatten(0, 1)[:length]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (3, 0)}, {"softcap": 2.0}])
@pytest.mark.parametrize("new", [1, 3])
def test_with_kvcache_appends_and_attends(device, paged, new, options):
    key_cache, value_cache, table, lengths = paged
    query = torch.randn(BATCH, new, HEADS, HEAD_DIM, device=device) * 2
    key, value = torch.randn(2, BATCH, new, KV_HEADS, HEAD_DIM, device=device)
    output, lse = flash_attn_with_kvcache(
        query, key_cache, value_cache, key, value, cache_seqlens=lengths, block_table=table,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        total = length + new
        assert torch.equal(rows(key_cache, table, row, total)[length:], key[row])
        keys, values = rows(key_cache, table, row, total), rows(value_cache, table, row, total)
        window = options["window_size"][0] + 1 if "window_size" in options else None
        expected, expected_lse = plain(
            query[row], keys, values, options.get("causal", False), window, options.get("softcap", 0.0)
        )
        torch.testing.assert_close(output[row], expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[row], expected_lse, atol=2e-5, rtol=2e-5)


def test_with_unpaged_cache_and_batch_index(device):
    torch.manual_seed(0)
    key_cache, value_cache = torch.randn(2, 5, 20, KV_HEADS, HEAD_DIM, device=device)
    query = torch.randn(2, 1, HEADS, HEAD_DIM, device=device)
    index = torch.tensor([4, 1], dtype=torch.int32, device=device)
    output = flash_attn_with_kvcache(query, key_cache, value_cache, cache_seqlens=7, cache_batch_idx=index)
    for row, source in enumerate((4, 1)):
        expected, _ = plain(query[row], key_cache[source, :7], value_cache[source, :7], False)
        torch.testing.assert_close(output[row], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_matches_positions(device, paged, interleaved):
    key_cache, value_cache, table, lengths = paged
    angles = torch.arange(64, device=device)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001], device=device)
    query, key = (
        torch.randn(BATCH, 2, HEADS, HEAD_DIM, device=device),
        torch.randn(BATCH, 2, KV_HEADS, HEAD_DIM, device=device),
    )
    flash_attn_with_kvcache(
        query, key_cache, value_cache, key, key, angles.cos(), angles.sin(), lengths, block_table=table, causal=True,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        stored = rows(key_cache, table, row, length + 2)[length:]
        for i in range(2):
            pairs = key[row, i, :, :8]
            first, second = (pairs[:, 0::2], pairs[:, 1::2]) if interleaved else (pairs[:, :4], pairs[:, 4:])
            turned = torch.complex(first, second) * torch.polar(torch.ones(4, device=device), angles[length + i])
            parts = (stored[i, :, 0:8:2], stored[i, :, 1:8:2]) if interleaved else (stored[i, :, :4], stored[i, :, 4:8])
            torch.testing.assert_close(torch.complex(*parts), turned)
        assert torch.equal(stored[..., 8:], key[row, ..., 8:])


@pytest.mark.parametrize("use_table", [True, False])
@pytest.mark.parametrize("alibi", [True, False])
def test_varlen(device, paged, use_table, alibi):
    key_cache, value_cache, table, _ = paged
    lengths, query_lens = [5, 16, 9], [2, 5, 9]
    cu_q = torch.tensor([0, 2, 7, 16], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 5, 21, 30], dtype=torch.int32, device=device)
    query = torch.randn(16, HEADS, HEAD_DIM, device=device)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], device=device) if alibi else None
    keys = [rows(key_cache, table, row, length) for row, length in enumerate(lengths)]
    values = [rows(value_cache, table, row, length) for row, length in enumerate(lengths)]
    source = (key_cache, value_cache) if use_table else (torch.cat(keys), torch.cat(values))
    output, lse, _ = flash_attn_varlen_func(
        query, *source, cu_q, cu_k, 9, 16, causal=True, alibi_slopes=slopes, return_attn_probs=True,
        block_table=table if use_table else None,
    )  # fmt: skip
    for part, part_lse, q, k, v in zip(
        output.split(query_lens), lse.split(query_lens, 1), query.split(query_lens), keys, values
    ):
        expected, expected_lse = plain(q, k, v, True, slopes=slopes)
        torch.testing.assert_close(part, expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(part_lse, expected_lse, atol=2e-5, rtol=2e-5)


def test_refusals(device, paged):
    key_cache, value_cache, table, lengths = paged
    query = torch.randn(BATCH, 2, HEADS, HEAD_DIM, device=device)
    call = {"q": query, "k_cache": key_cache, "v_cache": value_cache, "cache_seqlens": lengths, "block_table": table}
    for name, setting in (
        ("cache_leftpad", lengths),
        ("window_size", (4, 4)),
        ("cache_batch_idx", lengths),
        ("alibi_slopes", torch.zeros(BATCH, HEADS, device=device)),
        ("rotary_sin", None),
        ("v", None),
    ):
        options = {**call, name: setting}
        if name == "rotary_sin":
            options["rotary_cos"] = torch.ones(64, 4, device=device)
        if name == "v":
            options["k"] = query[:, :, :KV_HEADS]
        with pytest.raises(ValueError, match=name):
            flash_attn_with_kvcache(**options)
    cu = torch.tensor([0, 6], dtype=torch.int32, device=device)
    flat = query.flatten(0, 1)
    with pytest.raises(ValueError, match="dropout_p"):
        flash_attn_varlen_func(flat, flat, flat, cu, cu, 6, 6, dropout_p=0.1)


def test_no_query_tokens(paged):
    key_cache, value_cache, table, lengths = paged
    query = torch.zeros(BATCH, 0, HEADS, HEAD_DIM, device=table.device)
    output = flash_attn_with_kvcache(query, key_cache, value_cache, cache_seqlens=lengths, block_table=table)
    assert output.shape == query.shape
