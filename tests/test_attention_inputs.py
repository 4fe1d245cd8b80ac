"""What paged_attention takes and leaves: strides, outputs, hints; the same bits; nothing else changed."""

import math

import pytest
import torch

from paged_attn.testing import (
    FLOAT_DTYPES,
    GARBAGE_IDS,
    QUANTISED_DTYPES,
    Batch,
    assert_close,
    assert_same_bits,
    bits,
    peaky_batch,
)

STEPS = {"decode": ([300, 17, 1], None), "mixed": ([300, 17, 40, 5], [1, 5, 40, 2])}
WRONG_BLOCK_STEPS = {
    "decode": ([300, 700, 90], None),
    "verification": ([300, 700, 90], [4, 8, 2]),
    "prefill": ([300, 700, 90], [100, 130, 40]),
    "mixed": ([300, 700, 90], [1, 260, 5]),
    "long_chunks": ([1100, 1200, 90], [1030, 1050, 1]),
}


def replaced(batch, **tensors):
    return Batch(**(vars(batch) | tensors))


def check_fused_query(ops, step="mixed", dtype=torch.float32):
    """The query is a slice of a fused projection."""
    batch = peaky_batch(*STEPS[step], dtype=dtype)
    tokens, heads, head_dim = batch.query.shape
    fused = torch.full((tokens, heads + 4, head_dim), math.nan, dtype=dtype, device=ops.device)
    fused[:, :heads] = batch.query
    moved = replaced(batch.to(ops.device), query=fused[:, :heads])
    assert_close(moved.run(ops.paged_attention), batch.expected())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_fused_query(attention_ops, dtype, step):
    check_fused_query(attention_ops, step, dtype)


@pytest.mark.parametrize("step", STEPS)
def test_query_stored_heads_first(attention_ops, step):
    batch = peaky_batch(*STEPS[step]).to(attention_ops.device)
    heads_first = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    expected = batch.run(attention_ops.paged_attention)
    assert_same_bits(replaced(batch, query=heads_first).run(attention_ops.paged_attention), expected)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_out_with_strides(attention_ops, dtype, step):
    """``out`` is every second head of a wider tensor; it is what the call returns; its neighbours are untouched."""
    padding_rows = 2 if step == "mixed" else 0
    batch = peaky_batch(*STEPS[step], dtype=dtype, padding_rows=padding_rows).to(attention_ops.device)
    expected = batch.run(attention_ops.paged_attention)
    wide = torch.full((batch.query.shape[0], 16, 64), 7.0, dtype=dtype, device=attention_ops.device)
    out = wide[:, ::2]
    returned = batch.run(attention_ops.paged_attention, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert_same_bits(out, expected)
    assert (wide[:, 1::2] == 7).all()


def test_out_beside_lse(attention_ops):
    batch = peaky_batch([100, 3], [2, 3]).to(attention_ops.device)
    out = torch.empty_like(batch.query)
    output, lse = batch.run(attention_ops.paged_attention, out=out, return_lse=True)
    assert output.data_ptr() == out.data_ptr()
    plain, plain_lse = batch.run(attention_ops.paged_attention, return_lse=True)
    assert_same_bits(out, plain)
    assert_same_bits(lse, plain_lse)


@pytest.mark.parametrize("cache_dtype", [None, *QUANTISED_DTYPES], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_inputs_are_unchanged(attention_ops, step, cache_dtype):
    batch = peaky_batch(*STEPS[step], dtype=torch.bfloat16, cache_dtype=cache_dtype).to(attention_ops.device)
    before = {name: bits(tensor) for name, tensor in vars(batch).items() if tensor is not None}
    batch.run(attention_ops.paged_attention)
    for name, expected in before.items():
        assert torch.equal(bits(getattr(batch, name)), expected), name


@pytest.mark.parametrize("hint", [None, 40, 64, 4096, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_upper_bound_on_query_lengths(attention_ops, dtype, hint):
    batch = peaky_batch(*STEPS["mixed"], dtype=dtype)
    output = batch.to(attention_ops.device).run(attention_ops.paged_attention, max_seqlen_q=hint)
    assert_close(output, batch.expected())


@pytest.mark.parametrize("hint", [None, 1, 16, 1000, 2**31 - 1, 2**40])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 128), (torch.bfloat16, 256)])
def test_one_query_each_named_by_prefix_sums(attention_ops, dtype, head_dim, hint):
    """cu_seqlens_q = 0, 1, 2, 3 is the call without it, however much larger than the call the bound is."""
    batch = peaky_batch([300, 17, 1], dtype=dtype, head_dim=head_dim).to(attention_ops.device)
    starts = torch.arange(4, dtype=torch.int32, device=attention_ops.device)
    output = replaced(batch, cu_seqlens_q=starts).run(attention_ops.paged_attention, max_seqlen_q=hint)
    assert_close(output, batch.run(attention_ops.paged_attention).cpu())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_batch_invariant(attention_ops, dtype, step):
    """A row's bits do not depend on its neighbours, the table's width or padding rows."""
    lengths = [2000, 17, 40, 513, 0, 700, 1, 64]
    query_lens = None if step == "decode" else [1, 5, 40, 3, 1, 1, 1, 2]
    batch = peaky_batch(lengths, query_lens, dtype=dtype, head_dim=128).to(attention_ops.device)
    together, lse = batch.run(attention_ops.paged_attention, batch_invariant=True, return_lse=True)
    first = 0
    for sequence, length in enumerate(lengths):
        count = 1 if query_lens is None else query_lens[sequence]
        rows = slice(first, first + count)
        first += count
        columns = max(1, -(-length // 16))
        table = batch.block_table[sequence : sequence + 1]
        wide = torch.cat([table] + [torch.full_like(table, -1)] * 4, dim=1)
        padded = torch.cat([batch.query[rows], torch.full_like(batch.query[:3], math.nan)])
        starts = torch.tensor([0, count], dtype=torch.int32, device=attention_ops.device)
        for query, columns_given in ((batch.query[rows], table[:, :columns]), (padded, wide)):
            alone = Batch(
                query,
                batch.key_cache,
                batch.value_cache,
                columns_given,
                batch.seq_lens[sequence : sequence + 1],
                None if query_lens is None and len(query) == 1 else starts,
            )
            output, alone_lse = alone.run(attention_ops.paged_attention, batch_invariant=True, return_lse=True)
            assert_same_bits(output[:count], together[rows])
            assert_same_bits(alone_lse[:count], lse[rows])


@pytest.mark.parametrize("step", STEPS)
def test_metadata_ready_changes_nothing(attention_ops, step):
    batch = peaky_batch(*STEPS[step], dtype=torch.bfloat16).to(attention_ops.device)
    expected = batch.run(attention_ops.paged_attention)
    assert_same_bits(batch.run(attention_ops.paged_attention, metadata_ready=True), expected)


def test_sequences_that_share_blocks(attention_ops):
    """Two sequences over one row of the table, whose row stride is then 0; the second is shorter."""
    device = attention_ops.device
    batch = peaky_batch([40, 40])
    lengths = torch.tensor([40, 23], dtype=torch.int32)
    expected = replaced(batch, block_table=batch.block_table[:1].expand(2, -1), seq_lens=lengths).expected()
    moved = batch.to(device)
    shared = replaced(moved, block_table=moved.block_table[:1].expand(2, -1), seq_lens=lengths.to(device))
    assert_close(shared.run(attention_ops.paged_attention), expected)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_nan_of_one_sequence_stays_there(attention_ops, dtype, step):
    """NaN in a token of the first sequence reaches its rows and KV head, no others."""
    batch = peaky_batch(*STEPS[step], dtype=dtype)
    clean = batch.to(attention_ops.device).run(attention_ops.paged_attention)
    batch.value_cache[int(batch.block_table[0, 0]), 3, 1] = math.nan
    output = batch.to(attention_ops.device).run(attention_ops.paged_attention)
    assert output[0, 4:].isnan().all()
    assert_same_bits(output[0, :4], clean[0, :4])
    assert_same_bits(output[1:], clean[1:])


def test_no_gradient_is_promised(attention_ops):
    """Inputs that require gradients are read like others under ``torch.no_grad`` and ``inference_mode``."""
    batch = peaky_batch([20, 5]).to(attention_ops.device)
    expected = batch.run(attention_ops.paged_attention)
    batch.query.requires_grad_()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same_bits(batch.run(attention_ops.paged_attention), expected)


@pytest.mark.parametrize("query_lens", [None, [1, 20]], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cache_without_blocks(attention_ops, dtype, query_lens):
    """Sequences without a token need no block either."""
    batch = peaky_batch([0, 0], query_lens, dtype=dtype, head_dim=64).to(attention_ops.device)
    batch = replaced(batch, key_cache=batch.key_cache[:0], value_cache=batch.value_cache[:0])
    assert_close(batch.run(attention_ops.paged_attention), torch.zeros_like(batch.query), tolerance=0)


@pytest.mark.parametrize("num_seqs", [0, 1, 2])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_table_without_columns(attention_ops, cache_dtype, num_seqs):
    """Many rows, all of sequences without a token or of none."""
    batch = peaky_batch([0, 0], [700, 2], dtype=torch.bfloat16, cache_dtype=cache_dtype, padding_rows=600)
    table, starts = batch.block_table[:num_seqs, :0], batch.cu_seqlens_q[: num_seqs + 1]
    batch = replaced(batch, block_table=table, seq_lens=batch.seq_lens[:num_seqs], cu_seqlens_q=starts)
    output = batch.to(attention_ops.device).run(attention_ops.paged_attention)
    assert_close(output, torch.zeros_like(batch.query), tolerance=0)


@pytest.mark.parametrize("wrong", [*GARBAGE_IDS, -(2**31)])
@pytest.mark.parametrize("step", WRONG_BLOCK_STEPS)
@pytest.mark.parametrize("scale_kind", [None, "head", "token_head"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_wrong_blocks(attention_ops, layout, scale_kind, step, wrong):
    """Ids of no block where the second sequence sees keys: refused on the CPU; on CUDA they harm no other sequence."""
    seq_lens, query_lens = WRONG_BLOCK_STEPS[step]
    batch = peaky_batch(
        seq_lens,
        query_lens,
        head_dim=128,
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn if scale_kind else None,
        scale_kind=scale_kind,
        layout=layout,
    )
    table = batch.block_table.clone()
    table[1, torch.tensor([0, 2, 3, 11])] = len(batch.key_cache) if wrong == "num_blocks" else wrong
    damaged = replaced(batch, block_table=table).to(attention_ops.device)
    if attention_ops.device == "cpu":
        with pytest.raises(ValueError, match=r"block_table\[1, 0\]"):
            damaged.run(attention_ops.paged_attention)
        return
    output, expected = damaged.run(attention_ops.paged_attention).cpu(), batch.expected()
    lens = query_lens or [1, 1, 1]
    for rows, right in list(zip(output.split(lens), expected.split(lens), strict=True))[::2]:
        assert_close(rows, right)
