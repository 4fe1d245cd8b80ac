"""paged_attention on random combinations of shape, dtype, layout, step and options; the seed names the combination."""

import random

import pytest
import torch

import paged_attn
from paged_attn.testing import (
    FLOAT_DTYPES,
    GARBAGE_IDS,
    LAYOUTS,
    QUANTISED_DTYPES,
    SCALE_KINDS,
    assert_close,
    assert_same_bits,
    peaky_batch,
)

from .test_attention import check_attention, sinks, slopes


def random_step(rng, num_seqs):
    """Lengths and query lengths: decode, or anything up to more queries than keys."""
    lengths = [rng.choice([0, 1, 15, 16, 17, 63, 64, 65, rng.randrange(400)]) for _ in range(num_seqs)]
    if rng.random() < 0.3:
        return lengths, None
    return lengths, [rng.choice([0, 1, 1, 2, 5, 16, rng.randrange(80)]) for _ in lengths]


def random_options(rng):
    options = {}
    if rng.random() < 0.2:
        options["causal"] = False
    elif rng.random() < 0.4:
        options["window_size"] = rng.choice([1, 16, 33, rng.randrange(1, 300)])
    if rng.random() < 0.3:
        options["softcap"] = rng.choice([0.5, 5.0, 30.0])
    if rng.random() < 0.3:
        options["alibi_slopes"] = slopes
    if rng.random() < 0.3:
        options["sinks"] = sinks
    if rng.random() < 0.3:
        options["scale"] = rng.choice([0.01, 0.07, 0.15])
    if rng.random() < 0.3:
        options["batch_invariant"] = True
    return options


@pytest.mark.parametrize("seed", range(200))
def test_random_combination(attention_ops, seed):
    rng = random.Random(seed)
    lengths, query_lens = random_step(rng, rng.choice([1, 2, 5, 9]))
    num_kv_heads = rng.choice([1, 2, 3, 4])
    quantised = rng.random() < 0.3
    dtype = rng.choice(FLOAT_DTYPES)
    if query_lens is not None and sum(query_lens) == 0:
        query_lens[0] = 1
    check_attention(
        attention_ops,
        lengths,
        query_lens,
        random_options(rng),
        dtype=dtype,
        cache_dtype=rng.choice(QUANTISED_DTYPES) if quantised else dtype,
        scale_kind=rng.choice([None, *SCALE_KINDS]) if quantised else None,
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 4, 5, 7, 8, 16]),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice([64, 128, 8 * rng.randrange(1, 33)]),
        block_size=rng.choice([16, 32, 2 ** rng.randrange(9), rng.randrange(1, 100)]),
        layout=rng.choice(LAYOUTS),
        garbage=rng.choice(GARBAGE_IDS),
        padding_rows=0 if query_lens is None else rng.choice([0, 0, 1, 40]),
        seed=seed,
    )


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_number_of_threads(num_threads):
    """The CPU kernels are right on any number of threads, and batch-invariant rows have the same bits on all."""
    batch = peaky_batch([2000, 17, 300], [1, 5, 70], head_dim=128)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = batch.run(paged_attn.paged_attention, batch_invariant=True)
        torch.set_num_threads(num_threads)
        assert_close(batch.run(paged_attn.paged_attention), batch.expected())
        assert_same_bits(batch.run(paged_attn.paged_attention, batch_invariant=True), alone)
    finally:
        torch.set_num_threads(before)
