"""Masks and score modifiers (group C), each with its number."""

import math

import pytest
import torch

from paged_attn.testing import FLOAT_DTYPES, assert_close, flat_batch

LN2 = math.log(2)


def attend(ops, length, num_queries=1, *, dtype=torch.float32, batch_arguments=None, **options):
    """Flat data: a row that sees tokens a .. b gives the mean of a + 1 .. b + 1."""
    batch = flat_batch([length], [num_queries], dtype=dtype, device=ops.device, **(batch_arguments or {}))
    return batch.run(ops.paged_attention, **options)


# C-causal-tail


def check_causal_tail(ops, dtype=torch.float32):
    """3 new tokens on a context of 10: 4.5, 5.0, 5.5."""
    assert_close(attend(ops, 10, 3, dtype=dtype), [4.5, 5.0, 5.5])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_causal_tail(attention_ops, dtype):
    check_causal_tail(attention_ops, dtype)


@pytest.mark.parametrize("num_queries", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [16, 17, 33])
def test_causal_tail_at_block_edges(attention_ops, length, num_queries):
    expected = [(length - num_queries + i + 2) / 2 for i in range(num_queries)]
    assert_close(attend(attention_ops, length, num_queries), expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_prefill_rows(attention_ops, dtype):
    """A prompt of 100 tokens: row i sees i + 1 of them."""
    output, lse = attend(
        attention_ops, 100, 100, dtype=dtype, return_lse=True, batch_arguments={"head_dim": 128, "one_hot": True}
    )
    seen = torch.arange(1, 101)
    assert_close(output, 1 / seen)
    assert_close(lse, seen.double().log(), tolerance=1e-3)


def check_queries_before_the_first_key(ops):
    """5 queries on a context of 2: three empty rows, then 1.0 and 1.5."""
    output, lse = attend(ops, 2, 5, return_lse=True)
    assert output[:3].count_nonzero() == 0
    assert_close(output, [0.0, 0.0, 0.0, 1.0, 1.5])
    assert_close(lse, [-math.inf, -math.inf, -math.inf, 0.0, LN2], tolerance=1e-6)


def test_queries_before_the_first_key(attention_ops):
    check_queries_before_the_first_key(attention_ops)


def check_not_causal(ops):
    """Without the mask each of 3 tokens sees all 10 keys."""
    assert_close(attend(ops, 10, 3, causal=False), 5.5)


def test_not_causal(attention_ops):
    check_not_causal(attention_ops)


# C-window-edge


def check_window_edge(ops, dtype=torch.float32):
    """A token sees W keys, itself included."""
    for window_size, expected in ((4, 8.5), (1, 10.0), (10, 5.5), (11, 5.5), (1000, 5.5), (None, 5.5)):
        assert_close(attend(ops, 10, dtype=dtype, window_size=window_size), expected)
    assert_close(attend(ops, 10, 3, dtype=dtype, window_size=4), [6.5, 7.5, 8.5])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_window_edge(attention_ops, dtype):
    check_window_edge(attention_ops, dtype)


def check_blocks_before_the_window(ops, num_queries=1):
    """Table entries wholly before the first visible key are released: they may hold anything."""
    batch = flat_batch([100], [num_queries], device=ops.device)
    table = batch.block_table.clone()
    expected = [100 - num_queries + i + 1 - 9.5 for i in range(num_queries)]
    first_block = (100 - num_queries + 1 - 20) // 16
    for garbage in (-1, 1000, 2**31 - 1):
        table[:, :first_block] = garbage
        released = vars(batch) | {"block_table": table}
        assert_close(type(batch)(**released).run(ops.paged_attention, window_size=20), expected)


@pytest.mark.parametrize("num_queries", [1, 3, 33])
def test_blocks_before_the_window(attention_ops, num_queries):
    check_blocks_before_the_window(attention_ops, num_queries)


@pytest.mark.parametrize("window_size", [1, 15, 16, 17, 64, 300])
@pytest.mark.parametrize("num_queries", [1, 40])
def test_window_rows(attention_ops, num_queries, window_size):
    """Decode, prefill and long contexts count the window alike."""
    positions = range(2000 - num_queries, 2000)
    expected = [position + 1 - (window_size - 1) / 2 for position in positions]
    assert_close(attend(attention_ops, 2000, num_queries, window_size=window_size), expected)


# C-softcap


def check_softcap(ops, dtype=torch.float32):
    """Raw products 0 and 80, scale 1/8, cap 2, values 0 and 1: 0.8808 (1 / (1 + exp(-2 tanh 5)))."""
    batch = flat_batch([2], dtype=dtype)
    block = int(batch.block_table[0, 0])
    batch.key_cache[block, 1] = 80 / 64
    batch.value_cache[block, 0], batch.value_cache[block, 1] = 0, 1
    batch = batch.to(ops.device)
    for softcap, expected in ((2.0, 0.88077798), (0.0, 0.9999546)):
        assert_close(batch.run(ops.paged_attention, scale=1 / 8, softcap=softcap), expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_softcap(attention_ops, dtype):
    check_softcap(attention_ops, dtype)


# C-alibi


def check_alibi(ops, dtype=torch.float32):
    """Four tokens, slopes ln 2 x (1, 2, 3, 0): 3.2667, 3.6824, 3.8581, 2.5; the newest token's bias is 0."""
    slopes = LN2 * torch.tensor([1.0, 2.0, 3.0, 0.0], device=ops.device)
    heads = {"num_heads": 4, "num_kv_heads": 1}
    for num_queries in (1, 2, 4):
        output, lse = attend(
            ops, 4, num_queries, dtype=dtype, batch_arguments=heads, alibi_slopes=slopes, return_lse=True
        )
        assert_close(output[-1:], [[3.2666667, 3.6823529, 3.8581197, 2.5]])
        assert_close(lse[-1, :1], 0.6286087, tolerance=1e-5)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_alibi(attention_ops, dtype):
    check_alibi(attention_ops, dtype)


@pytest.mark.parametrize("num_queries", [1, 20])
def test_alibi_on_a_long_context(attention_ops, num_queries):
    """Weights 2^-distance: the mean distance is 1, the LSE ln 2."""
    slopes = torch.full((8,), LN2, device=attention_ops.device)
    output, lse = attend(attention_ops, 4100, num_queries, alibi_slopes=slopes, return_lse=True)
    assert_close(output, [4100.0 - num_queries + i for i in range(num_queries)])
    assert_close(lse, LN2, tolerance=1e-5)


# Sinks


def check_sinks(ops, length=8):
    """A sink of ln L beside L equal scores takes half of the weight, once; the LSE is ln 2L."""
    sinks = torch.full((8,), math.log(length), device=ops.device)
    output, lse = attend(ops, length, sinks=sinks, return_lse=True)
    assert_close(output, (length + 1) / 4)
    assert_close(lse, math.log(2 * length), tolerance=1e-5)


@pytest.mark.parametrize("length", [1, 8, 500, 4097])
def test_sinks(attention_ops, length):
    check_sinks(attention_ops, length)


def check_sink_of_an_empty_row(ops):
    """A row that sees nothing: output 0, LSE the sink."""
    sinks = torch.arange(8.0, device=ops.device)
    for length, num_queries in ((0, 1), (0, 3), (2, 5)):
        output, lse = attend(ops, length, num_queries, sinks=sinks, return_lse=True)
        assert output[0].count_nonzero() == 0
        assert_close(lse[:1], [list(range(8))], tolerance=1e-6)


def test_sink_of_an_empty_row(attention_ops):
    check_sink_of_an_empty_row(attention_ops)


def check_extreme_sinks(ops, dtype=torch.float32):
    """A sink of -inf is none; one of 1000, or of inf, takes all of the weight."""
    sinks = torch.tensor([-math.inf] * 4 + [1000.0, 1000.0, math.inf, math.inf], device=ops.device)
    large = [1000.0, 1000.0, math.inf, math.inf]
    for length, num_queries in ((8, 1), (8, 3), (200, 150)):
        output, lse = attend(ops, length, num_queries, dtype=dtype, sinks=sinks, return_lse=True)
        assert_close(output[-1:], [[(length + 1) / 2] * 4 + [0.0] * 4])
        assert_close(lse[-1:], [[math.log(length)] * 4 + large], tolerance=1e-5)
    output, lse = attend(ops, 0, dtype=dtype, sinks=sinks, return_lse=True)
    assert_close(output, 0.0, tolerance=0)
    assert_close(lse, [[-math.inf] * 4 + large], tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_sinks(attention_ops, dtype):
    check_extreme_sinks(attention_ops, dtype)


def check_padding_rows(ops):
    """Rows of query past cu_seqlens_q[-1] are written as empty ones."""
    batch = flat_batch([10, 4], [3, 1], padding_rows=4, device=ops.device)
    batch.query[4:] = math.nan
    out = torch.full_like(batch.query, math.nan)
    output, lse = batch.run(ops.paged_attention, out=out, return_lse=True)
    assert output[4:].count_nonzero() == 0
    assert_close(output, [4.5, 5.0, 5.5, 2.5, 0, 0, 0, 0])
    assert (lse[4:] == -math.inf).all()


def test_padding_rows(attention_ops):
    check_padding_rows(attention_ops)
