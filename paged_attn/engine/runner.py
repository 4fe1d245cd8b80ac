"""From a step's rows to sampled tokens: inputs, CUDA graphs, sampling, and tokens read back one step late."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_attn.engine.models import Forward, Inputs
from paged_attn.engine.sampling import sample
from paged_attn.engine.scheduler import Step


@dataclass
class Sampled:
    """The step's new tokens on their way to the host."""

    tokens: Tensor  # int64 [R], on the host; on a GPU valid once ``ready`` has passed
    ready: torch.cuda.Event | None

    def read(self) -> list[int]:
        if self.ready is not None:
            self.ready.synchronize()
        return self.tokens.tolist()


class Runner:
    """Runs steps in order on the current stream.

    The newest token of every running sequence also stays on the device, in ``newest`` at its slot, so that the next
    step can be launched before the host has read it.
    """

    def __init__(self, forward: Forward, device: torch.device, max_num_seqs: int, max_blocks: int, cuda_graphs: bool):
        self.forward, self.device = forward, device
        self.newest = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.graphs = DecodeGraphs(forward, device, self.newest, max_num_seqs, max_blocks) if cuda_graphs else None
        self.staging = _Staging(device)

    @torch.inference_mode()
    def launch(self, step: Step) -> Sampled:
        """Run the step; on a GPU this only enqueues it."""
        ids, sources, logit_rows, slots = [], [], [], []
        for row in step.rows:
            sequence, known = row.sequence, len(row.sequence.tokens)
            if row.start + row.length <= known:
                ids += sequence.tokens[row.start : row.start + row.length]
                sources += [-1] * row.length
            else:  # the token that was sampled in the step before, not read yet
                ids.append(0)
                sources.append(sequence.slot)
            logit_rows += [len(ids) - 1] * len(row.samples)
            slots += [sequence.slot for sequence in row.samples]
        ids, sources, logit_rows, slots = self.staging.upload(ids, sources, logit_rows, slots)

        if self.graphs is not None and step.is_decode:
            logits = self.graphs.run(step.batch, ids, sources)
        else:
            batch = step.batch
            inputs = Inputs(
                token_ids=_with_newest(ids, sources, self.newest),
                positions=batch.positions,
                slot_mapping=batch.slot_mapping,
                block_table=batch.block_table,
                seq_lens=batch.seq_lens,
                cu_seqlens_q=None if step.is_decode else batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q,
                logit_rows=None if step.is_decode else logit_rows,
            )
            logits = self.forward(inputs)
        tokens = self._sample(step, logits)
        self.newest.index_copy_(0, slots, tokens)
        return self._send_home(tokens)

    def _sample(self, step: Step, logits: Tensor) -> Tensor:
        samples = step.samples
        params = [sequence.request.params for sequence in samples]
        seeds = [p.seed + sequence.index for p, sequence in zip(params, samples)]
        return sample(logits, params, seeds, [sequence.total for sequence in samples])

    def _send_home(self, tokens: Tensor) -> Sampled:
        if self.device.type == "cpu":
            return Sampled(tokens, None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Sampled(host, ready)


def _with_newest(ids: Tensor, sources: Tensor, newest: Tensor) -> Tensor:
    """``ids``, or where ``sources`` names a slot, the newest token of that slot."""
    return torch.where(sources >= 0, newest[sources.clamp(min=0)], ids)


class _Staging:
    """Host lists to int64 device tensors in one copy.

    The pinned buffers take turns: when one is written again, the step that used it has been read back.
    """

    def __init__(self, device: torch.device, turns: int = 4):
        self.device, self.turn = device, 0
        self.buffers: list[Tensor | None] = [None] * turns

    def upload(self, *lists: list[int]) -> list[Tensor]:
        flat = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int64)
        if self.device.type != "cpu":
            self.turn = (self.turn + 1) % len(self.buffers)
            pinned = self.buffers[self.turn]
            if pinned is None or pinned.numel() < flat.numel():
                pinned = torch.empty(max(4096, 2 * flat.numel()), dtype=torch.int64, pin_memory=True)
                self.buffers[self.turn] = pinned
            pinned[: flat.numel()] = flat
            flat = pinned[: flat.numel()].to(self.device, non_blocking=True)
        return list(flat.split([len(numbers) for numbers in lists]))


class DecodeGraphs:
    """The decode step as CUDA graphs, one for each number of rows in a ladder, captured at first use.

    All graphs read the same input buffers. Rows past the step's are inert: length 0, slot -1.
    """

    def __init__(self, forward: Forward, device: torch.device, newest: Tensor, max_rows: int, max_blocks: int):
        self.forward, self.newest = forward, newest
        self.ladder = sorted({1, 2, 4, *range(8, max_rows, 8), max_rows})
        self.ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sources = torch.full_like(self.ids, -1)
        self.inputs = Inputs(
            token_ids=self.ids,
            positions=torch.zeros_like(self.ids),
            slot_mapping=torch.full_like(self.ids, -1),
            block_table=torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            cu_seqlens_q=None,
            max_seqlen_q=1,
            logit_rows=None,
        )
        self.filled = 0  # rows that are not inert
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def run(self, batch, ids: Tensor, sources: Tensor) -> Tensor:
        """Logits ``[n, V]`` of a decode step; they are overwritten by the next one."""
        count = ids.numel()
        size = next(size for size in self.ladder if size >= count)
        if size not in self.graphs:
            self._make_inert(0)
            self.graphs[size] = self._capture(size)
        self._make_inert(count)
        inputs = self.inputs
        self.ids[:count].copy_(ids)
        self.sources[:count].copy_(sources)
        inputs.positions[:count].copy_(batch.positions)
        inputs.slot_mapping[:count].copy_(batch.slot_mapping)
        inputs.seq_lens[:count].copy_(batch.seq_lens)
        inputs.block_table[:count, : batch.block_table.shape[1]].copy_(batch.block_table)
        graph, logits = self.graphs[size]
        graph.replay()
        return logits[:count]

    def _make_inert(self, first: int) -> None:
        if first < self.filled:
            self.inputs.seq_lens[first : self.filled].zero_()
            self.inputs.slot_mapping[first : self.filled].fill_(-1)
            self.sources[first : self.filled].fill_(-1)
        self.filled = first

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        inputs = replace(
            self.inputs,
            positions=self.inputs.positions[:size],
            slot_mapping=self.inputs.slot_mapping[:size],
            block_table=self.inputs.block_table[:size],
            seq_lens=self.inputs.seq_lens[:size],
        )

        def decode() -> Tensor:
            inputs.token_ids = _with_newest(self.ids[:size], self.sources[:size], self.newest)
            return self.forward(inputs)

        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # once outside the graph: workspaces of this stream, compilation
            decode()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            logits = decode()
        return graph, logits
