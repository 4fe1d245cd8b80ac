"""The paged KV cache: a pool of blocks, the sequences that hold them, and what they share."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    from . import _host
    from ._host import OutOfBlocks
except ImportError as error:
    raise ImportError(
        "paged_attn._host is not built for this Python: run `pip install -e .` or `python setup.py build_ext --inplace`"
    ) from error
from . import capacity, pool_view
from ._staging import Staging
from ._storage import KVStorage
from .cache_types import Admission, Batch, CacheCorrupted, CacheStats, Pin

__all__ = ["Admission", "Batch", "CacheCorrupted", "CacheStats", "OutOfBlocks", "PagedKVCache", "Pin"]

TokenIds = Sequence[int] | np.ndarray | Tensor

_ADMISSION = (Admission.OK, Admission.LATER, Admission.NEVER)
_NO_COPIES = np.empty((0, 2), dtype=np.int64)


class PagedKVCache:
    """Keys and values of many sequences in blocks of ``block_size`` tokens, shared where sequences share a prefix.

    A step: ``prepare`` makes room and returns the tensors that :func:`~paged_attn.write_kv` and
    :func:`~paged_attn.paged_attention` take; after the model ran, ``commit`` counts the tokens.

    Every call either happens or raises with nothing changed; a sequence id that is not in the cache raises
    ``KeyError``. K/V are moved on the current stream of the device, so use the cache on one stream, or order the
    streams. One thread schedules; ``stats``, ``describe``, ``length`` and the other readers may run in any thread at
    any time and see the state before or after a call, never one in between.

    Args:
        num_layers, num_blocks, num_kv_heads, head_dim: the pool holds ``num_blocks * block_size`` tokens of each layer.
        block_size: token slots in a block.
        dtype: float16, bfloat16 or float32, of the model.
        kv_dtype: None to store ``dtype``; float8_e4m3fn, float8_e5m2 or int8 to quantise.
        kv_scale: of a quantised cache: one scale a layer ("tensor"), a head, or a token and head ("token_head").
        device: default: torch's default device.
        layout: of the storage, "HND" (a head's tokens are contiguous in a block) or "NHD". ``layer`` hides it.
        num_host_blocks: blocks in (pinned) host memory for ``preempt(seq_id, "swap")``.
        enable_prefix_caching: find prompts' prefixes among the blocks that are in the pool.
        watermark: share of the blocks that ``add`` leaves free for sequences that grow.
        partial_match: beyond whole blocks, copy the longest common part of the next block instead of computing it.
        events: keep a log of what happens to blocks, see ``events``.

    Raises:
        ValueError: an argument out of its range, by name.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        kv_scale: str = "tensor",
        device: torch.device | str | None = None,
        layout: str = "HND",
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        partial_match: bool = False,
        events: bool = False,
    ) -> None:
        num_layers, num_kv_heads, head_dim, block_size = capacity.check_config(
            num_layers, num_kv_heads, head_dim, block_size, dtype, kv_dtype, kv_scale
        )
        num_blocks = capacity.check_count("num_blocks", num_blocks, 1)
        num_host_blocks = capacity.check_count("num_host_blocks", num_host_blocks, 0)
        if layout not in ("HND", "NHD"):
            raise ValueError(f'layout: expected "HND" or "NHD", got {layout!r}')
        if not isinstance(watermark, (int, float)) or not 0 <= watermark < 1:
            raise ValueError(f"watermark: expected a share in [0, 1), got {watermark!r}")
        switches = {"enable_prefix_caching": enable_prefix_caching, "partial_match": partial_match, "events": events}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name}: expected True or False, got {value!r}")
        self.num_layers, self.num_blocks, self.num_host_blocks = num_layers, num_blocks, num_host_blocks
        self.num_kv_heads, self.head_dim, self.block_size = num_kv_heads, head_dim, block_size
        self.dtype, self.kv_dtype, self.kv_scale, self.layout = dtype, kv_dtype, kv_scale, layout
        self.device = torch.empty(0, device=device).device
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda, got {self.device}")
        self.enable_prefix_caching = enable_prefix_caching

        self._storage = KVStorage(
            num_layers,
            num_blocks,
            num_host_blocks,
            num_kv_heads,
            head_dim,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            kv_scale=kv_scale,
            device=self.device,
            layout=layout,
        )
        self._staging = Staging(self.device) if self.device.type == "cuda" else None
        self._manager = _host.BlockManager(
            num_blocks,
            block_size,
            num_host_blocks,
            math.floor(watermark * num_blocks),
            enable_prefix_caching,
            partial_match,
            events,
        )
        self._handles: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}  # serial number -> sequence id, kept for the event log
        self._logs_events = events
        self._lock = threading.RLock()

    # ---- storage

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key and value cache of a layer, ``[num_blocks, block_size, num_kv_heads, head_dim]`` each, views."""
        index = self._layer_index(index)
        kv = self._storage.kv
        return kv[2 * index], kv[2 * index + 1]

    def scales(self, index: int) -> tuple[Tensor, Tensor]:
        """Float32 scales of a quantised layer's keys and values, views: 1 at first.

        Shape by ``kv_scale``: ``[1]``, ``[num_kv_heads]`` or ``[num_blocks, block_size, num_kv_heads]``, the last
        stored by ``layout`` as keys and values are.
        """
        scales = self._storage.scales
        if scales is None:
            raise ValueError("scales: this cache is not quantised (kv_dtype=None)")
        index = self._layer_index(index)
        return scales[2 * index], scales[2 * index + 1]

    def _layer_index(self, index: int) -> int:
        if not -self.num_layers <= index < self.num_layers:
            raise IndexError(f"index: expected a layer from 0 to {self.num_layers - 1}, got {index}")
        return index % self.num_layers

    bytes_per_block = staticmethod(capacity.bytes_per_block)

    @classmethod
    def from_budget(
        cls, bytes_or_fraction: int | float, num_layers: int, num_kv_heads: int, head_dim: int, **options: Any
    ) -> PagedKVCache:
        """A cache of as many blocks as a budget holds.

        Args:
            bytes_or_fraction: an int is bytes; a float in (0, 1] is a share of the device's free memory.
            num_layers, num_kv_heads, head_dim, options: as for the constructor, without ``num_blocks``.

        Raises:
            ValueError: no block fits.
        """
        num_blocks = capacity.blocks_in_budget(bytes_or_fraction, num_layers, num_kv_heads, head_dim, **options)
        return cls(num_layers, num_blocks, num_kv_heads, head_dim, **options)

    @contextmanager
    def _moving_blocks(self) -> Iterator[None]:
        """K/V are moved for a plan of the manager, which is dropped if that fails."""
        try:
            yield
        except BaseException:
            self._manager.drop_plan()
            raise

    # ---- sequences

    def can_add(self, token_ids: TokenIds, salt: str | None = None) -> Admission:
        """Whether ``add`` would find room for this prompt."""
        with self._lock:
            return _ADMISSION[self._manager.can_add(token_ids, salt)]

    def add(self, seq_id: Hashable, token_ids: TokenIds, salt: str | None = None) -> int:
        """Register a sequence and reserve blocks for its prompt, cached ones first.

        Args:
            seq_id: any name that is not in use.
            token_ids: the prompt, at least one token, ids from 0 to 2**31 - 1.
            salt: sequences share blocks only with those of an equal salt; None differs from every string.

        Returns:
            How many leading tokens already have K/V: at most ``len(token_ids) - 1``, the last token is always run.

        Raises:
            OutOfBlocks: too few blocks are free.
            ValueError: ``seq_id`` is in use, or the prompt is empty or no ids.
        """
        with self._lock:
            if seq_id in self._handles:
                raise ValueError(f"seq_id: {seq_id!r} is already in the cache")
            result, copies = self._manager.add(token_ids, salt)
            if result is None:
                with self._moving_blocks():
                    self._storage.copy(copies)
                result = self._manager.finish_add()
            handle, num_computed = result
            self._register(seq_id, handle)
            return num_computed

    def _register(self, seq_id: Hashable, handle: int) -> None:
        self._handles[seq_id] = handle
        if self._logs_events:
            self._names[self._manager.serial(handle)] = seq_id

    def prepare(self, seq_ids: Sequence[Hashable], query_lens: Sequence[int]) -> Batch:
        """Make room for the next tokens of each sequence and return the tensors of the step.

        Blocks that others hold too are copied before they are written. The sequences do not advance: ``prepare`` may
        be repeated, and fewer tokens than prepared may be committed.

        Args:
            seq_ids: sequences of the batch, each once.
            query_lens: how many tokens of each run in this step: the uncomputed prompt first, then new ones.

        Raises:
            OutOfBlocks: too few blocks are free for all of them.
            ValueError: a sequence stands twice or is preempted, or a negative length.
        """
        with self._lock:
            manager, staging, num_seqs = self._manager, self._staging, len(seq_ids)
            buffer = staging.array() if staging else None
            step, copies, num_tokens, width, num_bytes, max_seqlen_q = manager.prepare(
                self._handles, seq_ids, query_lens, buffer
            )
            if step is None:
                with self._moving_blocks():
                    if copies is not None:
                        self._storage.copy(copies)
                    if staging:
                        buffer = staging.array(num_bytes)
                step = manager.finish_prepare(buffer)
            flat = staging.upload(num_bytes) if staging else torch.from_numpy(step)
        slot_mapping, positions, rest = flat.split((num_tokens, num_tokens, len(flat) - 2 * num_tokens))
        ints = rest.view(torch.int32)
        table_size = num_seqs * width
        sizes = (table_size, num_seqs, num_seqs + 1, len(ints) - table_size - 2 * num_seqs - 1)
        block_table, seq_lens, cu_seqlens_q, _ = ints.split(sizes)
        copies = _NO_COPIES if copies is None else copies
        block_table = block_table.view(num_seqs, width)
        return Batch(block_table, seq_lens, cu_seqlens_q, slot_mapping, positions, max_seqlen_q, copies)

    def commit(self, seq_id: Hashable, token_ids: TokenIds) -> None:
        """Count the next tokens of a sequence: their K/V is written and final. Blocks they fill become findable.

        Raises:
            ValueError: tokens that differ from the registered prompt, or more than ``prepare`` made room for.
        """
        with self._lock:
            self._manager.commit(self._handles[seq_id], token_ids)

    def commit_batch(
        self, seq_ids: Sequence[Hashable], token_ids: TokenIds, counts: Sequence[int] | None = None
    ) -> None:
        """``commit`` for a batch at once: ``counts[i]`` tokens of sequence i (default one), concatenated.

        Raises:
            ValueError: as ``commit``, or ``token_ids`` are not as many as the counts say; no sequence advances then.
        """
        with self._lock:
            self._manager.commit_batch(self._handles, seq_ids, token_ids, counts)

    def rollback(self, seq_id: Hashable, num_tokens: int) -> None:
        """Drop the newest committed tokens, and the blocks that held only them.

        Blocks that this changes and nobody else holds are no longer findable. A prompt that is not computed to its end
        stays registered whole; otherwise other tokens may follow.

        Raises:
            ValueError: ``num_tokens`` is negative or more than are committed, or reaches into released blocks.
        """
        with self._lock:
            self._manager.rollback(self._handles[seq_id], num_tokens)

    def fork(self, seq_id: Hashable, new_seq_ids: Sequence[Hashable]) -> None:
        """New sequences that share every block of ``seq_id``; whoever first writes a shared block gets a copy.

        Raises:
            ValueError: a new name is in use or stands twice, or the sequence is preempted.
        """
        with self._lock:
            handle = self._handles[seq_id]
            if isinstance(new_seq_ids, str):
                raise ValueError(f"new_seq_ids: expected a list of names, got {new_seq_ids!r}")
            new_seq_ids = list(new_seq_ids)
            if len(set(new_seq_ids)) < len(new_seq_ids) or any(new in self._handles for new in new_seq_ids):
                raise ValueError(f"new_seq_ids: expected unused names, each once, got {new_seq_ids}")
            for new, new_handle in zip(new_seq_ids, self._manager.fork(handle, len(new_seq_ids))):
                self._register(new, new_handle)

    def free(self, seq_id: Hashable) -> None:
        """Release a sequence in any state. Its full blocks stay findable until their memory is wanted."""
        with self._lock:
            self._manager.free(self._handles[seq_id])
            del self._handles[seq_id]

    def release_before(self, seq_id: Hashable, position: int) -> None:
        """Give back the blocks wholly before ``position``, which a sliding window no longer sees.

        The block table keeps its shape.

        Raises:
            ValueError: ``position`` is not from 0 to ``length(seq_id)``, or the sequence is preempted.
        """
        with self._lock:
            self._manager.release_before(self._handles[seq_id], position)

    # ---- preemption

    def preempt(self, seq_id: Hashable, mode: str, *, fallback: str | None = None) -> str:
        """Take a sequence's device blocks from it until ``resume``.

        Args:
            mode: "swap" moves its K/V to host blocks, those it shares with other swapped sequences once. "recompute"
                gives the blocks up.
            fallback: "recompute" to do that where the host blocks do not suffice for "swap".

        Returns:
            The mode that was used.

        Raises:
            OutOfBlocks: too few host blocks are free and no fallback was asked for.
        """
        if mode not in ("swap", "recompute"):
            raise ValueError(f'mode: expected "swap" or "recompute", got {mode!r}')
        if fallback not in (None, "recompute"):
            raise ValueError(f'fallback: expected "recompute" or None, got {fallback!r}')
        with self._lock:
            handle = self._handles[seq_id]
            if mode == "swap":
                try:
                    mapping = self._manager.begin_swap_out(handle)
                except OutOfBlocks:
                    if fallback is None:
                        raise
                    mode = fallback
            if mode == "recompute":
                self._manager.drop(handle)
                return mode
            with self._moving_blocks():
                if len(mapping):
                    self._storage.swap_out(mapping)
            self._manager.finish_swap_out()
            return mode

    def resume(self, seq_id: Hashable) -> int:
        """Bring a preempted sequence back.

        Returns:
            How many tokens, of those that had K/V, are to be run again: 0 after a swap.

        Raises:
            OutOfBlocks: too few blocks are free.
            ValueError: the sequence is not preempted.
        """
        with self._lock:
            swapped, mapping = self._manager.begin_resume(self._handles[seq_id])
            with self._moving_blocks():
                if len(mapping) and swapped:
                    self._storage.swap_in(mapping)
                elif len(mapping):
                    self._storage.copy(mapping)
            return self._manager.finish_resume()

    # ---- prefix cache

    def pin(self, seq_or_prefix: Hashable | TokenIds, salt: str | None = None) -> Pin:
        """Keep blocks from eviction: the full ones of a sequence, or the cached ones of a token prefix.

        Args:
            seq_or_prefix: a sequence's id, or token ids.
            salt: of the prefix.
        """
        if not self.enable_prefix_caching:
            raise ValueError("pin: needs enable_prefix_caching=True")
        with self._lock:
            if isinstance(seq_or_prefix, Hashable) and seq_or_prefix in self._handles:
                return Pin(*self._manager.pin(self._handles[seq_or_prefix]))
            if isinstance(seq_or_prefix, str) or not isinstance(seq_or_prefix, Iterable):
                raise KeyError(seq_or_prefix)
            return Pin(*self._manager.pin_prefix(seq_or_prefix, salt))

    def unpin(self, pin: Pin) -> None:
        """End a pin. ``KeyError`` if it has ended, by ``reset_prefix_cache`` too."""
        with self._lock:
            if not self._manager.unpin(pin.id):
                raise KeyError(pin)

    def reset_prefix_cache(self) -> None:
        """Make everything computed so far unfindable, and end all pins: for changed weights."""
        with self._lock:
            self._manager.reset_prefix_cache()

    # ---- reading

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self._manager.num_free_blocks()

    @property
    def seq_ids(self) -> list[Hashable]:
        """Every registered sequence, oldest first."""
        return list(self._handles)

    def length(self, seq_id: Hashable) -> int:
        """Tokens with K/V: cached ones that were found, and committed ones. 0 after ``preempt(…, "recompute")``."""
        with self._lock:
            return self._manager.length(self._handles[seq_id])

    def block_ids(self, seq_id: Hashable) -> list[int]:
        """Device blocks in order, reserved ones included; -1 where ``release_before`` gave one back."""
        with self._lock:
            handle = self._handles[seq_id]
            return [] if self._manager.state(handle) == "swapped" else self._manager.blocks(handle).tolist()

    def state(self, seq_id: Hashable) -> str:
        """ "running", "swapped" or "dropped" (preempted for recomputation)."""
        with self._lock:
            return self._manager.state(self._handles[seq_id])

    def stats(self) -> CacheStats:
        """Numbers of the moment."""
        counts = self._manager.stats()
        filled, reserved = counts.pop("filled_slots"), counts.pop("reserved_slots")
        hits, asked = counts.pop("hit_tokens"), counts.pop("prompt_tokens")
        return CacheStats(
            **counts,
            waste=(reserved - filled) / reserved if reserved else 0.0,
            prefix_hit_rate=hits / asked if asked else 0.0,
            host_blocks_total=self.num_host_blocks,
        )

    def check(self) -> None:
        """Recompute every invariant (reference counts, free lists, tables, prefix index).

        Raises:
            CacheCorrupted: names the first broken one.
        """
        with self._lock:
            fault = self._manager.check()
        if fault:
            raise CacheCorrupted(fault)

    def describe(self) -> str:
        """A text map of the pool: who holds which block, what is shared, cached, free."""
        with self._lock:
            snapshot = pool_view.PoolSnapshot.of(self._manager, self._handles)
        return pool_view.describe(snapshot)

    def plot(self, path: str | Path) -> None:
        """Save a picture of the pool; the suffix of ``path`` says the format. Needs matplotlib.

        Blocks coloured by holder, shared, cached or free; the tree of what sequences share; with ``events=True`` the
        occupancy over time.
        """
        with self._lock:
            snapshot = pool_view.PoolSnapshot.of(self._manager, self._handles)
            events = self._manager.events()
        pool_view.plot(snapshot, events, path)

    def events(self, clear: bool = False) -> np.ndarray:
        """The event log, oldest first; empty without ``events=True``.

        Args:
            clear: forget the events that are returned; numbers go on.

        Returns:
            A structured array: ``number`` counts from 0 without gaps; ``sequence`` (see ``event_seq_id``) or -1;
            ``kind`` indexes ``paged_attn.pool_view.EVENT_KINDS``; ``block``; ``other``, the second block of a copy
            (its destination) or swap (the host block), or -1. ``paged_attn.pool_view.occupancy`` replays it.
        """
        with self._lock:
            return self._manager.events(clear)

    def event_seq_id(self, sequence: int) -> Hashable:
        """The sequence id behind an event's ``sequence``."""
        return self._names[sequence]
