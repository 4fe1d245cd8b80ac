"""What the cache answers with."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor


class Admission(enum.Enum):
    """Whether a prompt can be added: now, when others free blocks, or never in this pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class CacheCorrupted(RuntimeError):
    """An invariant of the cache is broken; the message names the first one."""


@dataclass(frozen=True)
class Batch:
    """The tensors of a step, on the cache's device, in the order of ``seq_ids``.

    Attributes:
        block_table: int32 ``[num_seqs, max_blocks]``; -1 where there is no block.
        seq_lens: int32 ``[num_seqs]``: tokens with K/V once the step has run.
        cu_seqlens_q: int32 ``[num_seqs + 1]``: prefix sums of the query lengths.
        slot_mapping: int64 ``[num_tokens]``: where the K/V of each query token go.
        positions: int64 ``[num_tokens]``: position of each query token in its sequence.
        max_seqlen_q: the largest query length.
        copies: ``[num_copies, 2]`` int64 array: blocks that were copied for this step (copy-on-write), from and to.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    slot_mapping: Tensor
    positions: Tensor
    max_seqlen_q: int
    copies: np.ndarray


@dataclass(frozen=True)
class CacheStats:
    """Counts of blocks unless said otherwise.

    Attributes:
        blocks_total, blocks_used, blocks_free: cached blocks that nobody holds are free.
        blocks_cached: findable by their content, held or not.
        blocks_shared: held more than once (by sequences and pins).
        tokens: with K/V in this pool, summed over the sequences.
        waste: reserved but empty slots over reserved slots, in [0, 1].
        prefix_hit_rate: prompt tokens found cached over prompt tokens added, in [0, 1].
        copies, evictions, swaps: blocks copied on write, evicted from the prefix cache, moved to or from the host.
        host_blocks_total, host_blocks_used: host blocks for swapped sequences.
    """

    blocks_total: int
    blocks_used: int
    blocks_free: int
    blocks_cached: int
    blocks_shared: int
    tokens: int
    waste: float
    prefix_hit_rate: float
    copies: int
    evictions: int
    swaps: int
    host_blocks_total: int
    host_blocks_used: int


class Pin(NamedTuple):
    """Cached blocks kept from eviction until ``unpin``."""

    id: int
    num_tokens: int
