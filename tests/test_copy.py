"""copy_blocks: all pairs at once, whole blocks, bit for bit."""

import pytest
import torch

import paged_attn
from paged_attn.testing import LAYOUTS, assert_same_bits, make_cache, to_device

from .test_cases_cache import assert_moved, check_copy_extent, copies, layers, pair_tensor, random_bits

MAPPINGS = {
    "chain": ((0, 1), (1, 2), (2, 3)),
    "chain_backwards": ((2, 3), (1, 2), (0, 1)),
    "swap": ((4, 6), (6, 4)),
    "cycle": ((0, 3), (3, 7), (7, 0)),
    "one_to_many": ((5, 0), (5, 1), (5, 7)),
    "onto_itself": ((3, 3), (1, 2)),
    "none": (),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_all_pairs_at_once(ops, mapping, stacked):
    check_copy_extent(ops, torch.bfloat16, "HND", stacked, MAPPINGS[mapping])


@pytest.mark.parametrize("mapping", ["chain", "swap"])
def test_mapping_on_the_host(ops, mapping):
    caches = layers("NHD", torch.float16, ops.device)
    before = copies(caches)
    ops.copy_blocks(caches, pair_tensor(MAPPINGS[mapping], "cpu"))
    assert_moved(caches, before, before, MAPPINGS[mapping])


@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 8), (3, 24), (5, 46), (256, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_block_shapes(ops, dtype, layout, block_size, head_dim):
    caches = make_cache(6, block_size, 3, head_dim, dtype=dtype, layout=layout)
    caches = [to_device(random_bits(cache, seed), ops.device) for seed, cache in enumerate(caches)]
    before = copies(caches)
    pairs = [(0, 5), (5, 2), (3, 1)]
    ops.copy_blocks(caches, pair_tensor(pairs, ops.device))
    assert_moved(caches, before, before, pairs)


def test_a_cache_twice_in_the_list(ops):
    """Layers that share a cache: its blocks change places once."""
    cache, other = (torch.arange(6.0, device=ops.device).view(3, 2) + i for i in (0, 100))
    ops.copy_blocks([cache, other, cache], pair_tensor([(0, 1), (1, 0)], ops.device))
    assert cache.tolist() == [[2, 3], [0, 1], [4, 5]]
    assert other.tolist() == [[102, 103], [100, 101], [104, 105]]


@pytest.mark.parametrize("shape", [(3, 0), (3, 2, 0, 4), (3, 2, 2, 0)])
def test_empty_blocks(ops, shape):
    """Blocks without elements beside others."""
    cache = torch.arange(6.0, device=ops.device).view(3, 2)
    ops.copy_blocks([torch.zeros(shape, device=ops.device), cache], pair_tensor([(0, 1)], ops.device))
    assert cache.tolist() == [[0, 1], [0, 1], [4, 5]]


def check_random_permutation(ops):
    """A permutation of all 300 blocks."""
    caches = make_cache(300, 4, 2, 32, dtype=torch.bfloat16)
    caches = [random_bits(cache, seed).to(ops.device) for seed, cache in enumerate(caches)]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(5))
    expected = [cache[order.to(ops.device)] for cache in caches]
    ops.copy_blocks(caches, torch.stack([order, torch.arange(300)], dim=1).to(ops.device))
    for cache, right in zip(caches, expected, strict=True):
        assert_same_bits(cache, right)


def test_random_permutation(ops):
    check_random_permutation(ops)


def test_more_pairs_than_one_launch_may_hold(ops):
    """On the host, from the first half of the pool to the second."""
    before = random_bits(make_cache(8000, 2, 1, 8, dtype=torch.float16)[0])
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(6))
    cache = before.to(ops.device)
    ops.copy_blocks([cache], torch.stack([order, torch.arange(4000, 8000)], dim=1))
    assert_same_bits(cache, torch.cat([before[:4000], before[:4000][order]]).to(ops.device))


@pytest.mark.parametrize(
    "pairs", [[(0, 8)], [(8, 0)], [(-1, 0)], [(0, -1)], [(0, 1), (2, 1)], [(0, 1), (2, 3), (4, 2**40)]]
)
@pytest.mark.parametrize("stacked", [False, True])
def test_bad_pairs_change_nothing(ops, stacked, pairs):
    caches = layers("NHD", torch.float32, ops.device, stacked=stacked)
    before = copies(caches)
    with pytest.raises(ValueError, match="block_mapping"):
        ops.copy_blocks(caches, pair_tensor(pairs, "cpu"))
    assert_moved(caches, before, before, [])


def test_more_layers_than_one_launch_may_hold(ops):
    """129 layers in one list."""
    caches = [cache for _ in range(129) for cache in make_cache(3, 2, 1, 8, dtype=torch.float32)]
    caches = [random_bits(cache, seed).to(ops.device) for seed, cache in enumerate(caches)]
    before = copies(caches)
    ops.copy_blocks(caches, pair_tensor([(0, 2), (2, 1)], ops.device))
    assert_moved(caches, before, before, [(0, 2), (2, 1)])


def test_launches_do_not_grow_with_layers(cuda):
    """1 and 64 layers: as many kernels."""

    def kernels(num_layers):
        caches = [torch.zeros(4, 16, 2, 64, device=cuda) for _ in range(num_layers)]
        mapping = torch.tensor([[0, 1]], device=cuda)
        paged_attn.copy_blocks(caches, mapping)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            paged_attn.copy_blocks(caches, mapping)
            torch.cuda.synchronize()
        return sum(
            event.device_type == torch.autograd.DeviceType.CUDA and "kernel" in event.name for event in profile.events()
        )

    assert 0 < kernels(1) == kernels(64)
