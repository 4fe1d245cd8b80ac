"""What holds on the CPU alone: contents of index tensors are checked, and a row's bits never depend on the batch."""

import pytest
import torch

import paged_attn
from paged_attn.testing import QUANTISED_DTYPES, peaky_batch


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def caches():
    """Six blocks of four slots, one head."""
    return torch.randn(6, 4, 1, 8), torch.randn(6, 4, 1, 8)


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def attend(caches, table, seq_lens, **options):
    return paged_attn.paged_attention(
        torch.randn(2, 1, 8), *caches, torch.tensor(table, dtype=torch.int32), ints(*seq_lens), **options
    )


@pytest.mark.parametrize("block", [-1, 6, 2**31 - 1])
def test_refuses_a_block_outside_the_cache(caches, block):
    with pytest.raises(ValueError, match=rf"block_table\[0, 1\]: got block {block}, .* 0 \.\. 5"):
        attend(caches, [[0, block], [1, 2]], (5, 5))
    with pytest.raises(ValueError, match=rf"block_table\[1, 0\]: got block {block}, .* 0 \.\. 5"):
        paged_attn.gather_kv(*caches, torch.tensor([[0, 1], [block, 2]], dtype=torch.int32), ints(8, 1))


def test_ignores_entries_that_are_not_read(caches):
    assert attend(caches, [[0, 6], [-1, 2]], (4, 5), window_size=1).isfinite().all()


@pytest.mark.parametrize("length", [-1, 9])
def test_refuses_a_length_that_the_table_does_not_hold(caches, length):
    with pytest.raises(ValueError, match=rf"seq_lens\[1\]: expected 0 \.\. 8 .*, got {length}"):
        attend(caches, [[0, 1], [2, 3]], (4, length))


@pytest.mark.parametrize(("starts", "name"), [((1, 1, 2), "0"), ((0, 2, 1), "2"), ((0, 1, 3), "2")])
def test_refuses_query_starts_out_of_order(caches, starts, name):
    with pytest.raises(ValueError, match=rf"cu_seqlens_q\[{name}\]: expected"):
        attend(caches, [[0, 1], [2, 3]], (4, 4), cu_seqlens_q=ints(*starts))


@pytest.mark.parametrize(
    ("starts", "lengths", "name"), [((0, 0, 1), (4, 4), "cu_seqlens_q"), ((0, 0, 0), (9, 4), "seq_lens")]
)
def test_nothing_to_compute_is_checked_all_the_same(caches, starts, lengths, name):
    table, query = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(0, 1, 8)
    with pytest.raises(ValueError, match=name):
        paged_attn.paged_attention(query, *caches, table, ints(*lengths), cu_seqlens_q=ints(*starts))
    with pytest.raises(ValueError, match="backend"):
        paged_attn.paged_attention(query, *caches, table[:0], ints(), backend="mma")
    with pytest.raises(ValueError, match="seq_lens: the lengths sum to 5"):
        paged_attn.gather_kv(*caches, table, ints(4, 1), total_tokens=0)


def test_a_slot_past_the_end_changes_nothing(caches):
    before = [cache.clone() for cache in caches]
    rows = torch.randn(2, 1, 8)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\]: got slot 24, .* 0 \.\. 23"):
        paged_attn.write_kv(rows, rows, *caches, torch.tensor([3, 24]))
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


@pytest.mark.parametrize("options", [{}, {"window_size": 100}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (100, 40)])
def test_a_row_has_the_same_bits_alone(restore_threads, options, group, head_dim):
    """Rows of long and short chunks, against decode of each with its own length, table width and thread count."""
    batch = peaky_batch([1500, 37, 0, 513], [9, 5, 2, 130], num_heads=2 * group, head_dim=head_dim)
    output, lse = batch.run(paged_attn.paged_attention, return_lse=True, **options)
    for sequence, (start, end) in enumerate(zip(batch.cu_seqlens_q[:-1].tolist(), batch.cu_seqlens_q[1:].tolist())):
        for token in range(start, end, 1 if end - start < 10 else 17):
            length = int(batch.seq_lens[sequence]) - (end - 1 - token)
            if length <= 0:
                continue
            torch.set_num_threads(1 + token % 2)
            table = batch.block_table[sequence : sequence + 1, : -(-length // batch.key_cache.shape[1])]
            alone, alone_lse = paged_attn.paged_attention(
                batch.query[token : token + 1],
                batch.key_cache,
                batch.value_cache,
                table,
                ints(length),
                return_lse=True,
                **options,
            )
            assert torch.equal(alone[0], output[token])
            assert torch.equal(alone_lse[0], lse[token])


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
def test_every_code_reads_back_as_torch_reads_it(dtype):
    cache = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).reshape(4, 1, 1, 64)
    table = torch.arange(4, dtype=torch.int32)[None]
    key, value = paged_attn.gather_kv(cache, cache, table, ints(4), out_dtype=torch.float32)
    for rows in (key, value):
        torch.testing.assert_close(rows.flatten(), cache.flatten().float(), rtol=0, atol=0, equal_nan=True)
