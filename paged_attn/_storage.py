"""The tensors behind the cache: keys, values and scales of every layer, on the device and for swapped blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .ops import copy_blocks, swap_blocks


class KVStorage:
    """One tensor for K and V of all layers, so that a copy or swap of blocks is one call however many layers.

    Logically ``[2 * num_layers, num_blocks, block_size, num_kv_heads, head_dim]``, keys of layer i at 2i, values at
    2i + 1; ``layout`` decides what lies behind that. Arguments as for :class:`~paged_attn.PagedKVCache`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_host_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        kv_scale: str,
        device: torch.device,
        layout: str,
    ) -> None:
        inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
        per_token = kv_dtype is not None and kv_scale == "token_head"

        def allocate(count: int, **where: object) -> tuple[Tensor, Tensor | None]:
            kv = torch.zeros((2 * num_layers, count, *inner, head_dim), dtype=kv_dtype or dtype, **where)
            kv = kv if layout == "NHD" else kv.transpose(2, 3)
            if kv_dtype is None:
                return kv, None
            shape = {"tensor": (1,), "head": (num_kv_heads,), "token_head": (count, block_size, num_kv_heads)}[kv_scale]
            return kv, torch.ones((2 * num_layers, *shape), dtype=torch.float32, **where)

        def arrays(kv: Tensor, scales: Tensor | None) -> list[Tensor]:
            """Everything that belongs to a block, as tensors with the block first."""
            return [*kv.unbind(0), *(scales.unbind(0) if per_token else ())]

        self.kv, self.scales = allocate(num_blocks, device=device)
        self._arrays = arrays(self.kv, self.scales)
        self._host_arrays = arrays(*allocate(num_host_blocks, device="cpu", pin_memory=device.type == "cuda"))

    def copy(self, pairs: np.ndarray) -> None:
        """Copy blocks, ``pairs`` int64 ``[n, 2]``: from, to."""
        copy_blocks(self._arrays, torch.from_numpy(pairs))

    def swap_out(self, pairs: np.ndarray) -> None:
        """Copy device blocks to host blocks."""
        swap_blocks(self._arrays, self._host_arrays, torch.from_numpy(pairs))

    def swap_in(self, pairs: np.ndarray) -> None:
        """Copy host blocks to device blocks."""
        swap_blocks(self._host_arrays, self._arrays, torch.from_numpy(pairs))
