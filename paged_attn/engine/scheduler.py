"""Which tokens run in the next step: admission, chunked prefill beside decode, preemption."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import paged_attn
from paged_attn.engine.request import Request, Sequence, State

if TYPE_CHECKING:
    from paged_attn.cache import Batch


class Row(NamedTuple):
    """Tokens ``start .. start + length - 1`` of a sequence; ``samples`` get a token each from its last logits."""

    sequence: Sequence
    start: int
    length: int
    samples: list[Sequence]


@dataclass
class Step:
    """One forward pass over all rows."""

    rows: list[Row]
    batch: Batch
    handle: Any = None  # the runner's: where the sampled tokens will be

    def __post_init__(self):
        self.samples = [sequence for row in self.rows for sequence in row.samples]
        # every row runs one token and samples one
        self.is_decode = self.batch.max_seqlen_q == 1 and all(len(row.samples) == 1 for row in self.rows)


class Scheduler:
    """Keeps who waits and who runs; every running sequence holds a slot for its newest token on the device.

    The order of calls is schedule, then commit of that step before the next schedule. Sequences leave through
    :meth:`release` at any time; rows of theirs that are still in flight write to blocks nobody reads before their next
    owner writes them, since all work is in stream order.
    """

    def __init__(
        self,
        cache: paged_attn.PagedKVCache,
        max_num_seqs: int,
        max_batch_tokens: int,
        preemption: str,
        window_size: int | None,
    ):
        self.cache = cache
        self.window_size = window_size  # of every layer; blocks behind it are given back
        self.max_num_seqs, self.max_batch_tokens = max_num_seqs, max_batch_tokens
        self.preemption = preemption
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_slots = list(range(max_num_seqs))[::-1]
        self.num_preemptions = 0

    def schedule(self) -> Step | None:
        """Choose rows and make room for them; None if nothing can run now."""
        admit = True
        while rows := self._choose_rows(admit):
            try:
                batch = self.cache.prepare([row.sequence.seq_id for row in rows], [row.length for row in rows])
            except paged_attn.OutOfBlocks:
                self._preempt(self.running[-1])
                admit = False
                continue
            for row in rows:
                row.sequence.computed += row.length
                for sequence in row.samples:
                    sequence.in_flight += 1
            return Step(rows, batch)
        return None

    def commit(self, step: Step) -> None:
        """The step's keys and values are final: publish them, and fork the samples of prompts that are complete."""
        rows = [row for row in step.rows if row.sequence.state is not State.FINISHED]
        self.cache.commit_batch(
            [row.sequence.seq_id for row in rows],
            [token for row in rows for token in row.sequence.tokens[row.start : row.start + row.length]],
            [row.length for row in rows],
        )
        if self.window_size is not None:
            for row in rows:  # the next token stands at start + length and sees window_size keys, itself included
                first_visible = row.start + row.length - self.window_size + 1
                if first_visible >= self.cache.block_size:
                    self.cache.release_before(row.sequence.seq_id, first_visible)
        for row in rows:
            children = [child for child in row.samples[1:] if child.state is not State.FINISHED]
            if children:
                self.cache.fork(row.sequence.seq_id, [child.seq_id for child in children])
            for child in children:
                child.state, child.computed = State.RUNNING, row.sequence.computed
                self.running.append(child)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out for good."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.cache.free(sequence.seq_id)
        elif sequence.state is State.PREEMPTED:
            self.waiting.remove(sequence)
            self.cache.free(sequence.seq_id)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        self._give_slot(sequence)

    def _choose_rows(self, admit: bool) -> list[Row]:
        """Decodes first, then prompts under way, then, blocks permitting, those who wait in their order."""
        budget, rows, prompts = self.max_batch_tokens, [], []
        for sequence in self.running:
            if sequence.exhausted:
                continue
            left = sequence.total - sequence.computed
            if left > 1:
                prompts.append(sequence)
            elif left == 1 and budget:
                budget -= 1
                rows.append(self._row(sequence, 1))
        for sequence in prompts:
            if budget == 0:
                return rows
            rows.append(self._row(sequence, budget))
            budget -= rows[-1].length
        while admit and budget and self.waiting and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            rows.append(self._row(sequence, budget))
            budget -= rows[-1].length
        return rows

    @staticmethod
    def _row(sequence: Sequence, budget: int) -> Row:
        start, total = sequence.computed, sequence.total
        if start + budget < total:
            return Row(sequence, start, budget, [])
        first = total == sequence.prompt_len
        return Row(sequence, start, total - start, sequence.request.sequences if first else [sequence])

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks and slots, if there are enough now."""
        if sequence.state is State.PREEMPTED:
            # room for its next token and for one block of each who runs: else it would soon be preempted again
            needed = -(-(len(sequence.tokens) + 1) // self.cache.block_size) + len(self.running)
            if sequence.in_flight or not self.free_slots:
                return False
            if self.running and self.cache.num_free_blocks < needed:
                return False
            try:
                self.cache.resume(sequence.seq_id)
            except paged_attn.OutOfBlocks:
                return False
            sequence.computed = self.cache.length(sequence.seq_id)
            sequence.slot = self.free_slots.pop()
        else:
            request = sequence.request
            if len(self.free_slots) < len(request.sequences):
                return False
            if self.cache.can_add(request.prompt, request.salt) is not paged_attn.Admission.OK:
                return False
            sequence.computed = self.cache.add(sequence.seq_id, request.prompt, request.salt)
            if sequence.computed == 0 and self._prefix_under_way(request):
                self.cache.free(sequence.seq_id)
                return False
            sequence.cached_prompt = max(sequence.cached_prompt, sequence.computed)
            for sample in request.sequences:
                sample.slot = self.free_slots.pop()
        sequence.state = State.RUNNING
        return True

    def _prefix_under_way(self, request: Request) -> bool:
        """Whether a running prompt is about to publish this prompt's first block: one step later it will be found."""
        size = self.cache.block_size
        if not self.cache.enable_prefix_caching or len(request.prompt) <= size:
            return False
        return any(
            sequence.computed < size
            and sequence.request.prompt[:size] == request.prompt[:size]
            and sequence.request.salt == request.salt
            for sequence in self.running
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Take back the blocks of the youngest sequence; it goes on, or starts again, when there is room."""
        self.running.remove(sequence)
        self.num_preemptions += 1
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        if sequence.total == sequence.prompt_len:  # nothing sampled yet: as if it had never been admitted
            self.cache.free(sequence.seq_id)
            sequence.state = State.WAITING
            for sample in sequence.request.sequences:
                self._give_slot(sample)
            return
        self.cache.preempt(sequence.seq_id, self.preemption, fallback="recompute")
        sequence.state = State.PREEMPTED
        self._give_slot(sequence)

    def _give_slot(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self.free_slots.append(sequence.slot)
            sequence.slot = -1

    def enqueue(self, request: Request) -> None:
        self.waiting.append(request.sequences[0])
