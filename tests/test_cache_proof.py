"""The cache against its model, under injected failures, and read by a second thread."""

import hashlib
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_attn import OutOfBlocks, PagedKVCache, _host
from paged_attn._storage import KVStorage

from . import cache_random
from .cache_model import ModelManager, block_key, root_key

# ---- random runs


@pytest.mark.parametrize("partial_match", [False, True])
def test_random_run(device, partial_match):  # F-leaks
    cache_random.run(0, 1000, device, partial_match=partial_match)


def test_long_random_run():  # F-leaks
    cache_random.run(2, 20_000, contents_every=500, check_every=10)


class CacheMachine(RuleBasedStateMachine):
    """Hypothesis looks for the shortest calls after which cache and model differ."""

    @initialize(num_blocks=st.integers(2, 12), block_size=st.integers(1, 4), num_host_blocks=st.integers(0, 6))
    def start(self, num_blocks, block_size, num_host_blocks):
        sizes = {"block_size": block_size, "num_host_blocks": num_host_blocks, "watermark": 0.1}
        self.cache = PagedKVCache(1, num_blocks, 1, 8, dtype=torch.float32, device="cpu", **sizes)
        self.model = ModelManager(num_blocks, block_size, num_host_blocks, num_blocks // 10)
        self.next_id = 0

    def both(self, name, *args, model_name=None, model_args=None):
        results = []
        for target, call, values in (
            (self.cache, name, args),
            (self.model, model_name or name, args if model_args is None else model_args),
        ):
            try:
                results.append(getattr(target, call)(*values))
            except OutOfBlocks:
                results.append(OutOfBlocks)
        assert (results[0] is OutOfBlocks) == (results[1] is OutOfBlocks), results
        return results

    def choose(self, data, state):
        return data.draw(st.sampled_from([s for s, seq in self.model.seqs.items() if seq.state == state]))

    def any_in(*states):
        return precondition(lambda self: any(seq.state in states for seq in self.model.seqs.values()))

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from([None, "", "x"]))
    def add(self, prompt, salt):
        added, expected = self.both("add", self.next_id, prompt, salt)
        assert added == expected
        self.next_id += 1

    @any_in("running")
    @rule(data=st.data(), num_new=st.integers(0, 6), num_rejected=st.integers(0, 3))
    def run(self, data, num_new, num_rejected):
        seq_ids = list({self.choose(data, "running"), self.choose(data, "running")})
        tokens = [self.model.seqs[s].tokens[self.model.seqs[s].computed :] + [0] * num_new for s in seq_ids]
        batch, expected = self.both("prepare", seq_ids, [len(t) for t in tokens])
        if batch is OutOfBlocks:
            return
        assert batch.slot_mapping.tolist() == expected["slots"]
        assert batch.positions.tolist() == expected["positions"]
        assert batch.seq_lens.tolist() == expected["seq_lens"]
        assert [tuple(pair) for pair in batch.copies.tolist()] == expected["copies"]
        for row, blocks in zip(batch.block_table.tolist(), expected["table"]):
            assert row == blocks + [-1] * (len(row) - len(blocks))
        for seq_id, new in zip(seq_ids, tokens):
            self.both("commit", seq_id, new[: max(0, len(new) - num_rejected)])

    @any_in("running")
    @rule(data=st.data())
    def fork(self, data):
        self.both("fork", self.choose(data, "running"), [self.next_id])
        self.next_id += 1

    @any_in("running")
    @rule(data=st.data(), count=st.integers(0, 9))
    def rollback(self, data, count):
        seq_id = self.choose(data, "running")
        seq = self.model.seqs[seq_id]
        self.both("rollback", seq_id, min(count, seq.computed - seq.released * self.model.block_size))

    @any_in("running")
    @rule(data=st.data(), share=st.floats(0, 1))
    def release(self, data, share):
        seq_id = self.choose(data, "running")
        self.both("release_before", seq_id, int(share * self.model.seqs[seq_id].computed))

    @any_in("running")
    @rule(data=st.data())
    def swap_out(self, data):
        seq_id = self.choose(data, "running")
        self.both("preempt", seq_id, "swap", model_name="swap_out", model_args=(seq_id,))

    @any_in("running")
    @rule(data=st.data())
    def drop(self, data):
        seq_id = self.choose(data, "running")
        self.both("preempt", seq_id, "recompute", model_name="drop", model_args=(seq_id,))

    @any_in("swapped", "dropped")
    @rule(data=st.data())
    def resume(self, data):
        waiting = [s for s, seq in self.model.seqs.items() if seq.state != "running"]
        again, expected = self.both("resume", data.draw(st.sampled_from(waiting)))
        assert again == expected

    @precondition(lambda self: self.model.seqs)
    @rule(data=st.data())
    def free(self, data):
        self.both("free", data.draw(st.sampled_from(list(self.model.seqs))))

    @rule()
    def reset(self):
        self.both("reset_prefix_cache", model_name="reset")

    @invariant()
    def agree(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert self.cache.num_free_blocks == self.model.num_free
        for seq_id, seq in self.model.seqs.items():
            assert self.cache.length(seq_id) == seq.computed
            assert self.cache.block_ids(seq_id) == (seq.blocks if seq.state == "running" else [])


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None, derandomize=True)

# ---- hashes


@pytest.mark.parametrize("instructions", [False, True])
def test_sha256_is_that_of_hashlib(instructions):
    try:
        _host.sha256_use_instructions(instructions)
        for size in [*range(200), 1000, 4095, 1 << 16]:
            data = random.Random(size).randbytes(size)
            assert _host.sha256(data) == hashlib.sha256(data).digest()
    finally:
        _host.sha256_use_instructions(True)


@pytest.mark.parametrize("block_size", [1, 4, 16, 17, 64])
def test_block_keys_are_those_of_hashlib(block_size):
    tokens = np.random.default_rng(0).integers(0, 2**31, 5 * block_size + block_size // 2)
    for salt in (None, "", "tenant Ω"):
        key = root_key(salt)
        found = _host.hash_chain(tokens, block_size, salt)
        assert found.shape == (5, 32)
        for i in range(5):
            key = block_key(key, tokens[i * block_size : (i + 1) * block_size].tolist())
            assert found[i].tobytes() == key


# ---- failures


class Failure(Exception):
    pass


def scene() -> PagedKVCache:
    """A cache in which the next ``prepare``, ``add``, ``preempt`` and ``resume`` each have to move blocks."""
    sizes = {"block_size": 4, "num_host_blocks": 8, "watermark": 0.0, "partial_match": True}
    cache = PagedKVCache(1, 24, 1, 8, dtype=torch.float32, device="cpu", **sizes)
    for seq_id, start in (("shared", 0), ("away", 20)):
        tokens = list(range(start, start + 6))
        cache.add(seq_id, tokens)
        cache.prepare([seq_id], [6])
        cache.commit(seq_id, tokens)
    cache.fork("shared", ["fork"])
    cache.preempt("away", "swap")
    cache.add("filler", range(100, 188))  # what lay on the device is evicted
    cache.free("filler")
    return cache


def state_of(cache: PagedKVCache) -> tuple:
    held = {s: (cache.state(s), cache.length(s), cache.block_ids(s)) for s in cache.seq_ids}
    return held, cache.stats(), [array.tolist() for array in cache._manager.snapshot()]


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("copy", lambda cache: cache.prepare(["shared", "fork"], [1, 9])),
        ("copy", lambda cache: cache.add("new", [0, 1, 2, 99])),
        ("swap_out", lambda cache: cache.preempt("shared", "swap")),
        ("swap_in", lambda cache: cache.resume("away")),
    ],
    ids=["prepare", "add", "preempt", "resume"],
)
def test_a_failed_move_changes_nothing(monkeypatch, where, call):
    cache = scene()
    before = state_of(cache)

    def fail(*_):
        raise Failure

    with monkeypatch.context() as patch:
        patch.setattr(KVStorage, where, fail)
        with pytest.raises(Failure):
            call(cache)
    cache.check()
    assert state_of(cache) == before
    call(cache)
    cache.check()
    assert state_of(cache) != before


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.add("new", range(50, 62)),
        lambda cache: cache.prepare(["shared", "fork"], [5, 9]),
        lambda cache: cache.resume("away"),
        lambda cache: cache.resume("dropped"),
    ],
    ids=["add", "prepare", "swap in", "recompute"],
)
def test_too_few_blocks_change_nothing(call):
    outcomes = []
    for num_left in range(8):
        cache = scene()
        cache.add("dropped", range(60, 70))
        cache.preempt("dropped", "recompute")
        cache.add("hog", [7] * (4 * (cache.num_free_blocks - num_left)))
        before = state_of(cache)
        try:
            call(cache)
            outcomes.append(True)
        except OutOfBlocks:
            assert state_of(cache) == before
            outcomes.append(False)
        cache.check()
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False
    assert outcomes[-1] is True


def test_nothing_is_finished_that_was_not_planned():
    manager = scene()._manager
    for finish in (manager.finish_add, lambda: manager.finish_prepare(None), manager.finish_swap_out):
        with pytest.raises(RuntimeError, match="planned"):
            finish()
    with pytest.raises(RuntimeError, match="planned"):
        manager.finish_resume()


# ---- threads


def test_readers_beside_a_scheduler():
    run = cache_random.RandomRun(4)
    stop, faults = threading.Event(), []

    def read():
        try:
            while not stop.is_set():
                stats = run.cache.stats()
                assert stats.blocks_used + stats.blocks_free == cache_random.NUM_BLOCKS
                assert 0 <= stats.waste <= 1
                assert run.cache.describe().startswith(f"{cache_random.NUM_BLOCKS} blocks")
                for seq_id in run.cache.seq_ids:
                    try:
                        assert run.cache.length(seq_id) >= 0
                        run.cache.block_ids(seq_id)
                    except KeyError:
                        pass  # freed meanwhile
                run.cache.check()
        except BaseException as fault:
            faults.append(fault)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(600):
            run.step()
    finally:
        stop.set()
        reader.join()
    assert faults == []
    run.verify_state()
