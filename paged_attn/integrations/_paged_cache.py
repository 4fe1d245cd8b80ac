"""A transformers ``Cache`` over :class:`paged_attn.PagedKVCache`, for ``generate()``."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

import paged_attn
from paged_attn.integrations._options import AttentionOptions


@dataclass(frozen=True)
class Update:
    """New keys and values ``[B, Hkv, T, D]`` of one layer, between ``Cache.update`` and the attention call."""

    cache: PageWriter
    layer_idx: int
    key: Tensor
    value: Tensor


_local = threading.local()
_row_numbers = itertools.count()


def pending_update(key: Tensor) -> Update | None:
    """The update that ``key`` came out of, once; None if no cache of ours was updated since the last call."""
    update: Update | None = getattr(_local, "update", None)
    _local.update = None
    if update is not None and update.key is not key:
        raise RuntimeError("key: changed between the cache and the attention function; paged_attn cannot follow")
    return update


class _Layer(CacheLayerMixin):
    """What transformers asks of a layer; the tokens are the whole cache's business."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: PageWriter, layer_idx: int):
        super().__init__()
        self.cache, self.layer_idx, self.is_initialized = cache, layer_idx, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        return self.cache.update(key_states, value_states, self.layer_idx)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1


class PageWriter(Cache):
    """A cache whose ``update`` hands keys and values through to the attention function, which writes and attends.

    The attention function alone knows the padding mask and the window, so it calls :meth:`attend` back.
    """

    def __init__(self, num_layers: int):
        super().__init__(layers=[_Layer(self, i) for i in range(num_layers)])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        waiting: Update | None = getattr(_local, "update", None)
        if waiting is not None and waiting.cache is self:
            _local.update = None
            raise RuntimeError(f'{type(self).__name__} needs a model with attn_implementation="paged_attn"')
        _local.update = Update(self, layer_idx, key_states, value_states)
        return key_states, value_states

    def attend(self, update: Update, query: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
        """Write the update's keys and values and return attention over all tokens, ``[B, T, Hq, D]``."""
        raise NotImplementedError


def scale_options(kv_cache: paged_attn.PagedKVCache, layer_idx: int) -> dict:
    """The scales of a quantised layer as keywords of the ops; nothing for one that is not."""
    if kv_cache.kv_dtype is None:
        return {}
    return dict(zip(("k_scale", "v_scale"), kv_cache.scales(layer_idx)))


class PagedCache(PageWriter):
    """Keys and values of ``generate()`` in pages.

    Every batch row is a sequence of ``kv_cache``; padding takes no slots. Beam search and several returned sequences
    share full blocks and copy the last one on the first write; rollback of rejected drafts frees blocks.

    Args:
        kv_cache: a :class:`paged_attn.PagedKVCache` of the model's layers, KV heads, head dimension and dtype.
    """

    def __init__(self, kv_cache: paged_attn.PagedKVCache):
        super().__init__(kv_cache.num_layers)
        self.kv_cache = kv_cache
        self._rows: list[int] = []  # sequence id of each batch row
        self._next_id = 0
        self._length = 0  # tokens seen by every row, padding included
        self._step: _Step | None = None

    @classmethod
    def for_model(cls, model: torch.nn.Module, num_blocks: int, block_size: int = 16, **options) -> PagedCache:
        """A cache of the model's shape. ``options`` are further keywords of :class:`paged_attn.PagedKVCache`."""
        kv_cache = paged_attn.PagedKVCache(
            num_blocks=num_blocks,
            block_size=block_size,
            **{"enable_prefix_caching": False, "watermark": 0.0, **cache_shape(model), **options},
        )
        return cls(kv_cache)

    def attend(self, update: Update, query: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
        batch, num_heads, query_len, head_dim = query.shape
        if self._step is None:
            self._step = self._begin(batch, query_len, mask)
        step, layer_idx = self._step, update.layer_idx
        if mask is not None:
            options.check_mask(mask)
        key_cache, value_cache = self.kv_cache.layer(layer_idx)
        scales = scale_options(self.kv_cache, layer_idx)
        paged_attn.write_kv(
            step.pack(update.key), step.pack(update.value), key_cache, value_cache, step.batch.slot_mapping, **scales
        )
        packed = paged_attn.paged_attention(
            step.pack(query),
            key_cache,
            value_cache,
            step.batch.block_table,
            step.batch.seq_lens,
            cu_seqlens_q=step.batch.cu_seqlens_q,
            max_seqlen_q=query_len,
            **options.as_kwargs(),
            **scales,
        )
        if layer_idx == self.kv_cache.num_layers - 1:
            self._end(query_len)
        if step.query_mask is None:
            return packed.view(batch, query_len, num_heads, head_dim)
        output = packed.new_zeros(batch, query_len, num_heads, head_dim)
        output[step.query_mask] = packed
        return output

    def _begin(self, batch: int, query_len: int, mask: Tensor | None) -> _Step:
        """Make room for this forward's tokens and get its tables."""
        query_mask = None if mask is None else mask[:, -query_len:]
        if query_mask is None or bool(query_mask.all()):
            query_mask, query_lens = None, [query_len] * batch
        else:
            query_lens = query_mask.sum(-1).tolist()
        if not self._rows:
            try:
                for row, length in zip(self._new_ids(batch), query_lens):
                    # What the tokens are is not known here: a salt that no other row has keeps them from being found.
                    self.kv_cache.add(row, [0] * length, salt=f"PagedCache row {next(_row_numbers)}")
                    self._rows.append(row)
            except (ValueError, paged_attn.OutOfBlocks):
                self.reset()
                raise
        if len(self._rows) != batch:
            raise ValueError(f"past_key_values: holds {len(self._rows)} rows, got a batch of {batch}")
        return _Step(self.kv_cache.prepare(self._rows, query_lens), query_lens, query_mask)

    def _end(self, query_len: int) -> None:
        for row, length in zip(self._rows, self._step.query_lens):
            self.kv_cache.commit(row, [0] * length)
        self._length += query_len
        self._step = None

    def _new_ids(self, count: int) -> list[int]:
        first, self._next_id = self._next_id, self._next_id + count
        return list(range(first, first + count))

    def _select(self, rows: list[int]) -> None:
        """Row i becomes what row ``rows[i]`` was: the first heir keeps the sequence, the others fork it."""
        heirs = Counter(rows)
        forks = {row: self._new_ids(count - 1) for row, count in heirs.items()}
        for row, children in forks.items():
            if children:
                self.kv_cache.fork(self._rows[row], children)
        for row, seq_id in enumerate(self._rows):
            if row not in heirs:
                self.kv_cache.free(seq_id)
        ids = {row: [self._rows[row], *children] for row, children in forks.items()}
        self._rows = [ids[row].pop(0) for row in rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens of every row: ``-n`` or, as transformers still allows, the length to keep."""
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self._length - tokens_to_remove)
        if count == 0:
            return
        for row in self._rows:
            self.kv_cache.rollback(row, count)
        self._length -= count

    def reset(self) -> None:
        """Give all blocks back; the next forward starts anew with any batch size."""
        for row in self._rows:
            self.kv_cache.free(row)
        self._rows, self._length, self._step = [], 0, None

    def block_ids(self) -> list[list[int]]:
        """The blocks that each batch row holds, in order."""
        return [self.kv_cache.block_ids(row) for row in self._rows]

    @property
    def batch_size(self) -> int:
        return len(self._rows) or -1


@dataclass
class _Step:
    """One forward pass: the tables, the tokens of each row that count, and which those are (None: all)."""

    batch: paged_attn.cache.Batch
    query_lens: list[int]
    query_mask: Tensor | None

    def pack(self, states: Tensor) -> Tensor:
        """``[B, H, T, D]`` to ``[tokens, H, D]`` without padding."""
        states = states.transpose(1, 2)
        return states.flatten(0, 1) if self.query_mask is None else states[self.query_mask]


def cache_shape(model: torch.nn.Module) -> dict:
    """Keywords of :class:`paged_attn.PagedKVCache` that follow from a transformers model.

    Raises:
        ValueError: layers of different shape, or layers that share keys and values.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(f"{type(model).__name__}: paged_attn does not offer layers that share keys and values")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for name, size in (("head_dim", head_dim), ("num_kv_heads", num_kv_heads)):
        if not isinstance(size, int):
            raise ValueError(f"{type(model).__name__}: paged_attn needs one {name} for all layers, got {size}")
    return {
        "num_layers": config.num_hidden_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype": model.dtype,
        "device": model.device,
    }


class StepCache(PageWriter):
    """The engine's side of the hook: layers write and read by the tables of the step in ``inputs``."""

    def __init__(self, kv_cache: paged_attn.PagedKVCache):
        super().__init__(kv_cache.num_layers)
        self.kv_cache = kv_cache
        self.inputs = None  # paged_attn.engine.models.Inputs

    def attend(self, update: Update, query: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
        inputs = self.inputs
        key_cache, value_cache = self.kv_cache.layer(update.layer_idx)
        key, value = update.key[0].transpose(0, 1), update.value[0].transpose(0, 1)
        scales = scale_options(self.kv_cache, update.layer_idx)
        paged_attn.write_kv(key, value, key_cache, value_cache, inputs.slot_mapping, **scales)
        return paged_attn.paged_attention(
            query[0].transpose(0, 1),
            key_cache,
            value_cache,
            inputs.block_table,
            inputs.seq_lens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_seqlen_q,
            metadata_ready=update.layer_idx > 0,
            **options.as_kwargs(),
            **scales,
        )[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0
