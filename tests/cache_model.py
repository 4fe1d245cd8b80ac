"""The block manager once more, in plain Python loops: slow, short, and the judge of the real one.

It makes the same decisions, so block ids can be compared one by one. No events.
"""

import hashlib
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from paged_attn import OutOfBlocks

RELEASED = -1


def root_key(salt: str | None) -> bytes:
    tag = b"N" if salt is None else b"S" + salt.encode()
    return hashlib.sha256(b"paged_attn salt\0" + tag).digest()


def block_key(parent: bytes, tokens: list[int]) -> bytes:
    count = len(tokens)
    fields = struct.pack(f"<{count}i", *tokens) + b"T\0\0\0" + struct.pack("<I", count) + b"P\0\0\0\0\0\0\0"
    return hashlib.sha256(fields + parent).digest()


@dataclass
class ModelSequence:
    root: bytes
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    released: int = 0
    dropped: int = 0
    state: str = "running"
    publishes: bool = True
    keys: list[bytes] = field(default_factory=list)  # of the full blocks with K/V


class ModelManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        watermark_blocks: int = 0,
        partial_match: bool = False,
    ) -> None:
        self.block_size, self.watermark, self.partial_match = block_size, watermark_blocks, partial_match
        self.unused = list(range(num_blocks - 1, -1, -1))
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.holders = [0] * num_blocks
        self.key_of: dict[int, bytes] = {}  # published blocks
        self.index: dict[bytes, list[int]] = {}
        self.children: dict[bytes, dict[int, list[int]]] = {}  # by parent: block -> tokens, oldest first
        self.parent_of: dict[int, bytes] = {}
        self.host_unused = list(range(num_host_blocks - 1, -1, -1))
        self.host_holders = [0] * num_host_blocks
        self.host_copy: dict[int, int] = {}  # device block -> host block
        self.device_copy: dict[int, int] = {}
        self.seqs: dict[object, ModelSequence] = {}
        self.pins: dict[int, list[int]] = {}

    # ---- blocks

    @property
    def num_free(self) -> int:
        return len(self.unused) + len(self.lru)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def unlink(self, block: int) -> None:
        host = self.host_copy.pop(block, None)
        if host is not None:
            del self.device_copy[host]

    def peek(self, count: int, keep: set[int] = frozenset()) -> list[int]:
        blocks = self.unused[-count:][::-1] if count else []
        blocks += islice((b for b in self.lru if b not in keep), count - len(blocks))
        assert len(blocks) == count
        return blocks

    def take(self, block: int) -> None:
        if block in self.lru:
            self.unpublish(block)
        self.unused.remove(block) if self.unused[-1] != block else self.unused.pop()
        self.holders[block] = 1

    def share(self, block: int) -> None:
        self.lru.pop(block, None)
        self.holders[block] += 1

    def release(self, block: int) -> None:
        assert self.holders[block] > 0
        self.holders[block] -= 1
        if self.holders[block] > 0:
            return
        if block in self.key_of:
            self.lru[block] = None
        else:
            self.unlink(block)
            self.unused.append(block)

    def publish(self, block: int, seq: ModelSequence, i: int) -> None:
        if block not in self.key_of:
            self.key_of[block] = seq.keys[i]
            self.index.setdefault(seq.keys[i], []).insert(1, block)
            self.parent_of[block] = seq.keys[i - 1] if i else seq.root
            tokens = seq.tokens[i * self.block_size : (i + 1) * self.block_size]
            self.children.setdefault(self.parent_of[block], {})[block] = tokens

    def unpublish(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is None:
            return
        del self.children[self.parent_of.pop(block)][block]
        self.index[key].remove(block)
        if not self.index[key]:
            del self.index[key]
        if block in self.lru:
            del self.lru[block]
            self.unlink(block)
            self.unused.append(block)

    def find(self, key: bytes) -> int | None:
        twins = self.index.get(key)
        return next((b for b in twins if self.holders[b] > 0), twins[0]) if twins else None

    def match(self, root: bytes, tokens: list[int], max_blocks: int) -> tuple[list[int], list[bytes]]:
        hits, keys = [], []
        for i in range(max_blocks):
            key = block_key(keys[-1] if keys else root, tokens[i * self.block_size : (i + 1) * self.block_size])
            block = self.find(key)
            if block is None:
                break
            hits.append(block)
            keys.append(key)
        return hits, keys

    def claim(self, seq: ModelSequence, max_hits: int, keep_free: int) -> None:
        hits, keys = self.match(seq.root, seq.tokens, max_hits // self.block_size)
        idle = {b for b in hits if self.holders[b] == 0}
        num_fresh = self.blocks_for(len(seq.tokens)) - len(hits)
        if num_fresh + len(idle) + keep_free > self.num_free:
            raise OutOfBlocks
        computed = len(hits) * self.block_size
        if self.partial_match and num_fresh > 0:
            source, common = self.find_partial(keys[-1] if keys else seq.root, seq.tokens[computed:max_hits])
            wanted = {source} if common and self.holders[source] == 0 else set()
            if common and num_fresh + len(idle | wanted) <= self.num_free:
                idle |= wanted
                computed += common
        fresh = self.peek(num_fresh, idle)
        for block in hits:
            self.share(block)
        for block in fresh:
            self.take(block)
        seq.blocks, seq.keys, seq.computed = hits + fresh, keys, computed

    def find_partial(self, parent: bytes, tokens: list[int]) -> tuple[int, int]:
        """The newest block after ``parent`` with the longest common start, and its length."""
        best = (RELEASED, 0)
        for block, theirs in reversed(self.children.get(parent, {}).items()):
            common = next((i for i, (a, b) in enumerate(zip(tokens, theirs)) if a != b), min(len(tokens), len(theirs)))
            best = (block, common) if common > best[1] else best
        return best

    # ---- sequences

    def running(self, seq_id: object) -> ModelSequence:
        seq = self.seqs[seq_id]
        assert seq.state == "running"
        return seq

    def add(self, seq_id: object, tokens: list[int], salt: str | None = None) -> int:
        seq = ModelSequence(root_key(salt), list(tokens))
        self.claim(seq, len(tokens) - 1, self.watermark)
        self.seqs[seq_id] = seq
        return seq.computed

    def prepare(self, seq_ids: list, query_lens: list[int]) -> dict[str, list]:
        edits, copies, drops, changed = [], [], {}, []
        for seq_id, count in zip(seq_ids, query_lens):
            seq = self.running(seq_id)
            first, last = seq.computed // self.block_size, self.blocks_for(seq.computed + count) if count else 0
            for i in range(first, last):
                block = seq.blocks[i] if i < len(seq.blocks) else None
                if block is not None and self.holders[block] - drops.get(block, 0) > 1:
                    drops[block] = drops.get(block, 0) + 1
                    if i * self.block_size < seq.computed:
                        copies.append((block, len(edits)))
                    edits.append((seq, i))
                elif block is None:
                    edits.append((seq, i))
                else:
                    changed.append(block)
        if len(edits) > self.num_free:
            raise OutOfBlocks
        fresh = self.peek(len(edits))
        for (seq, i), block in zip(edits, fresh):
            self.take(block)
            if i < len(seq.blocks):
                self.release(seq.blocks[i])
                seq.blocks[i] = block
            else:
                seq.blocks.append(block)
        for block in changed:
            self.unlink(block)
            self.unpublish(block)
        step = {"table": [], "seq_lens": [], "slots": [], "positions": [], "copies": [(a, fresh[e]) for a, e in copies]}
        for seq_id, count in zip(seq_ids, query_lens):
            seq = self.seqs[seq_id]
            end = seq.computed + count
            step["table"].append(seq.blocks[: self.blocks_for(end)])
            step["seq_lens"].append(end)
            for position in range(seq.computed, end):
                block = seq.blocks[position // self.block_size]
                step["slots"].append(block * self.block_size + position % self.block_size)
                step["positions"].append(position)
        return step

    def publish_filled(self, seq: ModelSequence) -> None:
        if not seq.publishes:
            return
        for i in range(len(seq.keys), seq.computed // self.block_size):
            tokens = seq.tokens[i * self.block_size : (i + 1) * self.block_size]
            seq.keys.append(block_key(seq.keys[-1] if seq.keys else seq.root, tokens))
            self.publish(seq.blocks[i], seq, i)

    def commit(self, seq_id: object, tokens: list[int]) -> None:
        seq = self.running(seq_id)
        known = seq.tokens[seq.computed : seq.computed + len(tokens)]
        assert list(tokens[: len(known)]) == known
        seq.tokens += tokens[len(known) :]
        seq.computed += len(tokens)
        self.publish_filled(seq)

    def rollback(self, seq_id: object, count: int) -> None:
        seq = self.running(seq_id)
        if count == 0:
            return
        length = seq.computed - count
        kept_tokens = len(seq.tokens) if seq.computed < len(seq.tokens) else length
        for i in range(len(seq.blocks) - 1, length // self.block_size - 1, -1):
            if self.holders[seq.blocks[i]] == 1:
                self.unpublish(seq.blocks[i])
            if i >= self.blocks_for(kept_tokens):
                self.release(seq.blocks.pop())
        del seq.tokens[kept_tokens:]
        del seq.keys[length // self.block_size :]
        seq.computed = length

    def fork(self, seq_id: object, new_ids: list) -> None:
        seq = self.running(seq_id)
        for new in new_ids:
            lists = {"tokens": list(seq.tokens), "blocks": list(seq.blocks), "keys": list(seq.keys)}
            self.seqs[new] = ModelSequence(**{**vars(seq), **lists})
            for block in seq.blocks:
                if block != RELEASED:
                    self.share(block)

    def release_all(self, seq: ModelSequence) -> None:
        for block in reversed(seq.blocks):
            if block != RELEASED:
                self.release(block)
        if seq.publishes:
            for key in reversed(seq.keys[: seq.released]):
                block = self.find(key)
                if block is not None and self.holders[block] == 0:
                    self.lru.move_to_end(block)

    def release_host(self, host: int) -> None:
        self.host_holders[host] -= 1
        if self.host_holders[host] == 0:
            if host in self.device_copy:
                self.unlink(self.device_copy[host])
            self.host_unused.append(host)

    def free(self, seq_id: object) -> None:
        seq = self.seqs.pop(seq_id)
        if seq.state == "running":
            self.release_all(seq)
        elif seq.state == "swapped":
            for host in seq.blocks:
                if host != RELEASED:
                    self.release_host(host)

    def release_before(self, seq_id: object, position: int) -> None:
        seq = self.running(seq_id)
        end = position // self.block_size
        for i in range(end - 1, seq.released - 1, -1):
            self.release(seq.blocks[i])
            seq.blocks[i] = RELEASED
        seq.released = max(seq.released, end)

    # ---- preemption

    def swap_out(self, seq_id: object) -> int:
        """Returns how many blocks move."""
        seq = self.running(seq_id)
        filled = seq.blocks[: self.blocks_for(seq.computed)]
        moved = [b for b in filled if b != RELEASED and b not in self.host_copy]
        if len(moved) > len(self.host_unused):
            raise OutOfBlocks
        for block in moved:
            host = self.host_unused.pop()
            self.host_copy[block], self.device_copy[host] = host, block
        hosts = [self.host_copy[b] if b != RELEASED else RELEASED for b in filled]
        for host in hosts:
            if host != RELEASED:
                self.host_holders[host] += 1
        self.release_all(seq)
        seq.blocks = hosts + [RELEASED] * (len(seq.blocks) - len(filled))
        seq.state = "swapped"
        return len(moved)

    def drop(self, seq_id: object) -> None:
        seq = self.running(seq_id)
        self.release_all(seq)
        seq.state, seq.dropped = "dropped", seq.computed
        seq.blocks, seq.keys, seq.computed, seq.released = [], [], 0, 0

    def resume(self, seq_id: object) -> int:
        seq = self.seqs[seq_id]
        if seq.state == "dropped":
            self.claim(seq, len(seq.tokens) - (seq.dropped < len(seq.tokens)), 0)
            seq.state = "running"
            return max(0, seq.dropped - seq.computed)
        hosts = seq.blocks[seq.released :]
        devices = [self.device_copy.get(host) if host != RELEASED else None for host in hosts]
        idle = {b for b in devices if b is not None and self.holders[b] == 0}
        num_fresh = devices.count(None)
        if num_fresh + len(idle) > self.num_free:
            raise OutOfBlocks
        fresh = iter(self.peek(num_fresh, idle))
        for i, (host, device) in enumerate(zip(hosts, devices)):
            if device is None:
                device = next(fresh)
                self.take(device)
                if host != RELEASED:
                    self.host_copy[device], self.device_copy[host] = host, device
            else:
                self.share(device)
            if host != RELEASED:
                self.release_host(host)
            seq.blocks[seq.released + i] = device
        seq.state = "running"
        if seq.publishes:
            for i in range(seq.released, len(seq.keys)):
                self.publish(seq.blocks[i], seq, i)
        return 0

    # ---- prefix cache

    def pin(self, seq_id: object, pin: int) -> None:
        seq = self.running(seq_id)
        full = seq.blocks[seq.released : seq.computed // self.block_size]
        self.pins[pin] = [b for b in full if b in self.key_of]
        for block in self.pins[pin]:
            self.share(block)

    def unpin(self, pin: int) -> None:
        for block in reversed(self.pins.pop(pin)):
            self.release(block)

    def reset(self) -> None:
        for pin in sorted(self.pins):
            self.unpin(pin)
        for block in list(self.lru):
            self.unpublish(block)
        for seq in self.seqs.values():
            if seq.state == "dropped":
                continue
            seq.publishes = False
            for block in seq.blocks if seq.state == "running" else ():
                self.unpublish(block)
