"""Addresses, tails, shapes (group A); splits, partial results and LSE (group B)."""

import math

import pytest
import torch

from paged_attn.testing import (
    FLOAT_DTYPES,
    GARBAGE_IDS,
    Batch,
    assert_close,
    assert_same_bits,
    flat_batch,
    make_cache,
    make_table,
    or_refused,
    peaky_batch,
)

POISONS = (math.nan, math.inf)


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


# A-tail-poison


def check_tail_poison(ops, dtype=torch.float32, poison=math.nan, poison_key=True, poison_value=True):
    """Unused slots hold NaN or Inf: 1, 15, 16, 17 and 31 tokens give 1, 8, 8.5, 9 and 16."""
    batch = flat_batch(
        [1, 15, 16, 17, 31],
        head_dim=128,
        dtype=dtype,
        poison=poison,
        poison_key=poison_key,
        poison_value=poison_value,
        device=ops.device,
    )
    for options in ({}, {"batch_invariant": True}):
        assert_close(batch.run(ops.paged_attention, **options), [1.0, 8.0, 8.5, 9.0, 16.0])


@pytest.mark.parametrize(("poison_key", "poison_value"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_tail_poison(attention_ops, dtype, poison, poison_key, poison_value):
    check_tail_poison(attention_ops, dtype, poison, poison_key, poison_value)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_tail_poison_when_split(attention_ops, dtype, poison):
    batch = peaky_batch([4097, 17], dtype=dtype, head_dim=128, poison=poison)
    assert_close(batch.to(attention_ops.device).run(attention_ops.paged_attention), batch.expected())


# A-table-padding


def check_table_padding(ops, query_lens=(1, 1)):
    """Unused table entries hold -1, NB or 2147483647: same bits."""
    batch = peaky_batch([257, 5], query_lens, block_size=64, dtype=torch.float16)
    key_cache, value_cache = make_cache(6, 64, 2, 64, dtype=torch.float16)
    for cache, source in ((key_cache, batch.key_cache), (value_cache, batch.value_cache)):
        cache[[5, 3, 1, 4, 0]] = source[batch.block_table[0, :5].long()]
        cache[2] = source[int(batch.block_table[1, 0])]
    outputs = []
    for garbage in GARBAGE_IDS:
        table = torch.full((2, 8), 6 if garbage == "num_blocks" else garbage, dtype=torch.int32)
        table[0, :5], table[1, 0] = ints([5, 3, 1, 4, 0], "cpu"), 2
        padded = Batch(batch.query, key_cache, value_cache, table, batch.seq_lens, batch.cu_seqlens_q)
        outputs.append(padded.to(ops.device).run(ops.paged_attention))
        assert_same_bits(outputs[-1], outputs[0])
    assert_close(outputs[0], batch.expected())


@pytest.mark.parametrize("query_lens", [(1, 1), (3, 2), (200, 5)])
def test_table_padding(attention_ops, query_lens):
    check_table_padding(attention_ops, query_lens)


def test_table_exactly_full(attention_ops):
    batch = flat_batch([320], block_size=64)
    table = batch.block_table[:, :5].contiguous()
    output = batch.to(attention_ops.device).run(
        lambda query, key, value, _, lens: attention_ops.paged_attention(query, key, value, table.to(lens.device), lens)
    )
    assert_close(output, 160.5)


# A-strided-cache


def strided_caches(kind, num_blocks=9):
    """Two views [NB, 16, 4, 64] whose block stride is not that of a contiguous tensor."""
    if kind == "interleaved":
        return torch.zeros(num_blocks, 2, 16, 4, 64).unbind(1)
    if kind == "stacked":
        return torch.zeros(2, num_blocks, 16, 4, 64).unbind(0)
    if kind == "gap":
        return [torch.zeros(num_blocks, 16 * 4 * 64 + 128)[:, :-128].view(num_blocks, 16, 4, 64) for _ in range(2)]
    if kind == "packed":
        return torch.zeros(num_blocks, 16, 4, 128).split(64, dim=-1)
    raise KeyError(kind)


def check_strided_cache(ops, kind, query_lens=None):
    """Strides of caches, table and lengths are read, not rebuilt: the bits of contiguous copies."""
    batch = peaky_batch([40, 17, 33], query_lens, num_kv_heads=4)
    expected = batch.to(ops.device).run(ops.paged_attention)
    key_cache, value_cache = strided_caches(kind, batch.key_cache.shape[0])
    key_cache, value_cache = key_cache.to(ops.device), value_cache.to(ops.device)
    if kind == "gap":
        key_cache, value_cache = (cache.to(ops.device) for cache in strided_caches(kind, batch.key_cache.shape[0]))
    key_cache.copy_(batch.key_cache)
    value_cache.copy_(batch.value_cache)
    table = torch.full((3, 10), -1, dtype=torch.int32, device=ops.device)
    table[:, 4:7] = batch.block_table[:, :3]
    lengths = torch.full((6,), 99, dtype=torch.int32, device=ops.device)
    lengths[::2] = batch.seq_lens
    strided = Batch(batch.query.to(ops.device), key_cache, value_cache, table[:, 4:7], lengths[::2])
    options = {} if query_lens is None else {"cu_seqlens_q": batch.cu_seqlens_q.to(ops.device)}
    assert_same_bits(strided.run(ops.paged_attention, **options), expected)


@pytest.mark.parametrize("query_lens", [None, (3, 17, 1)])
@pytest.mark.parametrize("kind", ["interleaved", "stacked", "gap", "packed"])
def test_strided_cache(attention_ops, kind, query_lens):
    check_strided_cache(attention_ops, kind, query_lens)


# A-zero-rows


def check_zero_rows(ops, dtype=torch.float32):
    """Lengths 0, 5, 0, 16: rows 0, 3, 0, 8.5 and LSE -inf where nothing is seen, over a preset output."""
    batch = flat_batch([0, 5, 0, 16], dtype=dtype, device=ops.device)
    out = torch.full_like(batch.query, math.nan)
    output, lse = batch.run(ops.paged_attention, out=out, return_lse=True)
    assert output[0].count_nonzero() == 0
    assert output[2].count_nonzero() == 0
    assert_close(output, [0.0, 3.0, 0.0, 8.5])
    assert_close(lse, [-math.inf, math.log(5), -math.inf, math.log(16)], tolerance=1e-5)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_zero_rows(attention_ops, dtype):
    check_zero_rows(attention_ops, dtype)


def test_no_sequences(attention_ops):
    ops, device = attention_ops, attention_ops.device
    key_cache, value_cache = make_cache(2, 16, 2, 64, dtype=torch.float32, device=device)
    query = torch.empty(0, 8, 64, device=device)
    empty = ints([], device)
    output, lse = ops.paged_attention(query, key_cache, value_cache, empty.view(0, 0), empty, return_lse=True)
    assert output.shape == (0, 8, 64)
    assert lse.shape == (0, 8)
    rows = torch.empty(0, 2, 64, device=device)
    ops.write_kv(rows, rows, key_cache, value_cache, empty.long())
    ops.copy_blocks([key_cache, value_cache], ints([], device, torch.int64).view(0, 2))
    keys, values = ops.gather_kv(key_cache, value_cache, empty.view(0, 0), empty)
    assert keys.shape == values.shape == (0, 2, 64)
    assert key_cache.count_nonzero() == 0


# A-wide-ids


def empty_pool(shape, dtype, device):
    """An untouched pool: on the CPU its pages cost nothing until they are written."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for {shape}: {error}")


def check_wide_ids(ops, pool, num_heads, ids, low_blocks):
    """40 tokens in three far blocks: attention and gather as from a small cache, low blocks unchanged."""
    key_cache, value_cache = pool
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    small = peaky_batch(
        [40],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
    )
    key_cache[low_blocks], value_cache[low_blocks] = 7, 7
    expected = small.to(ops.device).run(ops.paged_attention)
    position = torch.arange(40)
    source = small.block_table[0, position // block_size].long(), position % block_size
    key, value = small.key_cache[source].to(ops.device), small.value_cache[source].to(ops.device)

    table = ints([ids], ops.device)
    slots = table[0, position // block_size].long() * block_size + (position % block_size).to(ops.device)
    ops.write_kv(key, value, key_cache, value_cache, slots)
    output = ops.paged_attention(small.query.to(ops.device), key_cache, value_cache, table, ints([40], ops.device))
    assert_same_bits(output, expected)
    keys, values = ops.gather_kv(key_cache, value_cache, table, ints([40], ops.device))
    assert_same_bits(keys, key)
    assert_same_bits(values, value)
    for cache in pool:
        assert (cache[low_blocks] == 7).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_wide_ids(attention_ops, interleaved):
    ops, device = attention_ops, attention_ops.device
    if interleaved:
        base, pool = 65_536, empty_pool((65_568, 2, 16, 8, 128), torch.bfloat16, device).unbind(1)
    else:
        base = 131_072
        pool = [empty_pool((131_104, 16, 8, 128), torch.bfloat16, device) for _ in range(2)]
    low_blocks = [0, 1, 2, 18, 19, 29]
    check_wide_ids(ops, pool, 32, [base + 1, base + 18, 7], low_blocks)
    key_cache, value_cache = pool
    ops.copy_blocks([key_cache, value_cache], ints([[base + 18, base + 29]], device, torch.int64))
    assert_same_bits(key_cache[base + 29], key_cache[base + 18])
    host = [torch.zeros(2, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
    ops.swap_blocks([key_cache, value_cache], host, ints([[base + 18, 1]], "cpu", torch.int64))
    assert_same_bits(host[1][1], value_cache[base + 18])
    for cache in pool:
        assert (cache[low_blocks] == 7).all()


def check_ids_past_16_bits(ops):
    """Block 65,541 is not block 5."""
    pool = [empty_pool((70_000, 16, 1, 64), torch.bfloat16, ops.device) for _ in range(2)]
    check_wide_ids(ops, pool, 4, [65_541, 8, 65_543], [5, 7])


def test_ids_past_16_bits(attention_ops):
    check_ids_past_16_bits(attention_ops)


# A-gqa


def check_group(ops, group):
    """Values of KV head h are h + 1: query head i gives floor(i / group) + 1."""
    batch = flat_batch([20], num_heads=2 * group, num_kv_heads=2)
    batch.value_cache[:] = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    output = batch.to(ops.device).run(ops.paged_attention)
    expected = 1.0 + torch.arange(2 * group) // group
    assert_close(output, expected.view(1, -1))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 32, 71])
def test_group(attention_ops, group):
    check_group(attention_ops, group)


def test_heads_that_do_not_divide_are_refused(attention_ops):
    batch = flat_batch([20], num_heads=13, device=attention_ops.device)
    with pytest.raises(ValueError, match="query"):
        batch.run(attention_ops.paged_attention)


# A-sizes


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [32, 46, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256])
def test_sizes(attention_ops, head_dim, block_size):
    batch = peaky_batch([2 * block_size + 1], head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)
    with or_refused("head_dim", "query", "key_cache") as outcome:
        output = batch.to(attention_ops.device).run(attention_ops.paged_attention)
    assert outcome.refused == (head_dim == 46)
    if not outcome.refused:
        assert_close(output, batch.expected())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("query_lens", [None, [5, 2]])
def test_odd_element_offset(attention_ops, dtype, query_lens):
    """Query and caches that start one element after an aligned address."""
    batch = peaky_batch([40, 17], query_lens, dtype=dtype, head_dim=128).to(attention_ops.device)

    def shifted(tensor):
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    moved = Batch(
        shifted(batch.query),
        shifted(batch.key_cache),
        shifted(batch.value_cache),
        batch.block_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
    )
    with or_refused("align") as outcome:
        output = moved.run(attention_ops.paged_attention)
    if not outcome.refused:
        assert_close(output, batch.to("cpu").expected())


# A-index-dtype


def test_wide_lengths_are_equal_or_refused(attention_ops):
    batch = flat_batch([5, 9, 3], device=attention_ops.device)
    query, key_cache, value_cache, table, lengths = list(vars(batch).values())[:5]
    for wide in ((table.long(), lengths), (table, lengths.long()), (table.long(), lengths.long())):
        with or_refused("block_table", "seq_lens") as outcome:
            output = attention_ops.paged_attention(query, key_cache, value_cache, *wide)
        if not outcome.refused:
            assert_close(output, [3.0, 5.0, 2.0])


# B-empty-splits


@pytest.mark.parametrize("split", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lengths_around_a_split(attention_ops, dtype, split):
    lengths = [1, split - 1, split, split + 1, 2 * split - 1, 2 * split, 2 * split + 1, 4097]
    batch = peaky_batch(lengths, num_heads=4, num_kv_heads=1, head_dim=128, dtype=dtype)
    output, lse = batch.to(attention_ops.device).run(attention_ops.paged_attention, return_lse=True)
    expected, expected_lse = batch.expected(return_lse=True)
    assert_close(output, expected)
    assert_close(lse, expected_lse, tolerance=1e-3)


def check_window_in_the_last_split(ops):
    """4097 tokens, the newest 16 visible: LSE ln 16, output 4089.5."""
    output, lse = flat_batch([4097], device=ops.device).run(ops.paged_attention, window_size=16, return_lse=True)
    assert_close(lse, math.log(16), tolerance=1e-5)
    assert_close(output, 4089.5)


def test_window_in_the_last_split(attention_ops):
    check_window_in_the_last_split(attention_ops)


@pytest.mark.parametrize("together", [False, True])
def test_every_length(attention_ops, together):
    """Lengths 1 to 1200 over one sequence's blocks, all in a batch or one a call: (L + 1) / 2 and ln L."""
    ops, longest = attention_ops, 1200
    batch = flat_batch([longest], num_heads=2, num_kv_heads=1, device=ops.device)
    lengths = torch.arange(1, longest + 1, dtype=torch.int32, device=ops.device)
    rows = longest if together else 1
    query = batch.query.expand(rows, -1, -1).contiguous()
    table = batch.block_table.expand(rows, -1).contiguous()
    results = [
        ops.paged_attention(query, batch.key_cache, batch.value_cache, table, part, return_lse=True)
        for part in lengths.split(rows)
    ]
    assert_close(torch.cat([output for output, _ in results]), (lengths.cpu() + 1) / 2)
    assert_close(torch.cat([lse for _, lse in results]), lengths.cpu().double().log(), tolerance=1e-5)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_same_call_same_bits(attention_ops, dtype):
    batch = peaky_batch([4097, 513, 1, 100], [1, 3, 1, 40], dtype=dtype).to(attention_ops.device)
    first = batch.run(attention_ops.paged_attention)
    for _ in range(10):
        assert_same_bits(batch.run(attention_ops.paged_attention), first)


# B-lse-base


def check_lse_base(ops):
    """8 equal scores: LSE ln 8 = 2.0794; merged with 2 tokens of value 0: 8 / 10."""
    ones, zeros = (flat_batch([length], one_hot=True, device=ops.device) for length in (8, 2))
    ones.value_cache[:], zeros.value_cache[:] = 1, 0
    output_a, lse_a = ones.run(ops.paged_attention, return_lse=True)
    assert_close(lse_a, 2.0794415, tolerance=1e-6)
    output_b, lse_b = zeros.run(ops.paged_attention, return_lse=True)
    output, lse = ops.merge_attn_states(output_a, lse_a, output_b, lse_b)
    assert_close(output, 0.8)
    assert_close(lse, math.log(10), tolerance=1e-6)


def test_lse_base(attention_ops):
    check_lse_base(attention_ops)


def test_table_builder_scatters_blocks():
    table, num_blocks = make_table([40, 17], 16)
    used = table[0, :3].tolist() + table[1, :2].tolist()
    assert num_blocks == 8
    assert used != sorted(used)
