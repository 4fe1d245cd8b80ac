"""Merge (group B): combining partial results over disjoint keys."""

import math

import pytest
import torch

from paged_attn import reference
from paged_attn.testing import FLOAT_DTYPES, assert_close, peaky_batch

from .conftest import Ops


def partial(value, lse, device, dtype=torch.float32):
    """A result of 2 tokens, 3 heads, 64 elements: one value, one LSE."""
    output = torch.full((2, 3, 64), value, dtype=dtype, device=device)
    return output, torch.full((2, 3), lse, device=device)


EMPTY, EMPTY_NAN, SOME, INFINITE = (0.0, -math.inf), (math.nan, -math.inf), (3.0, 1.0), (1.0, math.inf)


def check_identity(ops, dtype=torch.float32):
    """(0, -inf) is the identity even with NaN values; both empty gives (0, -inf)."""
    for a, b, expected in (
        (EMPTY, EMPTY, EMPTY),
        (EMPTY_NAN, EMPTY_NAN, EMPTY),
        (EMPTY_NAN, SOME, SOME),
        (SOME, EMPTY_NAN, SOME),
        (EMPTY, SOME, SOME),
        (EMPTY_NAN, INFINITE, INFINITE),
    ):
        output, lse = ops.merge_attn_states(*partial(*a, ops.device, dtype), *partial(*b, ops.device, dtype))
        assert_close(output, expected[0], tolerance=0)
        assert_close(lse, expected[1], tolerance=0)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_identity(ops, dtype):
    check_identity(ops, dtype)


def check_three_parts(ops):
    """Two empty parts and one full, in every order."""
    parts = [partial(*part, ops.device) for part in (EMPTY_NAN, SOME, EMPTY)]
    for a, b, c in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        merged = ops.merge_attn_states(*parts[a], *parts[b])
        output, lse = ops.merge_attn_states(*merged, *parts[c])
        assert_close(output, 3.0, tolerance=0)
        assert_close(lse, 1.0, tolerance=0)


def test_three_parts(ops):
    check_three_parts(ops)


def check_weights(ops):
    """Values 0 and 1 with LSE ln 2 and ln 8: 8 / 10 and ln 10."""
    output, lse = ops.merge_attn_states(*partial(0.0, math.log(2), ops.device), *partial(1.0, math.log(8), ops.device))
    assert_close(output, 0.8)
    assert_close(lse, math.log(10), tolerance=1e-6)


def test_weights(ops):
    check_weights(ops)


def check_large_lse(ops):
    """LSE 500 and 500, 500 and -500: no overflow."""
    output, lse = ops.merge_attn_states(*partial(1.0, 500.0, ops.device), *partial(3.0, 500.0, ops.device))
    assert_close(output, 2.0)
    assert_close(lse, 500 + math.log(2), tolerance=1e-6)
    output, lse = ops.merge_attn_states(*partial(1.0, 500.0, ops.device), *partial(3.0, -500.0, ops.device))
    assert_close(output, 1.0, tolerance=0)
    assert_close(lse, 500.0, tolerance=0)


def check_infinite_lse(ops):
    """The side of a sink of inf takes all of the weight; two of them halve it."""
    for a, b, expected in ((INFINITE, SOME, 1.0), (SOME, INFINITE, 1.0), (INFINITE, (2.0, math.inf), 1.5)):
        output, lse = ops.merge_attn_states(*partial(*a, ops.device), *partial(*b, ops.device))
        assert_close(output, expected, tolerance=0)
        assert_close(lse, math.inf, tolerance=0)


@pytest.mark.parametrize("module", ["ops", "reference"])
def test_infinite_lse(ops, module):
    check_infinite_lse(ops if module == "ops" else Ops(reference, ops.device))


def check_nan_lse(ops):
    """A log-sum-exp of NaN makes its row NaN, whatever is on the other side."""
    for other in (EMPTY, EMPTY_NAN, SOME, INFINITE, (1.0, math.nan)):
        sides = partial(2.0, math.nan, ops.device), partial(*other, ops.device)
        for a, b in (sides, sides[::-1]):
            output, lse = ops.merge_attn_states(*a, *b)
            assert output.isnan().all()
            assert lse.isnan().all()


@pytest.mark.parametrize("module", ["ops", "reference"])
def test_nan_lse(ops, module):
    check_nan_lse(ops if module == "ops" else Ops(reference, ops.device))


def test_large_lse(ops):
    check_large_lse(ops)


@pytest.mark.parametrize("over", ["a", "b"])
def test_written_over_an_operand(ops, over):
    a, b = partial(0.0, math.log(2), ops.device), partial(1.0, math.log(8), ops.device)
    target = a if over == "a" else b
    output, lse = ops.merge_attn_states(*a, *b, out=target[0], out_lse=target[1])
    assert output.data_ptr() == target[0].data_ptr()
    assert lse.data_ptr() == target[1].data_ptr()
    assert_close(target[0], 0.8)
    assert_close(target[1], math.log(10), tolerance=1e-6)


def check_merge(ops, dtype=torch.float32, num_heads=8, head_dim=64, num_tokens=37):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(2, num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    lses = 4 * torch.randn(2, num_tokens, num_heads, generator=generator)
    lses[0, ::3], lses[1, ::4] = -math.inf, -math.inf
    outputs[0, ::3], outputs[1, ::4] = math.nan, math.nan
    operands = outputs[0], lses[0], outputs[1], lses[1]
    expected, expected_lse = reference.merge_attn_states(*operands)
    output, lse = ops.merge_attn_states(*(operand.to(ops.device) for operand in operands))
    assert output.dtype == dtype
    assert_close(output, expected)
    assert_close(lse, expected_lse, tolerance=1e-6)


@pytest.mark.parametrize("num_heads", [1, 3, 32])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_merge(ops, dtype, head_dim, num_heads):
    check_merge(ops, dtype, num_heads, head_dim)


def test_strided_operands(ops):
    """Slices of wider tensors, and a strided out."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 10, 16, 64, generator=generator).to(ops.device)
    lses = torch.randn(2, 10, 16, generator=generator).to(ops.device)
    operands = wide[0, :, 4:8], lses[0, :, 4:8], wide[1, :, 8:12], lses[1, :, 8:12]
    expected, expected_lse = reference.merge_attn_states(*operands)
    out = torch.full((10, 8, 64), 7.0, device=ops.device)
    output, lse = ops.merge_attn_states(*operands, out=out[:, ::2])
    assert_close(output, expected)
    assert_close(lse, expected_lse, tolerance=1e-6)
    assert (out[:, 1::2] == 7).all()


def check_halves(ops, dtype=torch.float32):
    """Attention over two halves of the keys, merged, is attention over all of them."""
    whole = peaky_batch([96], dtype=dtype, block_size=16)
    expected, expected_lse = whole.expected(return_lse=True)
    batch = whole.to(ops.device)
    half = torch.tensor([48], dtype=torch.int32, device=ops.device)
    parts = [
        ops.paged_attention(batch.query, batch.key_cache, batch.value_cache, table, half, return_lse=True)
        for table in (batch.block_table[:, :3], batch.block_table[:, 3:6])
    ]
    output, lse = ops.merge_attn_states(*parts[0], *parts[1])
    assert_close(output, expected)
    assert_close(lse, expected_lse, tolerance=1e-3)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_halves(attention_ops, dtype):
    check_halves(attention_ops, dtype)
