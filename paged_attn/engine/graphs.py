"""Steps as CUDA graphs: captured once for a size, replayed for every step that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paged_attn.engine.models import Forward, Inputs, with_newest

if TYPE_CHECKING:
    from paged_attn.cache import Batch

# Beyond this many tokens a step keeps the GPU busy for longer than launching its kernels takes.
MAX_TOKENS = 512


class CaptureFailed(RuntimeError):
    """The model does something in its forward pass that a CUDA graph cannot hold."""


class StepGraphs:
    """Graphs of decode steps, by number of rows, and of small steps that mix prompts in, by number of tokens.

    All graphs read the same input buffers, whose rows past the step's are inert: length 0, slot -1, and token rows past
    ``cu_seqlens_q[-1]``. A graph is captured when a step first needs it.
    """

    def __init__(self, forward: Forward, newest: Tensor, max_rows: int, max_batch_tokens: int, max_blocks: int):
        device, self.max_rows = newest.device, max_rows
        self.forward, self.newest = forward, newest
        self.row_sizes = sorted({1, 2, 4, *range(8, max_rows, 8), max_rows})
        most = min(max_batch_tokens, MAX_TOKENS)
        self.token_sizes = sorted({*range(32, most, 32), most})
        tokens = max(max_rows, most)

        def ints(size: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((size,), fill, dtype=dtype, device=device)

        self.ids, self.sources = ints(tokens), ints(tokens, -1)
        self.positions, self.slots = ints(tokens), ints(tokens, -1)
        self.seq_lens, self.cu_seqlens_q = ints(max_rows, dtype=torch.int32), ints(max_rows + 1, dtype=torch.int32)
        self.block_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self.logit_rows = ints(max_rows)
        self.used_rows = self.used_tokens = 0  # those that are not inert
        self.graphs: dict[tuple[bool, int], tuple[Callable[[], None], Tensor]] = {}
        self.pool = self.stream = None

    def has_room(self, is_decode: bool, num_tokens: int) -> bool:
        return is_decode or num_tokens <= self.token_sizes[-1]

    def run(self, batch: Batch, is_decode: bool, ids: Tensor, sources: Tensor, logit_rows: Tensor) -> Tensor:
        """Logits of the step, ``[R, V]``; the next run overwrites them.

        Raises:
            CaptureFailed: nothing has run then.
        """
        num_rows, num_tokens = batch.seq_lens.numel(), ids.numel()
        key = (is_decode, next(size for size in self._sizes(is_decode) if size >= num_tokens))
        if key not in self.graphs:
            self._make_inert(0, 0)
            self.graphs[key] = self._capture(*key)
        self._make_inert(num_rows, num_tokens)
        self.ids[:num_tokens].copy_(ids)
        self.sources[:num_tokens].copy_(sources)
        self.positions[:num_tokens].copy_(batch.positions)
        self.slots[:num_tokens].copy_(batch.slot_mapping)
        self.seq_lens[:num_rows].copy_(batch.seq_lens)
        self.block_table[:num_rows, : batch.block_table.shape[1]].copy_(batch.block_table)
        if not is_decode:
            self.cu_seqlens_q[: num_rows + 1].copy_(batch.cu_seqlens_q)
            self.cu_seqlens_q[num_rows + 1 :].fill_(num_tokens)
            self.logit_rows[: logit_rows.numel()].copy_(logit_rows)
            self.logit_rows[logit_rows.numel() :].zero_()
        replay, logits = self.graphs[key]
        replay()
        return logits[: logit_rows.numel()]

    def _sizes(self, is_decode: bool) -> list[int]:
        return self.row_sizes if is_decode else self.token_sizes

    def _make_inert(self, num_rows: int, num_tokens: int) -> None:
        """Rows and tokens from these numbers on."""
        self.seq_lens[num_rows : self.used_rows].zero_()
        self.slots[num_tokens : self.used_tokens].fill_(-1)
        self.sources[num_tokens : self.used_tokens].fill_(-1)
        if num_tokens == 0:
            self.cu_seqlens_q.zero_()
            self.logit_rows.zero_()
        self.used_rows, self.used_tokens = num_rows, num_tokens

    def _capture(self, is_decode: bool, size: int) -> tuple[Callable[[], None], Tensor]:
        rows = size if is_decode else self.max_rows

        def step() -> Tensor:
            return self.forward(
                Inputs(
                    token_ids=with_newest(self.ids[:size], self.sources[:size], self.newest),
                    positions=self.positions[:size],
                    slot_mapping=self.slots[:size],
                    block_table=self.block_table[:rows],
                    seq_lens=self.seq_lens[:rows],
                    cu_seqlens_q=None if is_decode else self.cu_seqlens_q,
                    max_seqlen_q=1 if is_decode else size,
                    logit_rows=None if is_decode else self.logit_rows,
                )
            )

        return self._record(step)

    def _record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What replays ``step``, and where its result will be."""
        if self.stream is None:
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # once outside the graph: workspaces of this stream, compilation
            step()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                result = step()
        except RuntimeError as error:
            torch.cuda.synchronize()
            raise CaptureFailed(str(error).splitlines()[0]) from error
        return graph.replay, result
