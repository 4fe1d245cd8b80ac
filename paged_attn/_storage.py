"""The tensors behind the cache: keys, values and scales of every layer, on the device and for swapped blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .ops import copy_blocks, swap_blocks


class KVStorage:
    """K and V of all layers: ``kv[2 * i]`` are the keys of layer i, ``kv[2 * i + 1]`` its values.

    Each is logically ``[num_blocks, block_size, num_kv_heads, head_dim]``, scales per token and head
    likewise without the last dimension; ``layout`` decides what lies behind both. On the device none shares memory
    with another: torch.compile with dynamic shapes can lose writes to inputs that are views of one storage. A copy or
    swap is one call however many layers. Arguments as for :class:`~paged_attn.PagedKVCache`.
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
        per_token = kv_dtype is not None and kv_scale == "token_head"
        dims = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)

        def kv_like(tensor: Tensor) -> Tensor:
            return tensor if layout == "NHD" else tensor.transpose(1, 2)

        def scales_like(tensor: Tensor) -> Tensor:
            return kv_like(tensor) if per_token else tensor

        def scale_shape(count: int) -> tuple[int, ...]:
            return {"tensor": (1,), "head": (num_kv_heads,), "token_head": (count, *dims)}[kv_scale]

        count = 2 * num_layers
        element = kv_dtype or dtype
        self.kv = [
            kv_like(torch.zeros((num_blocks, *dims, head_dim), dtype=element, device=device)) for _ in range(count)
        ]
        self.scales = None
        if kv_dtype is not None:
            self.scales = [scales_like(torch.ones(scale_shape(num_blocks), device=device)) for _ in range(count)]
        self._arrays = [*self.kv, *(self.scales if per_token else ())]

        # Host blocks in one piece: pinned allocations are rounded up, each of them.
        pinned = {"device": "cpu", "pin_memory": device.type == "cuda"}
        host_kv = torch.zeros((count, num_host_blocks, *dims, head_dim), dtype=element, **pinned)
        self._host_arrays = [kv_like(tensor) for tensor in host_kv.unbind(0)]
        if per_token:
            host_scales = torch.ones((count, *scale_shape(num_host_blocks)), **pinned)
            self._host_arrays += [scales_like(tensor) for tensor in host_scales.unbind(0)]

    def copy(self, pairs: np.ndarray) -> None:
        """Copy blocks, ``pairs`` int64 ``[n, 2]``: from, to."""
        copy_blocks(self._arrays, torch.from_numpy(pairs))

    def swap_out(self, pairs: np.ndarray) -> None:
        """Copy device blocks to host blocks."""
        swap_blocks(self._arrays, self._host_arrays, torch.from_numpy(pairs))

    def swap_in(self, pairs: np.ndarray) -> None:
        """Copy host blocks to device blocks."""
        swap_blocks(self._host_arrays, self._arrays, torch.from_numpy(pairs))
