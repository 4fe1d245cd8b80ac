"""PagedKVCache: a sequence from admission to release, with rollback, windows and preemption."""

import numpy as np
import pytest
import torch

from paged_attn import Admission, OutOfBlocks

from .cache_helpers import add_and_run, contents, hits, holders, make, run, write

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


NOT_ON_THE_HOST = torch.empty(1, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    "bad", [[], [-1], [1 << 31], [1.5], "text", [None], np.zeros((2, 2), int), np.zeros(2), NOT_ON_THE_HOST]
)
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


def test_a_swapped_fork_does_not_hold_back_a_step_under_way(device):
    """The host copy of a block is from before the step wrote it."""
    cache = make(device=device, num_host_blocks=4)
    add_and_run(cache, "a", range(6))
    batch = cache.prepare(["a"], [1])
    cache.fork("a", ["b"])
    cache.preempt("b", "swap")
    write(cache, batch, [60])
    cache.commit("a", [60])
    cache.preempt("a", "swap")
    add_and_run(cache, "filler", range(100, 164))  # overwrites the whole pool
    cache.free("filler")
    cache.resume("a")
    cache.resume("b")
    assert contents(cache, "a") == [*range(6), 60]
    assert contents(cache, "b") == list(range(6))
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


@pytest.mark.parametrize("caching", [True, False])
def test_resume_reads_the_host_not_free_blocks(device, caching):  # unallocated blocks may hold anything
    cache = make(6, device=device, num_host_blocks=4, enable_prefix_caching=caching)
    add_and_run(cache, "a", range(6))
    cache.fork("a", ["b"])
    before = cache.block_ids("a")
    cache.preempt("a", "swap")
    cache.preempt("b", "swap")
    for tensor in (*cache.layer(0), *cache.layer(1)):
        tensor.fill_(torch.nan)
    assert cache.resume("a") == 0
    assert cache.block_ids("a") == before
    assert cache.stats().swaps == 4
    assert cache.resume("b") == 0
    assert cache.stats().swaps == 4  # the shared blocks are there
    assert contents(cache, "a") == contents(cache, "b") == list(range(6))
    cache.check()


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
