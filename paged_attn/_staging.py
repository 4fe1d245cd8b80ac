"""A step's tensors on their way to the GPU: pinned, double buffered, one copy a step."""

import numpy as np
import torch
from torch import Tensor


class Staging:
    """Two pinned buffers used in turn; one is not written again before the copy out of it has run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int64, device="cpu", pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def array(self, num_bytes: int = 0) -> np.ndarray:
        """The buffer to fill now, int64, of at least ``num_bytes``. Waits for the copy of the step before the last."""
        self._copied[self._turn].synchronize()
        if num_bytes > self._buffers[self._turn].nbytes:
            self._buffers[self._turn] = torch.empty(
                num_bytes // 4 + 1, dtype=torch.int64, device="cpu", pin_memory=True
            )
        return self._buffers[self._turn].numpy()

    def upload(self, num_bytes: int) -> Tensor:
        """Queue the copy of the buffer's first ``num_bytes`` on the current stream; int64 on the device."""
        source = self._buffers[self._turn][: (num_bytes + 7) // 8]
        target = torch.empty(source.shape, dtype=torch.int64, device=self._device)
        target.copy_(source, non_blocking=True)
        self._copied[self._turn].record(torch.cuda.current_stream(self._device))
        self._turn ^= 1
        return target
