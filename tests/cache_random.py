"""A long seeded run of the cache against the model: block ids, lengths, and the K/V that ``gather_kv`` finds.

``python -m tests.cache_random --steps 200000`` is the long form; the test suite runs a short one.
"""

import argparse
import random

import numpy as np
import torch

import paged_attn
from paged_attn import OutOfBlocks, PagedKVCache
from paged_attn.cli._arguments import non_negative, positive

from .cache_model import ModelManager

NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS = 37, 4, 16
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 8


class RandomRun:
    """Steps of every kind, drawn from one seed. Few different tokens, so that prefixes meet.

    The K/V of a token is a number that its salt and all tokens up to it decide, as in a model.
    """

    def __init__(self, seed: int, device: str = "cpu", partial_match: bool = False, **options) -> None:
        self.random = random.Random(seed)
        options |= {"block_size": BLOCK_SIZE, "num_host_blocks": NUM_HOST_BLOCKS, "watermark": 0.06}
        options |= {"dtype": torch.float32, "device": device, "partial_match": partial_match}
        self.cache = PagedKVCache(NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, HEAD_DIM, **options)
        self.model = ModelManager(NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS, int(0.06 * NUM_BLOCKS), partial_match)
        self.pins: dict[int, object] = {}
        self.salts: dict[int, str | None] = {}
        self.next_id = 0
        self.counts: dict[str, int] = {}

    def contents(self, seq_id: int, tokens: list[int]) -> list[int]:
        value = hash_of(self.salts[seq_id])
        return [value := (value * 31 + token + 1) % 1000003 for token in tokens]

    def write(self, batch, values: list[int]) -> None:
        """K/V of every layer and head: the value, plus what tells layers, heads and K from V apart."""
        device = self.cache.device
        rows = torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
        heads = torch.arange(NUM_HEADS, device=device)[:, None] * 0.125 + torch.zeros(HEAD_DIM, device=device)
        for i in range(NUM_LAYERS):
            key_cache, value_cache = self.cache.layer(i)
            paged_attn.write_kv(rows + heads + i * 0.25, rows + heads + i * 0.25 + 0.5, key_cache, value_cache,
                                batch.slot_mapping)  # fmt: skip

    def verify_contents(self) -> None:
        cache, model = self.cache, self.model
        seq_ids = [s for s, seq in model.seqs.items() if seq.state == "running" and seq.computed > 0]
        if not seq_ids:
            return
        width = max(len(model.seqs[s].blocks) for s in seq_ids)
        table = np.full((len(seq_ids), width), -1, dtype=np.int32)
        starts, counts, expected = [], [], []
        for row, seq_id in zip(table, seq_ids):
            seq = model.seqs[seq_id]
            row[: len(seq.blocks)] = cache.block_ids(seq_id)
            start = seq.released * BLOCK_SIZE
            starts.append(start)
            counts.append(seq.computed - start)
            expected += self.contents(seq_id, seq.tokens[: seq.computed])[start:]
        as_int32 = {"dtype": torch.int32, "device": cache.device}
        rows = torch.tensor(expected, dtype=torch.float32)[:, None]
        for i in range(NUM_LAYERS):
            keys, values = paged_attn.gather_kv(
                *cache.layer(i),
                torch.from_numpy(table).to(cache.device),
                torch.tensor(counts, **as_int32),
                seq_starts=torch.tensor(starts, **as_int32),
            )
            for head in range(NUM_HEADS):
                offset = head * 0.125 + i * 0.25
                assert torch.equal(keys[:, head].cpu(), (rows + offset).expand(-1, HEAD_DIM))
                assert torch.equal(values[:, head].cpu(), (rows + offset + 0.5).expand(-1, HEAD_DIM))

    def verify_state(self) -> None:
        cache, model = self.cache, self.model
        stats = cache.stats()
        assert stats.blocks_free == cache.num_free_blocks == model.num_free
        assert stats.blocks_free + stats.blocks_used == NUM_BLOCKS
        assert stats.blocks_used == sum(n > 0 for n in model.holders)
        assert stats.blocks_shared == sum(n > 1 for n in model.holders)
        assert stats.blocks_cached == len(model.key_of)
        assert stats.host_blocks_used == NUM_HOST_BLOCKS - len(model.host_unused)
        for seq_id, seq in model.seqs.items():
            assert cache.length(seq_id) == seq.computed
            assert cache.state(seq_id) == seq.state
            assert cache.block_ids(seq_id) == (seq.blocks if seq.state == "running" else [])

    def both(self, on_cache, on_model):
        """The same call on both: the same number, or OutOfBlocks from both."""
        try:
            expected = on_model()
        except OutOfBlocks:
            expected = OutOfBlocks
        try:
            found = on_cache()
        except OutOfBlocks:
            found = OutOfBlocks
        assert (found is OutOfBlocks) == (expected is OutOfBlocks), (found, expected)
        assert not isinstance(found, int) or found == expected
        return found

    def pick(self, state: str) -> int | None:
        fitting = [s for s, seq in self.model.seqs.items() if seq.state == state]
        return self.random.choice(fitting) if fitting else None

    def step(self) -> None:
        draw = self.random
        actions = "add add run run run run run free fork rollback release preempt preempt resume resume pin unpin reset"
        action = draw.choice(actions.split())
        if action == "reset" and draw.random() < 0.95:
            action = "run"
        if len(self.model.seqs) > 12:
            action = "free"
        self.counts[action] = self.counts.get(action, 0) + 1
        getattr(self, action)()

    def add(self) -> None:
        draw, seq_id = self.random, self.next_id
        common = [draw.randrange(2)] * draw.randrange(0, 20)
        prompt = common + [draw.randrange(2) for _ in range(draw.randrange(1, 8))]
        self.salts[seq_id] = salt = draw.choice((None, None, None, "a"))
        self.next_id += 1
        can_add = self.cache.can_add(prompt, salt)
        added = self.both(lambda: self.cache.add(seq_id, prompt, salt), lambda: self.model.add(seq_id, prompt, salt))
        assert (can_add is paged_attn.Admission.OK) == (added is not OutOfBlocks)

    def run(self) -> None:
        """A step of one or more sequences: prepare, write, and commit some of the tokens."""
        draw, model = self.random, self.model
        running = [s for s, seq in model.seqs.items() if seq.state == "running"]
        seq_ids = draw.sample(running, min(len(running), draw.randrange(1, 4)))
        tokens = []
        for seq_id in seq_ids:
            seq = model.seqs[seq_id]
            new = seq.tokens[seq.computed :][: draw.randrange(1, 12)]
            if seq.computed + len(new) == len(seq.tokens):
                new += [draw.randrange(2) for _ in range(draw.randrange(0, 3))]
            tokens.append(new)
        lens = [len(t) for t in tokens]
        batch = self.both(lambda: self.cache.prepare(seq_ids, lens), lambda: model.prepare(seq_ids, lens))
        if batch is OutOfBlocks:
            return
        values = []
        for i, (seq_id, new) in enumerate(zip(seq_ids, tokens)):
            seq = model.seqs[seq_id]
            values += self.contents(seq_id, seq.tokens[: seq.computed] + new)[seq.computed :]
            used = -(-(seq.computed + len(new)) // BLOCK_SIZE)
            assert batch.block_table[i, :used].tolist() == seq.blocks[:used]
            assert batch.seq_lens[i] == seq.computed + len(new)
        self.write(batch, values)
        for seq_id, new in zip(seq_ids, tokens):
            accepted = new[: draw.randrange(0, len(new) + 1)] if draw.random() < 0.3 else new
            self.cache.commit(seq_id, accepted)
            model.commit(seq_id, accepted)

    def free(self) -> None:
        if self.model.seqs:
            seq_id = self.random.choice(list(self.model.seqs))
            self.cache.free(seq_id)
            self.model.free(seq_id)

    def fork(self) -> None:
        if (seq_id := self.pick("running")) is not None:
            new = list(range(self.next_id, self.next_id + self.random.randrange(1, 3)))
            self.next_id += len(new)
            self.salts.update(dict.fromkeys(new, self.salts[seq_id]))
            self.cache.fork(seq_id, new)
            self.model.fork(seq_id, new)

    def rollback(self) -> None:
        if (seq_id := self.pick("running")) is not None:
            seq = self.model.seqs[seq_id]
            count = self.random.randrange(0, min(9, seq.computed - seq.released * BLOCK_SIZE) + 1)
            self.cache.rollback(seq_id, count)
            self.model.rollback(seq_id, count)

    def release(self) -> None:
        if (seq_id := self.pick("running")) is not None:
            position = self.random.randrange(0, self.model.seqs[seq_id].computed + 1)
            self.cache.release_before(seq_id, position)
            self.model.release_before(seq_id, position)

    def preempt(self) -> None:
        if (seq_id := self.pick("running")) is not None:
            if self.random.random() < 0.6:
                self.both(lambda: self.swapped_by(seq_id), lambda: self.model.swap_out(seq_id))
            else:
                self.cache.preempt(seq_id, "recompute")
                self.model.drop(seq_id)

    def swapped_by(self, seq_id: int) -> int:
        before = self.cache.stats().swaps
        assert self.cache.preempt(seq_id, "swap") == "swap"
        return self.cache.stats().swaps - before

    def resume(self) -> None:
        seq_id = self.pick(self.random.choice(("swapped", "dropped")))
        if seq_id is not None:
            self.both(lambda: self.cache.resume(seq_id), lambda: self.model.resume(seq_id))

    def pin(self) -> None:
        seq_id = self.pick("running")
        if seq_id is not None and len(self.pins) < 2:
            pin = self.cache.pin(seq_id)
            self.pins[pin.id] = pin
            self.model.pin(seq_id, pin.id)

    def unpin(self) -> None:
        if self.pins:
            pin_id = self.random.choice(list(self.pins))
            self.cache.unpin(self.pins.pop(pin_id))
            self.model.unpin(pin_id)

    def reset(self) -> None:
        self.cache.reset_prefix_cache()
        self.model.reset()
        self.pins.clear()

    def finish(self) -> None:
        for pin_id in list(self.pins):
            self.cache.unpin(self.pins.pop(pin_id))
            self.model.unpin(pin_id)
        for seq_id in list(self.model.seqs):
            self.cache.free(seq_id)
            self.model.free(seq_id)
        self.verify_state()
        self.cache.check()
        assert self.cache.num_free_blocks == NUM_BLOCKS


def hash_of(salt: str | None) -> int:
    return 7 if salt is None else sum(map(ord, salt))


def run(
    seed: int, num_steps: int, device: str = "cpu", *, contents_every: int = 20, check_every: int = 1, **options
) -> RandomRun:
    state = RandomRun(seed, device, **options)
    for i in range(num_steps):
        state.step()
        state.verify_state()
        if i % check_every == 0:
            state.cache.check()
        if i % contents_every == 0:
            state.verify_contents()
    state.verify_contents()
    state.finish()
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=positive, default=200_000)
    parser.add_argument("--seed", type=non_negative, default=0)
    args = parser.parse_args()
    done = run(args.seed, args.steps)
    print(f"{args.steps} steps, {done.counts}: {done.cache.stats()}")
