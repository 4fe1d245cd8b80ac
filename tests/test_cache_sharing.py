"""PagedKVCache: forks, copy-on-write and the prefix cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paged_attn import OutOfBlocks

from .cache_helpers import add_and_run, contents, hits, holders, make, run, write

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
    assert [hits(cache, range(9), salt) for salt in (None, "", "x", "y", "\ud800")] == [8, 8, 8, 0, 0]
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
    for seed in range(2):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        options = {"cwd": Path(__file__).parents[1], "env": environment, "check": True}
        found.add(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, **options).stdout)
    assert len(found) == 1
    assert len(found.pop()) > 20
