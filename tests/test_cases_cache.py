"""Write, gather, copy, swap (group D), and the dtypes of indices."""

import math

import pytest
import torch

from paged_attn.testing import (
    LAYOUTS,
    assert_close,
    assert_same_bits,
    bits,
    make_cache,
    or_refused,
    page,
    peaky_batch,
    to_device,
)

E4M3 = torch.float8_e4m3fn
COPY_DTYPES = (torch.float32, torch.bfloat16, torch.float16, E4M3, torch.float8_e5m2, torch.int8)


def slot_tensor(slots, device, dtype=torch.int64):
    return torch.tensor(slots, dtype=dtype, device=device)


def pair_tensor(pairs, device):
    """[n, 2] pairs of source and destination block."""
    return torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)


def random_bits(cache, seed=0):
    """Fill a cache with random bytes, NaN payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
    info = torch.iinfo(integers)
    noise = torch.randint(info.min, info.max + 1, cache.shape, dtype=integers, generator=generator)
    cache.copy_(noise.view(cache.dtype))
    return cache


# D-negative-slot


def check_negative_slots(ops, slot_dtype=torch.int64, past_the_end=False):
    """Slots 5, -1, 0, -1, 33 of 64: only 5, 0 and 33 change, the rows past the mapping are ignored."""
    guarded = [torch.full((6, 16, 2, 64), 7.0, device=ops.device) for _ in range(2)]
    key_cache, value_cache = (pool[1:5] for pool in guarded)
    key = (100.0 + torch.arange(8.0, device=ops.device)).view(8, 1, 1).expand(8, 2, 64).contiguous()
    slots = [5, -1, 0, -1, 33] + [64] * past_the_end
    with or_refused("slot_mapping") as outcome:
        ops.write_kv(key, key + 100, key_cache, value_cache, slot_tensor(slots, ops.device, slot_dtype))
    assert past_the_end or not outcome.refused
    for pool, first in zip(guarded, (100.0, 200.0), strict=True):
        expected = torch.full((6 * 16,), 7.0)
        for row, slot in enumerate(slots):
            if 0 <= slot < 64 and not outcome.refused:
                expected[16 + slot] = first + row
        assert_close(pool.view(96, 2, 64), expected, tolerance=0)


@pytest.mark.parametrize("past_the_end", [False, True])
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=str)
def test_negative_slots(ops, slot_dtype, past_the_end):
    check_negative_slots(ops, slot_dtype, past_the_end)


# D-strided-write


def fused_qkv(device):
    """Key and value slices [10, 2, 64] of one projection's output."""
    fused = torch.randn(10, (8 + 2 + 2) * 64, generator=torch.Generator().manual_seed(1)).to(device)
    return fused[:, 512:640].view(10, 2, 64), fused[:, 640:].view(10, 2, 64)


def transposed(device):
    """Key and value of one sequence, stored heads first."""
    rows = torch.randn(2, 1, 2, 10, 64, generator=torch.Generator().manual_seed(1)).to(device)
    return rows[0, 0].transpose(0, 1), rows[1, 0].transpose(0, 1)


def packed(device):
    return torch.full((4, 16, 2, 128), 7.0, device=device).split(64, dim=-1)


def interleaved(device):
    return torch.full((4, 2, 16, 2, 64), 7.0, device=device).unbind(1)


def heads_first(device):
    return [torch.full((4, 2, 16, 64), 7.0, device=device).transpose(1, 2) for _ in range(2)]


def check_strided_write(ops, rows, caches):
    """The contiguous call's bits, neighbours untouched."""
    key, value = rows(ops.device)
    slots = slot_tensor([3, 17, 18, 63, -1, 0, 40, 41, 31, 32], ops.device)
    plain = [torch.full((4, 16, 2, 64), 7.0, device=ops.device) for _ in range(2)]
    ops.write_kv(key.contiguous(), value.contiguous(), *plain, slots)
    strided = caches(ops.device)
    ops.write_kv(key, value, *strided, slots)
    for actual, expected, row in zip(strided, plain, (key, value), strict=True):
        assert_same_bits(actual, expected)
        assert_same_bits(actual[1, 1], row[1])
        assert int((actual == 7).all(-1).all(-1).sum()) == 64 - 9


@pytest.mark.parametrize("caches", [packed, interleaved, heads_first])
@pytest.mark.parametrize("rows", [fused_qkv, transposed])
def test_strided_write(ops, rows, caches):
    check_strided_write(ops, rows, caches)


# D-fp8


def check_fp8_write(ops):
    """e4m3 saturates at 448, infinities too, and keeps NaN."""
    numbers = [448, 464, 1000, -1e5, 0.001, 17, math.nan, math.inf, -math.inf]
    stored = [448, 448, 448, -448, 0.001953125, 16, math.nan, 448, -448]
    key = torch.tensor(numbers, device=ops.device).view(-1, 1, 1).expand(-1, 2, 64).contiguous()
    key_cache, value_cache = make_cache(1, 16, 2, 64, dtype=E4M3, device=ops.device)
    ops.write_kv(key, -key, key_cache, value_cache, torch.arange(9, device=ops.device))
    expected = torch.tensor(stored)
    assert_close(key_cache[0, :9].float(), expected, tolerance=0)
    assert_close(value_cache[0, :9].float(), -expected, tolerance=0)


def test_fp8_write(ops):
    check_fp8_write(ops)


def check_int8_write(ops):
    """int8 rounds half to even, saturates at 127, and stores NaN as 0."""
    numbers = [127, 127.4, 1000, -1e5, 0.5, 1.5, -2.5, math.nan, math.inf, -math.inf]
    stored = [127, 127, 127, -127, 0, 2, -2, 0, 127, -127]
    key = torch.tensor(numbers, device=ops.device).view(-1, 1, 1).expand(-1, 2, 64).contiguous()
    key_cache, value_cache = make_cache(1, 16, 2, 64, dtype=torch.int8, device=ops.device)
    ops.write_kv(key, -key, key_cache, value_cache, torch.arange(10, device=ops.device))
    expected = torch.tensor(stored)
    assert_close(key_cache[0, :10].float(), expected, tolerance=0)
    assert_close(value_cache[0, :10].float(), -expected, tolerance=0)


def test_int8_write(ops):
    check_int8_write(ops)


def check_scale_divides(ops):
    """Scale 2: 768 is stored as 384 and reads back as 768."""
    key = torch.full((1, 2, 64), 768.0, device=ops.device)
    key_cache, value_cache = make_cache(1, 16, 2, 64, dtype=E4M3, device=ops.device)
    two, four = torch.tensor([2.0], device=ops.device), torch.tensor([4.0], device=ops.device)
    ops.write_kv(key, key, key_cache, value_cache, slot_tensor([3], ops.device), k_scale=two, v_scale=four)
    assert_close(key_cache[0, 3].float(), 384.0, tolerance=0)
    assert_close(value_cache[0, 3].float(), 192.0, tolerance=0)
    table, lengths = slot_tensor([[0]], ops.device, torch.int32), slot_tensor([4], ops.device, torch.int32)
    for rows in ops.gather_kv(key_cache, value_cache, table, lengths, k_scale=two, v_scale=four):
        assert rows.dtype == torch.bfloat16


def test_scale_divides(ops):
    check_scale_divides(ops)


def check_fp8_attention(ops, query_lens=None):
    """k_scale 0.5, v_scale 2, K = 0, values 1 to 16: the mean 8.5 (a quarter of it means swapped scales)."""
    values = torch.arange(1.0, 17).view(16, 1, 1).expand(16, 2, 64)
    num_queries = 1 if query_lens is None else query_lens[0]
    batch = page(
        torch.ones(num_queries, 8, 64, dtype=torch.bfloat16),
        [torch.zeros(16, 2, 64)],
        [values / 2],
        query_lens=query_lens,
        block_size=32,
        cache_dtype=E4M3,
        device=ops.device,
    )
    assert (bits(batch.value_cache)[int(batch.block_table[0, 0]), 16:] & 0x7F == 0x7F).all()
    scales = {"k_scale": torch.tensor([0.5], device=ops.device), "v_scale": torch.tensor([2.0], device=ops.device)}
    output = batch.run(ops.paged_attention, **scales)
    assert_close(output[-1:], 8.5)


@pytest.mark.parametrize("query_lens", [None, [3], [16]])
def test_fp8_attention(attention_ops, query_lens):
    check_fp8_attention(attention_ops, query_lens)


# D-copy-extent


def layers(layout, dtype, device, num_blocks=8, stacked=False):
    """K and V caches of 3 layers, or one stacked tensor of 3, every byte random."""
    if stacked:
        _, pool = make_cache(3 * num_blocks, 16, 2, 64, dtype=dtype, layout=layout)
        return to_device(random_bits(pool).unflatten(0, (3, num_blocks)), device)
    caches = [cache for _ in range(3) for cache in make_cache(num_blocks, 16, 2, 64, dtype=dtype, layout=layout)]
    return [to_device(random_bits(cache, seed), device) for seed, cache in enumerate(caches)]


def assert_moved(after, before, source, pairs):
    """Each destination block equals its source as it was; every other block is as before."""
    for new, old, origin in zip(after, before, source, strict=True):
        expected = bits(old)
        for from_block, to_block in pairs:
            expected[to_block] = bits(origin)[from_block]
        assert torch.equal(bits(new), expected)


def copies(caches):
    return [cache.clone() for cache in caches]


def check_copy_extent(ops, dtype=torch.float32, layout="NHD", stacked=False, pairs=((2, 5),)):
    caches = layers(layout, dtype, ops.device, stacked=stacked)
    before = copies(caches)
    ops.copy_blocks(caches, pair_tensor(pairs, ops.device))
    assert_moved(caches, before, before, pairs)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", COPY_DTYPES, ids=str)
def test_copy_extent(ops, dtype, layout, stacked):
    check_copy_extent(ops, dtype, layout, stacked)


def check_swap_extent(ops, dtype=torch.float32, layout="NHD", stacked=False):
    """Block 2 to host block 0, then to device block 6."""
    caches = layers(layout, dtype, ops.device, stacked=stacked)
    host = layers(layout, dtype, "cpu", num_blocks=4, stacked=stacked)
    before, host_before = copies(caches), copies(host)
    ops.swap_blocks(caches, host, pair_tensor([(2, 0)], "cpu"))
    assert_moved(host, host_before, before, [(2, 0)])
    ops.swap_blocks(host, caches, pair_tensor([(0, 6)], "cpu"))
    assert_moved(caches, before, before, [(2, 6)])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", COPY_DTYPES, ids=str)
def test_swap_extent(ops, dtype, layout, stacked):
    check_swap_extent(ops, dtype, layout, stacked)


# D-gather


def check_gather_with_starts(ops):
    """Start 3, 70 tokens, blocks 4 and 1 of 64: rows 3 .. 72."""
    key_cache, value_cache = (cache.to(ops.device) for cache in make_cache(6, 64, 2, 64, dtype=torch.float32))
    key_cache[:], value_cache[:] = math.nan, math.nan
    number = torch.arange(128.0, device=ops.device).view(2, 64, 1, 1)
    key_cache[[4, 1]], value_cache[[4, 1]] = number, -number
    table = slot_tensor([[4, 1]], ops.device, torch.int32)
    keys, values = ops.gather_kv(
        key_cache,
        value_cache,
        table,
        slot_tensor([70], ops.device, torch.int32),
        seq_starts=slot_tensor([3], ops.device, torch.int32),
    )
    assert keys.shape == values.shape == (70, 2, 64)
    assert_close(keys, torch.arange(3.0, 73), tolerance=0)
    assert_close(values, -torch.arange(3.0, 73), tolerance=0)


def test_gather_with_starts(ops):
    check_gather_with_starts(ops)


def check_gather_batch(ops):
    """Starts 0, 63, 64 and a member of zero tokens."""
    batch = peaky_batch([100, 70, 5, 130], block_size=64).to(ops.device)
    starts, lengths = [0, 63, 2, 64], [100, 7, 0, 66]
    keys, values = ops.gather_kv(
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        slot_tensor(lengths, ops.device, torch.int32),
        seq_starts=slot_tensor(starts, ops.device, torch.int32),
    )
    for rows, cache in ((keys, batch.key_cache), (values, batch.value_cache)):
        expected = [
            cache[int(batch.block_table[sequence, token // 64]), token % 64]
            for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True))
            for token in range(start, start + length)
        ]
        assert_same_bits(rows, torch.stack(expected))


def test_gather_batch(ops):
    check_gather_batch(ops)


def check_gather_past_the_row(ops):
    """Start 128 of a table of 2 x 64 slots: refused, or zeros; never the next row's tokens."""
    key_cache, value_cache = (cache.to(ops.device) for cache in make_cache(4, 64, 2, 64, dtype=torch.float32))
    key_cache[:], value_cache[:] = 5, 5
    table = slot_tensor([[0, 1], [2, 3]], ops.device, torch.int32)
    lengths = slot_tensor([65, 0], ops.device, torch.int32)
    starts = slot_tensor([128, 0], ops.device, torch.int32)
    with or_refused("seq_lens", "seq_starts", "block_table") as outcome:
        results = ops.gather_kv(key_cache, value_cache, table, lengths, seq_starts=starts)
    if not outcome.refused:
        assert all(result.count_nonzero() == 0 for result in results)


def test_gather_past_the_row(ops):
    check_gather_past_the_row(ops)


# A-index-dtype, A-sizes: what is written is read back


@pytest.mark.parametrize(
    ("row_dtype", "cache_dtype"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)]
)
def test_dtypes_that_differ_are_refused(ops, row_dtype, cache_dtype):
    """The bits of bfloat16 188.0 read as float16 would be 3.62."""
    key = torch.full((1, 2, 64), 188.0, dtype=row_dtype, device=ops.device)
    key_cache, value_cache = make_cache(1, 16, 2, 64, dtype=cache_dtype, device=ops.device)
    with or_refused("key") as outcome:
        ops.write_kv(key, key, key_cache, value_cache, slot_tensor([0], ops.device))
    assert_close(key_cache[0, 0].float(), 0.0 if outcome.refused else 188.0, tolerance=0)


def test_rows_of_46_elements(ops):
    """D = 46 in bfloat16: slots 0 .. 31 read back bit for bit, or refused."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 32, 2, 46, generator=generator).bfloat16().to(ops.device)
    key_cache, value_cache = make_cache(2, 16, 2, 46, dtype=torch.bfloat16, device=ops.device)
    with or_refused("head_dim", "key") as outcome:
        ops.write_kv(key, value, key_cache, value_cache, torch.arange(32, device=ops.device))
    if not outcome.refused:
        assert_same_bits(key_cache.view(32, 2, 46), key)
        assert_same_bits(value_cache.view(32, 2, 46), value)
