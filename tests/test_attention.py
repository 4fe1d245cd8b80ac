"""paged_attention against the float64 reference, over shapes, lengths, layouts and options."""

from dataclasses import replace

import pytest
import torch

from paged_attn.testing import FLOAT_DTYPES, LAYOUTS, QUANTISED_DTYPES, SCALE_KINDS, assert_close, peaky_batch

LSE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}

HEAD_DIMS = (8, 16, 24, 32, 64, 72, 80, 96, 112, 120, 128, 136, 160, 192, 200, 256)
BLOCK_SIZES = (1, 3, 4, 8, 16, 24, 32, 64, 128, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 71)

# Lengths in the cache, and query tokens of this call.
STEPS = {
    "decode": ([1, 511, 512, 513, 0, 100], None),
    "verify": ([5, 16, 17, 33, 300], [1, 2, 3, 4, 16]),
    "prefill": ([64, 37, 130], [64, 37, 130]),
    "chunk": ([200, 97, 33], [70, 65, 1]),
    "mixed": ([300, 0, 17, 100, 3, 40, 64], [1, 2, 4, 40, 7, 0, 1]),
}


def slopes(num_heads: int) -> torch.Tensor:
    return torch.linspace(-0.05, 0.5, num_heads)


def sinks(num_heads: int) -> torch.Tensor:
    return torch.linspace(-2, 8, num_heads)


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.2},
    "scale_negative": {"scale": -0.2},
    "scale_zero": {"scale": 0.0},
    "window_1": {"window_size": 1},
    "window_16": {"window_size": 16},
    "window_50": {"window_size": 50},
    "window_wide": {"window_size": 100_000},
    "softcap": {"softcap": 2.5},
    "alibi": {"alibi_slopes": slopes},
    "alibi_backwards": {"alibi_slopes": lambda num_heads: torch.linspace(-0.1, 0.02, num_heads)},
    "sinks": {"sinks": sinks},
    "not_causal": {"causal": False},
    "not_causal_alibi": {"causal": False, "alibi_slopes": slopes, "sinks": sinks},
    "window_sinks": {"window_size": 20, "sinks": sinks},
    "all": {"scale": 0.15, "window_size": 70, "softcap": 4.0, "alibi_slopes": slopes, "sinks": sinks},
}


def check_attention(ops, seq_lens, query_lens=None, options=None, **batch_arguments):
    """Output and LSE equal the reference's, whose inputs are the same stored numbers."""
    batch = peaky_batch(seq_lens, query_lens, **batch_arguments)
    num_heads = batch.query.shape[1]
    options = {name: value(num_heads) if callable(value) else value for name, value in (options or {}).items()}
    expected, expected_lse = batch.expected(return_lse=True, **options)

    options = {name: value.to(ops.device) if torch.is_tensor(value) else value for name, value in options.items()}
    output, lse = batch.to(ops.device).run(ops.paged_attention, return_lse=True, **options)
    assert output.dtype == batch.query.dtype
    assert lse.dtype == torch.float32
    assert_close(output, expected)
    assert_close(lse, expected_lse, tolerance=LSE_TOLERANCE[output.dtype])


def check_options(ops, step, option, dtype=torch.float32):
    padding_rows = 0 if step == "decode" else 3
    check_attention(ops, *STEPS[step], OPTIONS[option], dtype=dtype, padding_rows=padding_rows, garbage="num_blocks")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_decode_at_block_edges(attention_ops, dtype, block_size, head_dim):
    lengths = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1]
    layout = LAYOUTS[(head_dim // 8 + block_size) % 3]
    check_attention(attention_ops, lengths, dtype=dtype, block_size=block_size, head_dim=head_dim, layout=layout)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 128])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_mixed_batch_shapes(attention_ops, dtype, block_size, head_dim):
    layout = LAYOUTS[(head_dim // 8 + block_size) % 3]
    check_attention(
        attention_ops,
        [97, 20, 3, 33],
        [33, 4, 5, 1],
        dtype=dtype,
        block_size=block_size,
        head_dim=head_dim,
        layout=layout,
    )


@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_group_sizes(attention_ops, dtype, group, step):
    check_attention(attention_ops, *STEPS[step], dtype=dtype, num_heads=2 * group, num_kv_heads=2)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_options(attention_ops, dtype, step, option):
    check_options(attention_ops, step, option, dtype)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_options_of_wide_heads(attention_ops, head_dim, option):
    check_attention(
        attention_ops,
        *STEPS["mixed"],
        OPTIONS[option],
        dtype=torch.bfloat16,
        head_dim=head_dim,
        num_heads=4,
        num_kv_heads=1,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_layouts(attention_ops, dtype, step, layout):
    check_attention(attention_ops, *STEPS[step], dtype=dtype, layout=layout, head_dim=128, poison=float("inf"))


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
@pytest.mark.parametrize("length", [1500, 4097])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_long_sequences(attention_ops, dtype, length, num_kv_heads):
    lengths = [length, 1, length - 700]
    check_attention(
        attention_ops, lengths, [1, 1, 3], dtype=dtype, num_heads=8 * num_kv_heads, num_kv_heads=num_kv_heads
    )


@pytest.mark.parametrize("query_lens", [None, [1, 40, 3]], ids=["decode", "mixed"])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_small_blocks_of_long_sequences(attention_ops, block_size, head_dim, cache_dtype, query_lens):
    """Many tiles of keys that lie in blocks of their own."""
    check_attention(
        attention_ops,
        [700, 450, 1300],
        query_lens,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        scale_kind=cache_dtype and "token_head",
        block_size=block_size,
        head_dim=head_dim,
        layout=LAYOUTS[block_size % 3],
    )


@pytest.mark.parametrize("option", ["plain", "window_50", "all"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_prefill_of_several_tiles(attention_ops, dtype, head_dim, option):
    check_attention(
        attention_ops,
        [420, 290],
        [290, 290],
        OPTIONS[option],
        dtype=dtype,
        head_dim=head_dim,
        num_heads=4,
        num_kv_heads=1,
    )


def check_large_tiles(ops, option="plain", dtype=torch.bfloat16, head_dim=128, block_size=16, layout="HND"):
    """What the mma path takes its largest tiles for: sequences that fill them, in a call that fills a GPU. Most rows
    come before the first key, which spares time."""
    shape = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size, "layout": layout}
    check_attention(ops, [500, 70], [1500, 300], OPTIONS[option], num_heads=32, num_kv_heads=8, **shape)


@pytest.mark.parametrize("option", ["plain", "not_causal", "window_50", "all"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_tiles(attention_ops, dtype, option):
    check_large_tiles(attention_ops, option, dtype)


@pytest.mark.parametrize("head_dim", [72, 128])
@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 24])
def test_large_tiles_of_any_blocks(attention_ops, block_size, head_dim):
    check_large_tiles(attention_ops, head_dim=head_dim, block_size=block_size, layout=LAYOUTS[block_size % 3])


@pytest.mark.parametrize("option", ["plain", "softcap"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_few_queries_on_a_long_context(attention_ops, head_dim, option):
    """Too few query tiles for a GPU: the long ones are cut by keys. The second sequence has more queries than keys."""
    check_attention(
        attention_ops,
        [3300, 90],
        [40, 100],
        OPTIONS[option],
        dtype=torch.bfloat16,
        head_dim=head_dim,
        num_heads=2,
        num_kv_heads=1,
        garbage="num_blocks",
    )


@pytest.mark.parametrize("options", [{}, {"window_size": 40}], ids=["plain", "window"])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("head_dim", [80, 96, 112, 128, 160])
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16, *QUANTISED_DTYPES], ids=str)
def test_heads_that_share_stages(attention_ops, cache_dtype, head_dim, block_size, options):
    """Sequences enough for decode on Hopper to read several heads of a block together, in lines of 128 bytes in NHD."""
    check_attention(
        attention_ops,
        [0, 1, 15, 16, 17, 700, *range(20, 150, 10), 2],
        options=options,
        dtype=torch.float16 if cache_dtype == torch.float16 else torch.bfloat16,
        cache_dtype=cache_dtype,
        scale_kind="head" if cache_dtype in QUANTISED_DTYPES else None,
        head_dim=head_dim,
        block_size=block_size,
        num_heads=12,
        num_kv_heads=4,
        layout="interleaved" if block_size == 16 else "NHD",
        garbage="num_blocks",
    )


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 24])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_many_sequences(attention_ops, cache_dtype, num_kv_heads, query_len):
    """Sequences enough for decode on Hopper to deal the heads to several columns of CTAs."""
    seq_lens = (1 if cache_dtype is None else 3) * [3, 1000, 17, 64, 129, 2000, 5, 31, 400, 0 if query_len == 1 else 3]
    check_attention(
        attention_ops,
        seq_lens,
        None if query_len == 1 else [query_len] * len(seq_lens),
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        head_dim=128,
        num_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
    )


@pytest.mark.parametrize("query_len", [1, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
@pytest.mark.parametrize("seq_lens", [[5000], [70, 0, 1300]], ids=str)
def test_wide_table(attention_ops, seq_lens, num_kv_heads, query_len):
    """A table for 64k keys, where decode on Hopper takes columns for few sequences too."""
    query_lens = None if query_len == 1 else [min(query_len, length) for length in seq_lens]
    batch = peaky_batch(
        seq_lens, query_lens, dtype=torch.bfloat16, head_dim=128, num_heads=4 * num_kv_heads, num_kv_heads=num_kv_heads
    )
    unused = batch.block_table.new_full((len(seq_lens), 4096 - batch.block_table.shape[1]), -1)
    batch = replace(batch, block_table=torch.cat([batch.block_table, unused], dim=1))
    output = batch.to(attention_ops.device).run(attention_ops.paged_attention)
    assert_close(output, batch.expected())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_scores(attention_ops, dtype, step):
    """Scores in the hundreds: one key takes nearly all of the weight."""
    check_attention(attention_ops, *STEPS[step], dtype=dtype, head_dim=128, spread=150.0)


@pytest.mark.parametrize("scale_kind", [None, *SCALE_KINDS])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_quantised_cache(attention_ops, dtype, cache_dtype, step, scale_kind):
    check_attention(attention_ops, *STEPS[step], dtype=dtype, cache_dtype=cache_dtype, scale_kind=scale_kind)


@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_quantised_shapes(attention_ops, cache_dtype, head_dim, block_size):
    layout = LAYOUTS[(head_dim // 8 + block_size) % 3]
    for scale_kind in ("head", "token_head"):
        check_attention(
            attention_ops,
            [65, 17, 3],
            [2, 9, 1],
            dtype=torch.bfloat16,
            cache_dtype=cache_dtype,
            scale_kind=scale_kind,
            head_dim=head_dim,
            block_size=block_size,
            layout=layout,
        )


# Steps of few query rows, so that each is decode on every backend; NaN in the scales of unused slots.
TOKEN_SCALE_STEPS = {
    "decode": {"seq_lens": [1, 511, 130, 0, 100]},
    "small_blocks": {"seq_lens": [300, 9, 131], "block_size": 8},
    "large_blocks": {"seq_lens": [300, 9, 131], "block_size": 256},
    "many_sequences": {"seq_lens": [40, 17, 300, 1, 0, 5, 128, 129, 16, 700], "num_heads": 8, "num_kv_heads": 4},
    "one_long_sequence": {"seq_lens": [4097], "num_heads": 4, "num_kv_heads": 1},
    "group_16": {"seq_lens": [513, 70, 9], "num_heads": 32},
    "verify": {"seq_lens": [300, 33, 17], "query_lens": [4, 8, 1]},
    "window": {"seq_lens": [513, 70, 9], "query_lens": [2, 1, 3], "options": {"window_size": 50}},
    "all_options": {"seq_lens": [300, 33, 17], "query_lens": [4, 8, 1], "options": OPTIONS["all"]},
    "invariant": {"seq_lens": [1500, 20, 3], "options": {"batch_invariant": True}},
}


@pytest.mark.parametrize("step", TOKEN_SCALE_STEPS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_token_scales(attention_ops, cache_dtype, head_dim, step):
    shape = dict(TOKEN_SCALE_STEPS[step])
    check_attention(
        attention_ops,
        shape.pop("seq_lens"),
        shape.pop("query_lens", None),
        {"max_seqlen_q": 8, **shape.pop("options", {})},
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        scale_kind="token_head",
        head_dim=head_dim,
        layout=LAYOUTS[(head_dim // 32 + len(step) // 2) % 3],
        **shape,
    )


@pytest.mark.parametrize("exponents", [(-20, -20), (12, 12), (-10, 6), (6, -10)])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_value_scales_of_any_size(attention_ops, cache_dtype, exponents):
    """Value scales from 2^a at the first token to 2^b at the last: probabilities times scales must not leave fp16."""
    length = 700
    batch = peaky_batch(
        [length], head_dim=128, dtype=torch.bfloat16, cache_dtype=cache_dtype, scale_kind="token_head", block_size=32
    )
    position = torch.arange(length)
    slots = batch.block_table[0, position // 32].long(), position % 32
    powers = torch.logspace(*exponents, length, base=2.0)
    batch.v_scale[slots] *= powers.view(-1, 1)
    unit = 2.0 ** -max(exponents)
    expected = batch.expected().double() * unit
    output = batch.to(attention_ops.device).run(attention_ops.paged_attention)
    assert_close(output.float() * unit, expected, tolerance=1e-2)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_quantised_options(attention_ops, cache_dtype, option):
    check_attention(
        attention_ops,
        *STEPS["mixed"],
        OPTIONS[option],
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        scale_kind="head",
    )


@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize("scale_kind", ["head", "token_head"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_quantised_prefill_of_several_tiles(attention_ops, cache_dtype, head_dim, scale_kind, option):
    check_attention(
        attention_ops,
        [290, 0, 31],
        [200, 2, 20],
        OPTIONS[option],
        dtype=torch.float16 if head_dim == 64 else torch.bfloat16,
        cache_dtype=cache_dtype,
        scale_kind=scale_kind,
        head_dim=head_dim,
        num_heads=4,
        num_kv_heads=1,
        layout=LAYOUTS[len(option) % 3],
        padding_rows=3,
    )


# A group with which 64 or 128 query tokens are enough to read a copy of their keys and values in 16 bits.
MANY_ROWS = {"num_heads": 64, "num_kv_heads": 2}


@pytest.mark.parametrize("option", ["plain", "scale_negative", "window_16", "softcap", "not_causal_alibi", "all"])
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 200, 256])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_quantised_prefill_of_many_rows(attention_ops, cache_dtype, head_dim, option):
    """Beside chunks of fewer rows, and decode."""
    case = head_dim // 8 + len(option)
    check_attention(
        attention_ops,
        [230, 0, 17, 65, 64, 90],
        [130, 1, 2, 64, 63, 1],
        OPTIONS[option],
        dtype=(torch.float16, torch.bfloat16)[case % 2],
        cache_dtype=cache_dtype,
        scale_kind=(None, "tensor", "head")[case % 3],
        head_dim=head_dim,
        block_size=(8, 16, 24, 128)[case % 4],
        layout=LAYOUTS[case // 2 % 3],
        padding_rows=3,
        garbage="num_blocks",
        **MANY_ROWS,
    )


@pytest.mark.parametrize(("cache_dtype", "num_kv_heads"), list(zip(QUANTISED_DTYPES, [1, 3, 5], strict=True)), ids=str)
def test_quantised_prefill_of_many_rows_among_many_sequences(attention_ops, cache_dtype, num_kv_heads):
    """More sequences than a warp looks at once; one has more query tokens than keys."""
    seq_lens, query_lens = [i % 40 for i in range(70)], [1] * 70
    for i, length in ((5, 90), (40, 30), (69, 200)):
        seq_lens[i], query_lens[i] = length, 70
    check_attention(
        attention_ops,
        seq_lens,
        query_lens,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        scale_kind="head",
        num_heads=32 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        garbage="num_blocks",
    )


@pytest.mark.parametrize("window_size", [2**30 + 1, 2**31 - 1, 2**40])
def test_window_larger_than_any_length(attention_ops, window_size):
    """Beside positions below 0, where a sequence has more query tokens than keys."""
    check_attention(attention_ops, [20, 300], [30, 40], {"window_size": window_size}, dtype=torch.bfloat16)


@pytest.mark.parametrize("missing", ["k_scale", "v_scale"])
@pytest.mark.parametrize("query_len", [1, 100])
def test_scales_of_one_tensor_alone(attention_ops, query_len, missing):
    """Keys with a scale per token and head beside values without one, and the other way about."""
    batch = peaky_batch(
        [300, 170],
        [query_len] * 2,
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
        scale_kind="token_head",
        head_dim=128,
    )
    batch = replace(batch, **{missing: None})
    expected = batch.expected()
    assert_close(batch.to(attention_ops.device).run(attention_ops.paged_attention), expected)


@pytest.mark.parametrize("places", ["values first", "block by block", "strides of their own"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_where_quantised_keys_and_values_lie(attention_ops, head_dim, places):
    batch = peaky_batch(
        [300, 170],
        [100, 40],
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
        scale_kind="head",
        head_dim=head_dim,
    )
    expected = batch.expected()
    batch = batch.to(attention_ops.device)
    key, value = batch.key_cache.view(torch.uint8), batch.value_cache.view(torch.uint8)
    if places == "values first":
        value, key = torch.stack([value, key]).unbind(0)
    elif places == "block by block":
        key, value = torch.stack([key, value], 1).unbind(1)
    else:
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
    batch = replace(batch, key_cache=key.view(torch.float8_e4m3fn), value_cache=value.view(torch.float8_e4m3fn))
    assert_close(batch.run(attention_ops.paged_attention), expected)


@pytest.mark.parametrize("shape", [{}, MANY_ROWS], ids=["group_4", "group_32"])
@pytest.mark.parametrize("query_len", [1, 140])
@pytest.mark.parametrize("scale_kind", ["head", "token_head"])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_unusual_scales(attention_ops, cache_dtype, scale_kind, query_len, shape):
    """Negative, zero, and of ten orders of magnitude."""
    batch = peaky_batch(
        [300, 170],
        [query_len] * 2,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        scale_kind=scale_kind,
        head_dim=128,
        **shape,
    )
    magnitude = 1e5
    if scale_kind == "head":
        factors = torch.tensor([-1.0, 0.0]), torch.tensor([magnitude, -magnitude])
    else:
        generator = torch.Generator().manual_seed(0)
        factors = [torch.randn(batch.k_scale.shape, generator=generator) for _ in range(2)]
        factors[1] = magnitude * 10 ** (-5 * factors[1].abs())
    batch = replace(batch, k_scale=batch.k_scale * factors[0], v_scale=batch.v_scale * factors[1])
    expected = batch.expected()
    output = batch.to(attention_ops.device).run(attention_ops.paged_attention)
    assert_close(output / magnitude, expected / magnitude)


@pytest.mark.parametrize("query_len", [1, 100])
@pytest.mark.parametrize("head_dim", [96, 128, 192])
@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_unusual_queries_on_quantised_caches(attention_ops, dtype, cache_dtype, head_dim, query_len):
    """Rows of zeros, of numbers far below 1, with one large element, and with NaN, which stays in its row."""
    batch = peaky_batch(
        [300, 170], [query_len] * 2, dtype=dtype, cache_dtype=cache_dtype, scale_kind="head", head_dim=head_dim
    )
    batch.query[:, 0] = 0
    batch.query[:, 1] *= 1e-6
    batch.query[:, 2, head_dim // 2] *= 50
    batch.query[:, 5, 7] = torch.nan
    expected = batch.expected()
    assert expected.isnan().any(-1).nonzero()[:, 1].unique().tolist() == [5]
    assert_close(batch.to(attention_ops.device).run(attention_ops.paged_attention), expected)
