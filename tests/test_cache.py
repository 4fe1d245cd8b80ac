"""PagedKVCache: what each call does, and the faults other caches had (group F of the case list)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import paged_attn
from paged_attn import Admission, CacheCorrupted, OutOfBlocks, PagedKVCache


def make(num_blocks: int = 16, *, device: str = "cpu", block_size: int = 4, **options) -> PagedKVCache:
    options = {"watermark": 0.0, "dtype": torch.float32, **options}
    return PagedKVCache(2, num_blocks, 2, 8, block_size=block_size, device=device, **options)


def write(cache: PagedKVCache, batch, values: list[float]) -> None:
    rows = torch.tensor(values, dtype=cache.dtype, device=cache.device)[:, None, None].expand(-1, 2, 8)
    for i in range(cache.num_layers):
        k_scale, v_scale = cache.scales(i) if cache.kv_dtype else (None, None)
        paged_attn.write_kv(
            rows + i, rows + i + 0.5, *cache.layer(i), batch.slot_mapping, k_scale=k_scale, v_scale=v_scale
        )


def run(cache: PagedKVCache, seq_id, tokens) -> list[tuple[int, int]]:
    """A step: prepare, write each token's number as its K/V, commit. Returns the blocks copied."""
    tokens = list(tokens)
    batch = cache.prepare([seq_id], [len(tokens)])
    write(cache, batch, tokens)
    cache.commit(seq_id, tokens)
    return [tuple(pair) for pair in batch.copies.tolist()]


def add_and_run(cache: PagedKVCache, seq_id, tokens, salt=None) -> int:
    tokens = list(tokens)
    hits = cache.add(seq_id, tokens, salt)
    run(cache, seq_id, tokens[hits:])
    return hits


def hits(cache: PagedKVCache, tokens, salt=None) -> int:
    found = cache.add("probe", list(tokens), salt)
    cache.free("probe")
    return found


def holders(cache: PagedKVCache, seq_id) -> list[int]:
    counts, _ = cache._manager.snapshot()
    return [int(counts[block]) for block in cache.block_ids(seq_id)]


def contents(cache: PagedKVCache, seq_id) -> list[float]:
    """What K/V say the tokens are, after checking that layers, heads, K and V agree."""
    as_int32 = {"dtype": torch.int32, "device": cache.device}
    table, length = (
        torch.tensor([cache.block_ids(seq_id)], **as_int32),
        torch.tensor([cache.length(seq_id)], **as_int32),
    )
    found = []
    for i in range(cache.num_layers):
        keys, values = paged_attn.gather_kv(*cache.layer(i), table, length)
        assert torch.equal(values, keys + 0.5)
        assert torch.equal(keys, keys[:, :1, :1].expand_as(keys))
        found.append((keys[:, 0, 0] - i).tolist())
    assert found[0] == found[1]
    return found[0]


# ---- construction and memory


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_layers_are_views_of_one_shape(device, layout):
    cache = PagedKVCache(3, 5, 2, 64, block_size=16, device=device, layout=layout)
    for i in range(3):
        for view in cache.layer(i):
            assert view.shape == (5, 16, 2, 64)
            assert view.dtype == torch.bfloat16
            assert view.stride(-1) == 1
    heads_first = cache.layer(0)[0].stride(2) > cache.layer(0)[0].stride(1)
    assert heads_first == (layout == "HND")
    assert cache.layer(0)[0].data_ptr() != cache.layer(1)[0].data_ptr()
    assert torch.equal(cache.layer(-1)[1], cache.layer(2)[1])
    with pytest.raises(IndexError):
        cache.layer(3)


def test_every_block_is_usable():
    cache = make(5)
    assert cache.num_free_blocks == 5
    assert cache.add("a", range(20)) == 0
    assert cache.block_ids("a") == [0, 1, 2, 3, 4]
    assert cache.num_free_blocks == 0


def test_bytes_per_block_and_budget():
    llama = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
    assert PagedKVCache.bytes_per_block(**llama, block_size=16) == 2_097_152
    fp8 = {**llama, "kv_dtype": torch.float8_e4m3fn}
    assert PagedKVCache.bytes_per_block(**fp8) == 1_048_576
    assert PagedKVCache.bytes_per_block(**fp8, kv_scale="token_head") == 1_048_576 + 32 * 2 * 16 * 8 * 4
    assert (10 << 30) // PagedKVCache.bytes_per_block(**llama) == 5120
    assert (10 << 30) // PagedKVCache.bytes_per_block(**fp8) == 10240
    small = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "device": "cpu"}
    cache = PagedKVCache.from_budget(10_000, **small)  # a block: 2 * 2 * 16 * 2 * 8 * 2 = 2048 bytes
    assert cache.num_blocks == cache.num_free_blocks == 4


def test_a_share_is_of_the_free_memory(monkeypatch):
    small = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 1, "device": "cpu"}
    monkeypatch.setattr(paged_attn.capacity, "free_memory", lambda device: 500)  # of 1000, others use 500
    assert PagedKVCache.from_budget(0.2, **small).num_blocks == 3  # 100 bytes, 32 a block
    with pytest.raises(ValueError, match="no block fits"):
        PagedKVCache.from_budget(0.05, **small)


@pytest.mark.parametrize("budget", [0, -1, 31, 0.0, 1.5, -0.2, True, "1GiB"])
def test_impossible_budgets_are_refused(budget):
    with pytest.raises(ValueError, match="bytes_or_fraction"):
        PagedKVCache.from_budget(budget, 1, 1, 8, block_size=1, device="cpu")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_kv_heads": -1}, "num_kv_heads"),
        ({"head_dim": 2.5}, "head_dim"),
        ({"block_size": 0}, "block_size"),
        ({"dtype": torch.int8}, "dtype"),
        ({"kv_dtype": torch.float16}, "kv_dtype"),
        ({"kv_dtype": torch.int8, "kv_scale": "row"}, "kv_scale"),
        ({"kv_scale": "head"}, "kv_scale"),
        ({"layout": "DHN"}, "layout"),
        ({"num_host_blocks": -1}, "num_host_blocks"),
        ({"watermark": 1.0}, "watermark"),
    ],
)
def test_bad_configurations_are_refused_by_name(options, name):
    with pytest.raises(ValueError, match=f"^{name}:"):
        PagedKVCache(**{"num_layers": 1, "num_blocks": 4, "num_kv_heads": 1, "head_dim": 8, "device": "cpu", **options})


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_scales(device, kv_dtype):
    shapes = {"tensor": (1,), "head": (2,), "token_head": (16, 4, 2)}
    for kv_scale, shape in shapes.items():
        cache = make(device=device, kv_dtype=kv_dtype, kv_scale=kv_scale)
        assert cache.layer(0)[0].dtype == kv_dtype
        for scale in cache.scales(1):
            assert scale.shape == shape
            assert scale.dtype == torch.float32
            assert scale.eq(1).all()
        cache.scales(0)[0].fill_(2)
        assert cache.scales(0)[1].eq(1).all()
        assert cache.scales(1)[0].eq(1).all()
    with pytest.raises(ValueError, match="not quantised"):
        make(device=device).scales(0)


# ---- steps


def test_prepare_returns_the_tensors_of_the_step(device):
    cache = make(device=device)
    cache.add("a", range(6))
    cache.add("b", range(50, 53))
    batch = cache.prepare(["a", "b"], [6, 3])
    assert batch.block_table.tolist() == [[0, 1], [2, -1]]
    assert batch.seq_lens.tolist() == [6, 3]
    assert batch.cu_seqlens_q.tolist() == [0, 6, 9]
    assert batch.slot_mapping.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert batch.max_seqlen_q == 6
    for tensor in (batch.block_table, batch.seq_lens, batch.cu_seqlens_q):
        assert tensor.dtype == torch.int32
    assert batch.slot_mapping.dtype == batch.positions.dtype == torch.int64
    assert {t.device for t in vars(batch).values() if isinstance(t, torch.Tensor)} == {cache.device}


def test_an_empty_batch():
    batch = make().prepare([], [])
    assert batch.block_table.shape == (0, 0)
    assert batch.cu_seqlens_q.tolist() == [0]


def test_prepare_may_be_repeated_and_less_committed():
    cache = make()
    cache.add("a", range(4))
    first = cache.prepare(["a"], [7])
    assert torch.equal(cache.prepare(["a"], [7]).slot_mapping, first.slot_mapping)
    assert cache.length("a") == 0
    cache.commit("a", range(3))
    cache.commit("a", [3, 9])
    assert cache.length("a") == 5
    assert cache.prepare(["a"], [1]).positions.tolist() == [5]
    assert len(cache.block_ids("a")) == 2
    cache.check()


def test_prepare_is_all_or_nothing():
    cache = make(3)
    cache.add("a", range(4))
    cache.add("b", range(4))
    with pytest.raises(OutOfBlocks):
        cache.prepare(["a", "b"], [5, 5])
    assert cache.block_ids("a") == [0]
    assert cache.num_free_blocks == 1
    cache.check()


@pytest.mark.parametrize(
    ("seq_ids", "query_lens", "error"),
    [
        (["a", "x"], [1, 1], KeyError),
        (["a", "a"], [1, 1], ValueError),
        (["a"], [-1], ValueError),
        (["a"], [1, 1], ValueError),
        (["a"], [1.5], ValueError),
        (["a"], [1 << 40], ValueError),
    ],
)
def test_bad_steps_are_refused(seq_ids, query_lens, error):
    cache = make()
    cache.add("a", range(4))
    with pytest.raises(error):
        cache.prepare(seq_ids, query_lens)
    cache.check()
    assert cache.block_ids("a") == [0]


def test_commit_checks_tokens_and_room():
    cache = make()
    cache.add("a", [5, 6, 7])
    with pytest.raises(ValueError, match="token 1 is 6 in the registered prompt, got 9"):
        cache.commit("a", [5, 9])
    cache.commit("a", [5, 6, 7])
    with pytest.raises(ValueError, match="prepare made room"):
        cache.commit("a", [1, 2])
    assert cache.length("a") == 3
    with pytest.raises(KeyError):
        cache.commit("x", [1])


def test_commit_batch():
    cache = make()
    cache.add("a", range(4))
    cache.add("b", range(10, 13))
    cache.prepare(["a", "b"], [4, 3])
    cache.commit_batch(["a", "b"], [0, 1, 2, 3, 10, 11, 12], [4, 3])
    cache.prepare(["a", "b"], [1, 1])
    cache.commit_batch(["a", "b"], np.array([7, 8]))
    assert (cache.length("a"), cache.length("b")) == (5, 4)
    with pytest.raises(ValueError, match="token_ids"):
        cache.commit_batch(["a", "b"], [1])
    assert hits(cache, [10, 11, 12, 8, 0]) == 4
    cache.check()


def test_a_step_reuses_no_buffer_that_the_caller_still_holds(device):
    cache = make(64, device=device)
    cache.add("a", range(8))
    batches = [cache.prepare(["a"], [n]) for n in range(1, 9)]
    for n, batch in enumerate(batches, 1):
        assert batch.positions.tolist() == list(range(n))
        assert batch.seq_lens.tolist() == [n]


def test_pinned_buffers_are_not_rewritten_under_a_queued_copy(cuda):
    cache = make(64, device=cuda)
    cache.add("a", range(40))
    cache.prepare(["a"], [40])
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # about 50 ms
    batches = [cache.prepare(["a"], [n]) for n in range(1, 41)]
    for n, batch in enumerate(batches, 1):
        assert batch.positions.tolist() == list(range(n))


# ---- forks and copy-on-write


def test_fork_copies_on_write(device):  # F-fork-cow
    cache = make(device=device)
    add_and_run(cache, "parent", range(6))
    cache.fork("parent", ["one", "two"])
    assert holders(cache, "parent") == [3, 3]
    shared = cache.block_ids("parent")[1]
    assert [pair[0] for pair in run(cache, "one", [61])] == [shared]
    assert [pair[0] for pair in run(cache, "two", [62])] == [shared]
    assert run(cache, "parent", [63]) == []
    assert cache.block_ids("parent")[1] == shared
    for step in range(9):
        for i, seq_id in enumerate(["one", "two", "parent"]):
            run(cache, seq_id, [100 * (i + 1) + step])
    for i, seq_id in enumerate(["one", "two", "parent"]):
        expected = [*range(6), 61 + i, *(100 * (i + 1) + step for step in range(9))]
        assert contents(cache, seq_id) == expected
    assert cache.stats().copies == 2
    cache.check()


def test_fork_at_a_block_edge(device):  # F-fork-cow: the last block holds 4 tokens, not 0
    cache = make(device=device)
    add_and_run(cache, "parent", range(8))
    cache.fork("parent", ["child"])
    assert run(cache, "child", [9]) == []
    assert contents(cache, "parent") == list(range(8))
    assert contents(cache, "child") == [*range(8), 9]


def test_fork_without_a_free_block():  # F-fork-cow: an empty pool refuses the append
    cache = make(2)
    add_and_run(cache, "parent", range(6))
    cache.fork("parent", ["child"])
    with pytest.raises(OutOfBlocks):
        cache.prepare(["child"], [1])
    assert cache.block_ids("child") == cache.block_ids("parent") == [0, 1]
    cache.check()


def test_fork_names():
    cache = make()
    add_and_run(cache, "a", range(3))
    for names in (["a"], ["b", "b"], "bc"):
        with pytest.raises(ValueError, match="new_seq_ids"):
            cache.fork("a", names)
    with pytest.raises(KeyError):
        cache.fork("x", ["b"])
    cache.fork("a", [])
    assert cache.seq_ids == ["a"]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kv_scale", ["tensor", "token_head"])
def test_blocks_move_with_their_scales(device, layout, kv_scale):  # D-copy-extent
    cache = make(device=device, layout=layout, kv_dtype=torch.float8_e4m3fn, kv_scale=kv_scale, num_host_blocks=4)
    cache.add("a", range(6))
    batch = cache.prepare(["a"], [6])
    raw = torch.arange(6 * 16, dtype=torch.uint8, device=device).view(6, 2, 8)
    for i in range(2):
        for offset, part in enumerate(cache.layer(i)):
            rows = batch.slot_mapping // 4, batch.slot_mapping % 4
            part.view(torch.uint8)[rows] = raw + 16 * (2 * i + offset)
        if kv_scale == "token_head":
            for scale in cache.scales(i):
                scale[rows] = torch.arange(12.0, device=device).view(6, 2) + i
    cache.commit("a", range(6))

    def bytes_of(seq_id):
        ids = cache.block_ids(seq_id)
        parts = [part[ids].reshape(8, -1)[:6].view(torch.uint8).clone() for i in range(2) for part in cache.layer(i)]
        if kv_scale == "token_head":
            parts += [part[ids].reshape(8, -1)[:6].clone() for i in range(2) for part in cache.scales(i)]
        return parts

    before = bytes_of("a")
    cache.fork("a", ["b"])
    cache.prepare(["b"], [1])
    assert cache.block_ids("b")[1] != cache.block_ids("a")[1]
    for mine, theirs in zip(bytes_of("b"), before):
        assert torch.equal(mine, theirs)
    cache.preempt("a", "swap")
    add_and_run(cache, "filler", range(100, 140))
    cache.free("filler")
    cache.resume("a")
    for mine, theirs in zip(bytes_of("a"), before):
        assert torch.equal(mine, theirs)


# ---- prefix cache


def test_the_last_token_is_always_run(device):  # F-full-hit
    cache = make(device=device, block_size=16)
    add_and_run(cache, "a", range(32))
    assert cache.add("b", range(32)) == 16
    before = [part[cache.block_ids("a")].clone() for part in cache.layer(0)]
    write(cache, cache.prepare(["b"], [16]), [-7.0] * 16)
    for part, old in zip(cache.layer(0), before):
        assert torch.equal(part[cache.block_ids("a")], old)
    assert hits(cache, range(33)) == 32
    assert hits(cache, range(15)) == 0
    assert hits(cache, range(16)) == 0
    cache.check()


def test_a_match_inside_a_block_is_copied(device):
    cache = make(device=device, block_size=16, partial_match=True)
    add_and_run(cache, "a", range(32))
    assert cache.add("b", range(32)) == 31
    assert cache.block_ids("b")[0] == cache.block_ids("a")[0]
    assert cache.block_ids("b")[1] != cache.block_ids("a")[1]
    run(cache, "b", [31])
    assert contents(cache, "a") == contents(cache, "b") == list(range(32))
    assert cache.add("c", [*range(20), 77, 78]) == 20
    run(cache, "c", [77, 78])
    assert contents(cache, "c") == [*range(20), 77, 78]
    assert cache.stats().copies == 2
    cache.check()


def test_evicted_content_is_not_found():  # F-index-integrity
    cache = make(2)
    add_and_run(cache, "a", range(1, 9))
    cache.free("a")
    add_and_run(cache, "b", range(9, 17))
    cache.free("b")
    assert cache.stats().evictions == 2
    assert hits(cache, range(1, 9)) == 0


def test_found_content_is_the_right_one():  # F-index-integrity
    cache = make(3)
    add_and_run(cache, "b", range(9, 17))
    cache.free("b")
    assert hits(cache, range(9, 18)) == 8
    assert cache.num_free_blocks == 3


def test_the_key_holds_what_comes_before():  # F-index-integrity
    cache = make()
    add_and_run(cache, "a", [1, 2, 3, 4, 9, 9, 9, 9])
    assert add_and_run(cache, "b", [5, 6, 7, 8, 9, 9, 9, 9, 1]) == 0
    assert set(cache.block_ids("a")).isdisjoint(cache.block_ids("b"))


def test_a_hole_ends_the_match():  # F-index-integrity
    cache = make(5)
    add_and_run(cache, "a", range(12))
    cache.release_before("a", 4)
    cache.add("filler", range(100, 109))
    assert cache.num_free_blocks == 0  # block 0 of the chain is gone
    cache.free("filler")
    assert hits(cache, range(9)) == 0


def test_either_copy_of_equal_content_is_found():  # F-index-integrity
    for first in ("a", "b"):
        cache = make()
        for seq_id in ("a", "b"):
            cache.add(seq_id, range(8))
        for seq_id in ("a", "b"):
            run(cache, seq_id, range(8))
        cache.free(first)
        assert hits(cache, range(9)) == 8
        other = "b" if first == "a" else "a"
        cache.add("filler", range(100, 100 + 4 * cache.num_free_blocks))
        cache.free("filler")
        assert hits(cache, range(9)) == 8
        assert holders(cache, other) == [1, 1]
        cache.check()


def test_salts_never_share():
    cache = make(32)
    add_and_run(cache, "none", range(8))
    add_and_run(cache, "empty", range(8), "")
    add_and_run(cache, "x", range(8), "x")
    assert [hits(cache, range(9), salt) for salt in (None, "", "x", "y")] == [8, 8, 8, 0]
    owners = [set(cache.block_ids(s)) for s in ("none", "empty", "x")]
    assert sum(map(len, owners)) == len(set().union(*owners))
    with pytest.raises(ValueError, match="salt"):
        cache.add("bad", range(8), 5)


def test_nothing_is_findable_before_it_is_final():
    cache = make()
    cache.add("a", range(8))
    cache.prepare(["a"], [8])
    assert hits(cache, range(9)) == 0
    cache.commit("a", range(4))
    assert hits(cache, range(9)) == 4


def test_rejected_drafts_are_never_findable():
    cache = make()
    add_and_run(cache, "a", range(6))
    cache.prepare(["a"], [4])  # drafts 6, 7, 8, 9
    cache.commit("a", [6])
    assert hits(cache, range(9)) == 4
    run(cache, "a", [70])
    assert hits(cache, [*range(7), 70, 1]) == 8


def test_prefix_caching_can_be_off():
    cache = make(enable_prefix_caching=False)
    add_and_run(cache, "a", range(8))
    assert hits(cache, range(9)) == 0
    assert cache.stats().blocks_cached == 0
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        cache.pin("a")


def test_tails_are_evicted_before_heads():  # F-eviction-order
    cache = make(3)
    add_and_run(cache, "a", range(12))
    third = cache.block_ids("a")[2]
    cache.free("a")
    cache.add("b", [99])
    assert cache.block_ids("b") == [third]
    cache.free("b")
    assert hits(cache, range(12)) == 8


def test_own_tails_go_before_shared_heads():  # F-eviction-order
    cache = make(4)
    add_and_run(cache, "a", [*range(8), 1, 1, 1, 1])
    assert add_and_run(cache, "b", [*range(8), 2, 2, 2, 2]) == 8
    cache.free("a")
    cache.free("b")
    cache.add("filler", range(100, 108))
    cache.free("filler")
    assert hits(cache, range(9)) == 8


def test_the_last_used_prefix_survives():  # F-eviction-order
    cache = make(6)
    add_and_run(cache, "old", range(8))
    add_and_run(cache, "new", range(50, 58))
    cache.free("old")
    cache.free("new")
    assert hits(cache, range(9)) == 8  # used again: now the newest
    cache.add("filler", range(100, 116))
    cache.free("filler")
    assert hits(cache, range(9)) == 8
    assert hits(cache, range(50, 59)) == 0


def test_uncached_blocks_go_first():
    cache = make(4)
    add_and_run(cache, "a", range(8))
    cache.free("a")
    cache.add("b", range(100, 108))
    assert cache.stats().evictions == 0
    cache.check()


def test_a_pinned_prompt_survives():
    cache = make(6)
    add_and_run(cache, "a", range(10))
    pin = cache.pin("a")
    assert pin.num_tokens == 8
    cache.free("a")
    assert cache.num_free_blocks == 4
    for i in range(3):
        add_and_run(cache, i, range(100 * (i + 1), 100 * (i + 1) + 16))
        cache.free(i)
    assert hits(cache, range(10)) == 8
    cache.unpin(pin)
    with pytest.raises(KeyError):
        cache.unpin(pin)
    assert cache.num_free_blocks == 6
    pin = cache.pin(list(range(7)))
    assert pin.num_tokens == 4
    with pytest.raises(KeyError):
        cache.pin("nobody")
    cache.check()


def test_reset_forgets_everything():
    cache = make()
    add_and_run(cache, "gone", range(8))
    cache.pin("gone")
    cache.free("gone")
    add_and_run(cache, "here", range(50, 56))
    cache.reset_prefix_cache()
    assert cache.num_free_blocks == 14
    assert cache.stats().blocks_cached == 0
    run(cache, "here", [56, 57, 58])  # rests on old K/V: still not findable
    assert hits(cache, range(50, 59)) == hits(cache, range(9)) == 0
    cache.check()


def test_ids_do_not_depend_on_the_process():  # F-eviction-order
    script = (
        "from tests.cache_random import RandomRun\n"
        "run = RandomRun(3)\n"
        "for _ in range(300): run.step()\n"
        "print([(s, run.cache.block_ids(s)) for s in run.cache.seq_ids])"
    )
    found = set()
    for seed in range(5):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        options = {"cwd": Path(__file__).parents[1], "env": environment, "check": True}
        found.add(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, **options).stdout)
    assert len(found) == 1
    assert len(found.pop()) > 20


# ---- admission, rollback, windows


def test_admission_and_watermark():
    cache = make(10, watermark=0.25)  # keeps 2 blocks
    assert cache.can_add(range(33)) is Admission.NEVER
    assert cache.can_add(range(32)) is Admission.OK
    with pytest.raises(OutOfBlocks, match="watermark"):
        cache.add("a", range(33))
    add_and_run(cache, "a", range(32))
    assert cache.can_add([99]) is Admission.LATER
    assert cache.can_add(range(9)) is Admission.LATER  # 8 found, 1 block more
    run(cache, "a", range(100, 108))  # growth may take what is kept
    assert cache.num_free_blocks == 0
    cache.free("a")
    assert cache.can_add([99]) is Admission.OK
    assert cache.can_add(range(32)) is Admission.OK


def test_found_blocks_in_use_need_no_room():
    cache = make(4)
    add_and_run(cache, "a", range(9))
    assert cache.can_add(range(9)) is Admission.OK
    assert cache.can_add(range(100, 109)) is Admission.LATER
    cache.add("b", range(9))
    assert cache.num_free_blocks == 0


def test_found_blocks_are_claimed_before_others_are_taken():
    cache = make(4)
    add_and_run(cache, "a", range(12))
    cache.free("a")
    assert cache.add("b", [*range(8), 50, 51, 52, 53, 54, 55]) == 8
    assert len(set(cache.block_ids("b"))) == 4
    assert contents(cache, "b") == list(range(8))
    cache.check()


@pytest.mark.parametrize("bad", [[], [-1], [1 << 31], [1.5], "text", [None], np.zeros((2, 2), int), np.zeros(2)])
def test_bad_prompts_are_refused(bad):
    cache = make()
    with pytest.raises(ValueError, match="token_ids"):
        cache.add("a", bad)
    assert cache.seq_ids == []
    cache.check()


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda t: np.array(t, np.int32), iter])
def test_prompts_of_every_kind(kind):
    cache = make()
    add_and_run(cache, "a", range(8))
    assert cache.add("b", kind([0, 1, 2, 3, 4, 5, 6, 7, 8])) == 8


def test_a_name_is_used_once():
    cache = make()
    cache.add("a", [1])
    with pytest.raises(ValueError, match="'a' is already in the cache"):
        cache.add("a", [2])
    cache.free("a")
    cache.add("a", [2])


def test_rollback_across_block_edges(device):
    cache = make(device=device)
    add_and_run(cache, "a", range(10))
    cache.rollback("a", 0)
    cache.rollback("a", 4)
    assert cache.length("a") == 6
    assert len(cache.block_ids("a")) == 2
    assert hits(cache, range(9)) == 4  # block 1 may change: not findable
    run(cache, "a", [60, 61, 62])
    assert contents(cache, "a") == [*range(6), 60, 61, 62]
    assert hits(cache, [*range(6), 60, 61, 62]) == 8
    assert hits(cache, range(9)) == 4
    with pytest.raises(ValueError, match="num_tokens"):
        cache.rollback("a", 10)
    cache.rollback("a", 9)
    assert cache.length("a") == 0
    assert cache.num_free_blocks == 16
    cache.check()


def test_rollback_leaves_a_fork_alone(device):
    cache = make(device=device)
    add_and_run(cache, "a", range(8))
    cache.fork("a", ["b"])
    cache.rollback("b", 2)
    assert run(cache, "b", [60])[0][0] == cache.block_ids("a")[1]
    assert contents(cache, "a") == list(range(8))
    assert contents(cache, "b") == [*range(6), 60]
    assert hits(cache, range(9)) == 8


def test_rollback_inside_a_prompt_keeps_it():
    cache = make()
    cache.add("a", range(12))
    run(cache, "a", range(8))
    cache.rollback("a", 3)
    assert cache.length("a") == 5
    assert len(cache.block_ids("a")) == 3
    with pytest.raises(ValueError, match="registered prompt"):
        cache.commit("a", [9])
    run(cache, "a", range(5, 12))
    cache.check()


def test_blocks_behind_a_window_go_back():
    cache = make()
    add_and_run(cache, "a", range(14))
    cache.release_before("a", 7)
    assert cache.block_ids("a") == [-1, 1, 2, 3]
    assert cache.num_free_blocks == 13
    cache.release_before("a", 12)
    assert cache.block_ids("a") == [-1, -1, -1, 3]
    batch = cache.prepare(["a"], [1])
    assert batch.block_table.tolist() == [[-1, -1, -1, 3]]
    cache.fork("a", ["b"])
    assert cache.block_ids("b") == [-1, -1, -1, 3]
    with pytest.raises(ValueError, match="position"):
        cache.release_before("a", 15)
    with pytest.raises(ValueError, match="released"):
        cache.rollback("a", 3)
    cache.free("a")
    cache.free("b")
    assert hits(cache, range(14)) == 12
    cache.check()


def test_released_heads_are_evicted_after_their_tail():
    cache = make(4)
    add_and_run(cache, "a", range(12))
    cache.release_before("a", 8)
    cache.free("a")
    cache.add("filler", [99] * 5)
    cache.free("filler")
    assert hits(cache, range(12)) == 8


# ---- freeing and preemption


def test_a_second_free_changes_nothing():
    cache = make()
    add_and_run(cache, "a", range(6))
    cache.fork("a", ["b"])
    cache.free("a")
    before = cache.stats()
    with pytest.raises(KeyError):
        cache.free("a")
    assert cache.stats() == before
    assert holders(cache, "b") == [1, 1]


def test_abort_at_any_moment():
    def prompt(cache):
        cache.add("a", range(10))

    def prepared(cache):
        prompt(cache)
        cache.prepare(["a"], [10])

    def partly(cache):
        prepared(cache)
        cache.commit("a", range(5))

    def drafting(cache):
        add_and_run(cache, "a", range(10))
        cache.prepare(["a"], [5])

    def swapped(cache):
        drafting(cache)
        cache.preempt("a", "swap")

    def dropped(cache):
        partly(cache)
        cache.preempt("a", "recompute")

    for reach in (prompt, prepared, partly, drafting, swapped, dropped):
        cache = make(num_host_blocks=8)
        reach(cache)
        cache.free("a")
        cache.check()
        assert cache.num_free_blocks == 16
        assert cache.stats().host_blocks_used == 0


def test_recompute_asks_for_every_token_again():  # F-preempt
    cache = make(block_size=16)
    add_and_run(cache, "a", range(6))
    for token in range(50, 55):
        run(cache, "a", [token])
    for _ in range(2):
        assert cache.preempt("a", "recompute") == "recompute"
        assert cache.num_free_blocks == 16
        assert cache.length("a") == 0
        assert cache.resume("a") == 11
        run(cache, "a", [*range(6), *range(50, 55)])
    assert contents(cache, "a") == [*range(6), *range(50, 55)]
    cache.check()


def test_recompute_finds_its_prefix():
    cache = make()
    add_and_run(cache, "a", range(11))
    cache.preempt("a", "recompute")
    assert cache.resume("a") == 3
    assert cache.length("a") == 8
    with pytest.raises(ValueError, match="registered prompt"):
        cache.commit("a", [99])
    run(cache, "a", [8, 9, 10])


def test_recompute_of_an_unfinished_prompt():
    cache = make()
    cache.add("a", range(16))
    run(cache, "a", range(10))
    cache.preempt("a", "recompute")
    add_and_run(cache, "b", range(16))
    assert cache.resume("a") == 0  # found more than it had
    assert cache.length("a") == 12  # the last token is still to run
    run(cache, "a", range(12, 16))


def test_swap_keeps_every_bit(device):  # F-preempt
    cache = make(6, device=device, num_host_blocks=4)
    add_and_run(cache, "a", range(6))
    cache.fork("a", ["b"])
    assert cache.preempt("a", "swap") == "swap"
    assert cache.preempt("b", "swap") == "swap"
    assert cache.stats().swaps == 2  # the shared blocks once
    assert cache.stats().host_blocks_used == 2
    add_and_run(cache, "filler", range(100, 124))  # overwrites the whole pool
    for seq_id in ("a", "b"):
        with pytest.raises(OutOfBlocks):
            cache.resume(seq_id)
        cache.check()
    cache.free("filler")
    assert cache.resume("a") == cache.resume("b") == 0
    assert cache.block_ids("a") == cache.block_ids("b")
    assert contents(cache, "a") == contents(cache, "b") == list(range(6))
    assert cache.stats().host_blocks_used == 0
    run(cache, "a", [60])
    run(cache, "b", [61])
    assert contents(cache, "a") == [*range(6), 60]
    assert contents(cache, "b") == [*range(6), 61]
    cache.check()


def test_swap_in_with_one_block_too_few():  # F-preempt
    cache = make(3, num_host_blocks=3)
    add_and_run(cache, "a", range(12))
    cache.preempt("a", "swap")
    cache.add("filler", [1])
    cache.reset_prefix_cache()
    before = cache.stats()
    with pytest.raises(OutOfBlocks, match="needs 3 free blocks, has 2"):
        cache.resume("a")
    assert cache.stats() == before
    cache.free("filler")
    assert cache.resume("a") == 0
    assert contents(cache, "a") == list(range(12))


def test_a_full_host_pool_refuses_or_falls_back():  # F-preempt
    cache = make(num_host_blocks=2)
    add_and_run(cache, "a", range(8))
    add_and_run(cache, "b", range(50, 56))
    cache.preempt("a", "swap")
    before = cache.block_ids("b")
    with pytest.raises(OutOfBlocks, match="host blocks"):
        cache.preempt("b", "swap")
    assert cache.block_ids("b") == before
    assert cache.preempt("b", "swap", fallback="recompute") == "recompute"
    assert cache.state("b") == "dropped"
    assert cache.resume("b") == 2
    cache.check()


def test_a_swapped_sequence_is_findable_again():
    cache = make(4, num_host_blocks=4)
    add_and_run(cache, "a", range(9))
    cache.preempt("a", "swap")
    add_and_run(cache, "filler", range(100, 116))
    cache.free("filler")
    cache.resume("a")
    assert hits(cache, range(9)) == 8
    cache.check()


def test_preempted_sequences_do_not_run():
    cache = make(num_host_blocks=4)
    add_and_run(cache, "a", range(6))
    with pytest.raises(ValueError, match="not preempted"):
        cache.resume("a")
    with pytest.raises(ValueError, match="mode"):
        cache.preempt("a", "away")
    cache.preempt("a", "swap")
    assert cache.length("a") == 6
    assert cache.block_ids("a") == []
    for call in (
        lambda: cache.prepare(["a"], [1]),
        lambda: cache.commit("a", [1]),
        lambda: cache.rollback("a", 1),
        lambda: cache.fork("a", ["b"]),
        lambda: cache.preempt("a", "swap"),
        lambda: cache.release_before("a", 1),
    ):
        with pytest.raises(ValueError, match="preempted"):
            call()
    cache.check()


# ---- reading


def test_stats():
    cache = make(10)
    add_and_run(cache, "a", range(10))
    stats = cache.stats()
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_free) == (10, 3, 7)
    assert (stats.blocks_cached, stats.blocks_shared, stats.tokens) == (2, 0, 10)
    assert stats.waste == pytest.approx(2 / 12)
    cache.fork("a", ["b"])
    cache.add("c", range(12))
    stats = cache.stats()
    assert stats.blocks_shared == 3
    assert stats.tokens == 28
    assert stats.waste == pytest.approx(6 / 16)
    assert stats.prefix_hit_rate == pytest.approx(8 / 22)


def test_check_names_the_fault():
    cache = make()
    add_and_run(cache, "a", range(6))
    cache.check()
    cache._manager.corrupt(1, 2)
    with pytest.raises(CacheCorrupted, match="shared blocks"):
        cache.check()
    cache._manager.corrupt(1, 0)
    with pytest.raises(CacheCorrupted, match="block 1: held by nobody, but not free"):
        cache.check()


def test_describe_shows_who_holds_what():
    cache = make(12, num_host_blocks=4)
    add_and_run(cache, "a", range(10))
    cache.fork("a", ["b"])
    run(cache, "b", [7])
    add_and_run(cache, "gone", range(100, 108))
    cache.free("gone")
    text = cache.describe()
    assert "12 blocks: 4 used (2 shared), 8 free (2 of them cached)" in text
    assert "##ABcc......" in text
    assert "A 'a': 10 tokens, blocks 0-2" in text
    assert "B 'b': 11 tokens, blocks 0-1 3" in text
    cache.preempt("b", "swap")
    assert "'b': 11 tokens, blocks swapped" in cache.describe()


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    cache = make(12, events=True)
    cache.plot(tmp_path / "empty.svg")
    add_and_run(cache, "a", range(10))
    cache.fork("a", ["b", "c"])
    run(cache, "b", [7])
    cache.plot(tmp_path / "pool.png")
    cache.plot(tmp_path / "pool.svg")
    assert (tmp_path / "pool.png").read_bytes().startswith(b"\x89PNG")
    assert "sharing" in (tmp_path / "pool.svg").read_text()


def test_events_replay_to_the_present(device):
    from paged_attn.pool_view import EVENT_KINDS, occupancy

    from .cache_random import NUM_BLOCKS, RandomRun

    run = RandomRun(1, device, events=True)
    for _ in range(400):
        run.step()
    events = run.cache.events()
    assert events["number"].tolist() == list(range(len(events)))
    assert {EVENT_KINDS[kind] for kind in events["kind"]} == set(EVENT_KINDS)
    replayed = occupancy(events, NUM_BLOCKS)
    present, published = run.cache._manager.snapshot()
    assert np.array_equal(replayed["holders"], present)
    assert np.array_equal(replayed["published"], published)
    assert replayed["used"][-1] == run.cache.stats().blocks_used
    assert (run.cache.stats().copies, run.cache.stats().swaps) == (
        (events["kind"] == EVENT_KINDS.index("copied")).sum(),
        np.isin(events["kind"], [EVENT_KINDS.index("swapped_out"), EVENT_KINDS.index("swapped_in")]).sum(),
    )
    named = events["sequence"][events["sequence"] >= 0]
    assert {run.cache.event_seq_id(s) for s in named.tolist()} <= set(range(run.next_id))
    run.cache.events(clear=True)
    assert len(run.cache.events()) == 0
    assert len(make().events()) == 0


# ---- streams and devices


def test_moves_follow_the_current_stream(cuda):  # E-stream
    cache = make(device=cuda, num_host_blocks=4)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # about 50 ms before the K/V are there
        add_and_run(cache, "a", range(6))
        cache.fork("a", ["b"])
        run(cache, "b", [60])
        cache.preempt("a", "swap")
        add_and_run(cache, "filler", range(100, 100 + 4 * cache.num_free_blocks))
        cache.free("filler")
        cache.resume("a")
        assert contents(cache, "a") == list(range(6))
        assert contents(cache, "b") == [*range(6), 60]


def test_the_cache_stays_on_its_device(cuda):  # E-device
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    cache = make(device="cuda:1", num_host_blocks=4)
    add_and_run(cache, "a", range(6))
    cache.fork("a", ["b"])
    run(cache, "b", [60])
    cache.preempt("a", "swap")
    cache.resume("a")
    assert contents(cache, "a") == list(range(6))
    assert contents(cache, "b") == [*range(6), 60]
    assert cache.prepare(["a"], [1]).block_table.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
