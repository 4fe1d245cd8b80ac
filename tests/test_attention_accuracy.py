"""Rounding errors beside those of torch's own attention, both against float64 over the same stored numbers."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from paged_attn.testing import QUANTISED_DTYPES, assert_close, page, peaky_batch

LARGEST_RATIO = 1.1  # ours to torch's


def root_mean_square(error):
    return float(error.double().square().mean().sqrt())


def torch_attention(ops, batch, query_len):
    """Flash attention over contiguous copies of one sequence's keys and values."""
    keys, values = ops.gather_kv(batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens)
    group = batch.query.shape[1] // keys.shape[1]
    keys, values = (rows.repeat_interleave(group, dim=1).transpose(0, 1)[None] for rows in (keys, values))
    query = batch.query.transpose(0, 1)[None]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        output = scaled_dot_product_attention(query, keys, values, is_causal=query_len > 1)
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("query_len", [1, 600])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_no_worse_than_torch(attention_ops, record_property, dtype, spread, head_dim, query_len):
    ops = attention_ops
    batch = peaky_batch([600], [query_len], dtype=dtype, head_dim=head_dim, spread=spread)
    exact = torch.empty(batch.query.shape, dtype=torch.float64)
    batch.expected(out=exact)
    batch = batch.to(ops.device)
    ours = root_mean_square(batch.run(ops.paged_attention).cpu() - exact)
    theirs = root_mean_square(torch_attention(ops, batch, query_len).cpu() - exact)
    record_property("error", ours)
    record_property("error of torch", theirs)
    assert ours <= LARGEST_RATIO * theirs, f"{ours:.3g} against torch's {theirs:.3g}"


@pytest.mark.parametrize("query_len", [1, 600])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_quantised_no_worse_than_the_output_dtype(attention_ops, dtype, cache_dtype, query_len):
    """Over the dequantised numbers the error is that of an unquantised cache: some half steps of the output's dtype."""
    ops = attention_ops
    errors = []
    for cache in (dtype, cache_dtype):
        batch = peaky_batch([600], [query_len], dtype=dtype, cache_dtype=cache, head_dim=128)
        exact = torch.empty(batch.query.shape, dtype=torch.float64)
        batch.expected(out=exact)
        errors.append(root_mean_square(batch.to(ops.device).run(ops.paged_attention).cpu() - exact))
    assert errors[1] <= 2 * errors[0], f"{errors[1]:.3g} against {errors[0]:.3g} without quantisation"


@pytest.mark.parametrize("growth", [4.0, 30.0])
@pytest.mark.parametrize("latest_largest", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_that_grow_along_the_keys(attention_ops, dtype, latest_largest, growth):
    """Whichever end a kernel begins at, it meets scores far above all that it has seen."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(300, 8, 64, generator=generator)
    factors = torch.logspace(0, math.log10(growth), 1200)[:, None, None]
    keys = torch.randn(1200, 2, 64, generator=generator) * (factors if latest_largest else factors.flip(0))
    values = torch.randn(1200, 2, 64, generator=generator)
    batch = page(query.to(dtype), [keys], [values], query_lens=[300])
    expected, expected_lse = batch.expected(return_lse=True)
    output, lse = batch.to(attention_ops.device).run(attention_ops.paged_attention, return_lse=True)
    assert_close(output, expected)
    assert_close(lse, expected_lse, tolerance=1e-3)
