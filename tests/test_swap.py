"""swap_blocks: between pools, every pair checked before anything moves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paged_attn
from paged_attn import reference
from paged_attn.testing import LAYOUTS, assert_same_bits, make_cache, to_device

from .test_cases_cache import assert_moved, copies, layers, pair_tensor, random_bits

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8)


def host_layers(layout, dtype, pinned, num_blocks=8, stacked=False):
    caches = layers(layout, dtype, "cpu", num_blocks, stacked)
    if not pinned:
        return caches
    return caches.pin_memory() if stacked else [cache.pin_memory() for cache in caches]


@pytest.mark.parametrize("layouts", [("NHD", "NHD"), ("HND", "HND"), ("NHD", "HND"), ("interleaved", "NHD")])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_and_back(ops, dtype, pinned, layouts):
    """Blocks go to the host in one order and come back in another, whatever the two storage layouts."""
    if pinned and ops.device == "cpu":
        pytest.skip("pinned memory needs a CUDA device")
    caches = layers(layouts[0], dtype, ops.device)
    host = host_layers(layouts[1], dtype, pinned)
    before, host_before = copies(caches), copies(host)
    out_pairs, back_pairs = [(7, 0), (1, 5), (1, 2), (4, 3)], [(5, 6), (0, 0), (3, 1)]
    ops.swap_blocks(caches, host, pair_tensor(out_pairs, "cpu"))
    if ops.device == "cuda":
        torch.cuda.synchronize()
    assert_moved(host, host_before, before, out_pairs)
    after_out = copies(host)
    ops.swap_blocks(host, caches, pair_tensor(back_pairs, "cpu"))
    assert_moved(caches, before, after_out, back_pairs)


@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 8), (3, 24), (128, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_shapes(ops, layout, block_size, head_dim):
    caches = make_cache(6, block_size, 3, head_dim, dtype=torch.bfloat16, layout=layout)
    caches = [to_device(random_bits(cache, seed), ops.device) for seed, cache in enumerate(caches)]
    host = make_cache(4, block_size, 3, head_dim, dtype=torch.bfloat16, layout=layout)
    host_before, pairs = copies(host), [(5, 0), (0, 3)]
    ops.swap_blocks(caches, host, pair_tensor(pairs, "cpu"))
    if ops.device == "cuda":
        torch.cuda.synchronize()
    assert_moved(host, host_before, caches, pairs)


@pytest.mark.parametrize("pairs", [[(8, 0)], [(0, 4)], [(-1, 0)], [(0, -1)], [(0, 1), (2, 1)], [(0, 1), (2, 2**40)]])
@pytest.mark.parametrize("stacked", [False, True])
def test_bad_pairs_move_nothing(ops, stacked, pairs):
    caches = layers("NHD", torch.float32, ops.device, stacked=stacked)
    host = layers("NHD", torch.float32, "cpu", num_blocks=4, stacked=stacked)
    host_before = copies(host)
    with pytest.raises(ValueError, match="block_mapping"):
        ops.swap_blocks(caches, host, pair_tensor(pairs, "cpu"))
    assert_moved(host, host_before, host_before, [])


def test_no_pairs(ops):
    caches, host = layers("NHD", torch.float32, ops.device), layers("NHD", torch.float32, "cpu")
    before = copies(host)
    ops.swap_blocks(caches, host, pair_tensor([], "cpu"))
    assert_moved(host, before, before, [])


@pytest.mark.parametrize("pairs", [[(i, i + 1) for i in range(20)], [(i, (i + 9) % 24) for i in range(24)]], ids=len)
def test_inside_one_pool(ops, pairs):
    """Chains and cycles, as in copy_blocks."""
    caches = layers("HND", torch.bfloat16, ops.device, num_blocks=24)
    before = copies(caches)
    ops.swap_blocks(caches, caches, pair_tensor(pairs, "cpu"))
    assert_moved(caches, before, before, pairs)


OVERLAPS = {
    "other_order": lambda k, v: ([k, v], [v, k]),
    "one_of_two": lambda k, v: ([k, v], [torch.zeros_like(k), k]),
    "later_blocks": lambda k, v: ([k[:20]], [k[4:]]),
    "earlier_blocks": lambda k, v: ([k[4:]], [k[:20]]),
    "other_slots": lambda k, v: ([k[:, :3]], [k[:, 1:]]),
    "transposed": lambda k, v: ([k[:, :2]], [k[:, :2].transpose(1, 2)]),
}


@pytest.mark.parametrize("pairs", [[(i, i) for i in range(20)], [(2, 3), (3, 5)]], ids=len)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_overlapping_caches(ops, overlap, pairs):
    """Views of one storage in another order, from another block or slot on: all are read before any is written."""
    generator = torch.Generator().manual_seed(3)
    before = torch.randn(2, 24, 4, 2, 8, generator=generator)
    expected, actual = before.clone(), before.clone().to(ops.device)
    reference.swap_blocks(*OVERLAPS[overlap](*expected), pair_tensor(pairs, "cpu"))
    ops.swap_blocks(*OVERLAPS[overlap](*actual), pair_tensor(pairs, "cpu"))
    assert_same_bits(actual.cpu(), expected)
    assert not torch.equal(expected, before)


def test_interleaved_pools_need_no_more_memory(cuda):
    """Where ranges of memory meet and elements do not, blocks are copied where they are."""
    pool = torch.zeros(64, 2, 2, 16, 4, 64, device=cuda)
    parts = [pool[:, layer, kind] for kind in range(2) for layer in range(2)]
    mapping = pair_tensor([(i, i + 1) for i in range(60)], "cpu")
    paged_attn.swap_blocks(parts[:2], parts[2:], mapping)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    paged_attn.swap_blocks(parts[:2], parts[2:], mapping)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < pool[:, 0, 0].nbytes / 4


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_two_views_of_one_storage(data):
    """Slices, steps and orders of dimensions at random: as if all were read before any is written."""
    before = torch.arange(8 * 6 * 6 * 6, dtype=torch.int32).view(8, 6, 6, 6)
    order = data.draw(st.permutations(range(4)))
    slices = [
        [slice(data.draw(st.integers(0, 2)), None, data.draw(st.integers(1, 2))) for _ in range(4)] for _ in range(2)
    ]

    def views(tensor):
        both = [tensor.permute(order)[tuple(part)] for part in slices]
        shape = [min(sizes) for sizes in zip(*(view.shape for view in both), strict=True)]
        return [[view[tuple(slice(size) for size in shape)]] for view in both]

    source, _ = views(before)
    blocks = st.permutations(range(source[0].shape[0]))
    pairs = pair_tensor(list(zip(data.draw(blocks), data.draw(blocks), strict=True)), "cpu")
    expected, actual = before.clone(), before.clone()
    reference.swap_blocks(*views(expected), pairs)
    paged_attn.swap_blocks(*views(actual), pairs)
    assert torch.equal(actual, expected)


def test_keys_and_values_interleaved_in_one_storage(ops):
    """Ranges of memory that overlap where elements do not: nothing is wrong with that."""
    pool = torch.randn(6, 2, 4, 2, 8).to(ops.device)
    before = pool.clone()
    ops.swap_blocks([pool[:, 0]], [pool[:, 1]], pair_tensor([(0, 1), (1, 2)], "cpu"))
    before[1:3, 1] = before[0:2, 0]
    assert_same_bits(pool, before)


def test_a_destination_twice(ops):
    caches = [torch.ones(3, 4, device=ops.device), torch.full((3, 4), 2.0, device=ops.device)]
    target = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="dst"):
        ops.swap_blocks(caches, [target, target], pair_tensor([(0, 1)], "cpu"))
    assert target.count_nonzero() == 0


def test_empty_blocks(ops):
    """Blocks without elements beside others."""
    caches = [torch.zeros(3, 2, 0, 4, device=ops.device), torch.arange(6.0, device=ops.device).view(3, 2)]
    host = [torch.zeros(3, 2, 0, 4), torch.zeros(3, 2)]
    ops.swap_blocks(caches, host, pair_tensor([(2, 0)], "cpu"))
    if ops.device == "cuda":
        torch.cuda.synchronize()
    assert host[1].tolist() == [[4, 5], [0, 0], [0, 0]]


def check_many_blocks(ops, count=200):
    """Blocks in a random order, to pinned memory where there is a device, and back."""
    caches = [random_bits(make_cache(count, 4, 2, 32, dtype=torch.float16)[0], seed) for seed in range(2)]
    cache, host = caches[0].to(ops.device), caches[1]
    if ops.device == "cuda":
        host = host.pin_memory()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5))
    mapping = torch.stack([order, torch.arange(count)], dim=1)
    ops.swap_blocks([cache], [host], mapping)
    if ops.device == "cuda":
        torch.cuda.synchronize()
    assert_same_bits(host, caches[0][order])
    cache.zero_()
    ops.swap_blocks([host], [cache], mapping.flip(1))
    assert_same_bits(cache, caches[0])


@pytest.mark.parametrize("count", [200, 5000])
def test_many_blocks(ops, count):
    check_many_blocks(ops, count)
