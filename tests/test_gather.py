"""gather_kv: the tokens of each sequence packed one after another, dequantised."""

import pytest
import torch

from paged_attn import reference
from paged_attn.testing import (
    FLOAT_DTYPES,
    LAYOUTS,
    QUANTISED_DTYPES,
    SCALE_KINDS,
    assert_same_bits,
    or_refused,
    peaky_batch,
)


def check_gather(ops, seq_lens=(40, 0, 17, 100), starts=None, lengths=None, out_dtype=None, **batch_arguments):
    """The reference's bits: copies where nothing is converted, one rounding of stored x scale elsewhere."""
    batch = peaky_batch(seq_lens, **batch_arguments)
    lengths = torch.tensor(lengths or seq_lens, dtype=torch.int32)
    options = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    options = {name: scale for name, scale in options.items() if scale is not None}
    if starts is not None:
        options["seq_starts"] = torch.tensor(starts, dtype=torch.int32)
    dtype = {} if out_dtype is None else {"out_dtype": out_dtype}
    expected = reference.gather_kv(batch.key_cache, batch.value_cache, batch.block_table, lengths, **options, **dtype)
    batch = batch.to(ops.device)
    options = {name: tensor.to(ops.device) for name, tensor in options.items()}
    actual = ops.gather_kv(
        batch.key_cache, batch.value_cache, batch.block_table, lengths.to(ops.device), **options, **dtype
    )
    for result, right in zip(actual, expected, strict=True):
        assert_same_bits(result, right)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 128, 256])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_gather(ops, dtype, block_size, head_dim):
    check_gather(ops, dtype=dtype, block_size=block_size, head_dim=head_dim)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_layouts(ops, num_kv_heads, layout):
    check_gather(ops, dtype=torch.bfloat16, num_heads=num_kv_heads, num_kv_heads=num_kv_heads, layout=layout)


@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_starts(ops, block_size):
    check_gather(ops, starts=[3, 0, 16, 33], lengths=[37, 0, 1, 40], block_size=block_size)


@pytest.mark.parametrize("out_dtype", [None, *FLOAT_DTYPES], ids=str)
@pytest.mark.parametrize("scale_kind", [None, *SCALE_KINDS])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_quantised(ops, cache_dtype, scale_kind, out_dtype):
    check_gather(
        ops,
        cache_dtype=cache_dtype,
        scale_kind=scale_kind,
        out_dtype=out_dtype,
        starts=[1, 0, 2, 5],
        lengths=[9, 0, 15, 90],
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", FLOAT_DTYPES, ids=str)
def test_unquantised_converts(ops, dtype, out_dtype):
    check_gather(ops, dtype=dtype, out_dtype=out_dtype, starts=[1, 0, 2, 5], lengths=[9, 0, 15, 90])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [8, 24, 80, 256])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_quantised_shapes(ops, cache_dtype, head_dim, layout):
    check_gather(ops, cache_dtype=cache_dtype, scale_kind="token_head", head_dim=head_dim, layout=layout, block_size=3)


def test_known_total(ops):
    """``total_tokens`` past the sum of the lengths: the rest is 0."""
    batch = peaky_batch([20, 5]).to(ops.device)
    arguments = batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens
    for result, exact in zip(ops.gather_kv(*arguments, total_tokens=32), ops.gather_kv(*arguments), strict=True):
        assert result.shape == (32, 2, 64)
        assert_same_bits(result[:25], exact)
        assert result[25:].count_nonzero() == 0


def test_known_total_past_the_row(ops):
    """Tokens that the table has no entry for are refused or 0, never another sequence's."""
    batch = peaky_batch([64, 64]).to(ops.device)
    table = batch.block_table[:, :2].contiguous()
    lengths = torch.tensor([40, 8], dtype=torch.int32, device=ops.device)
    expected, _ = ops.gather_kv(batch.key_cache, batch.value_cache, batch.block_table, lengths)
    with or_refused("seq_lens") as outcome:
        keys, _ = ops.gather_kv(batch.key_cache, batch.value_cache, table, lengths, total_tokens=48)
    if not outcome.refused:
        assert_same_bits(keys[:32], expected[:32])
        assert keys[32:40].count_nonzero() == 0
        assert_same_bits(keys[40:], expected[40:])


def test_many_sequences(ops):
    check_gather(ops, seq_lens=[(7 * i) % 23 for i in range(300)], head_dim=16, block_size=4)


def test_negative_length_is_refused_or_nothing(ops):
    batch = peaky_batch([20, 5]).to(ops.device)
    lengths = torch.tensor([-3, 5], dtype=torch.int32, device=ops.device)
    with or_refused("seq_lens") as outcome:
        keys, _ = ops.gather_kv(batch.key_cache, batch.value_cache, batch.block_table, lengths)
    if not outcome.refused:
        assert keys.shape[0] == 5
