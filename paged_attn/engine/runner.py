"""From a step's rows to sampled tokens: inputs, CUDA graphs, sampling, and tokens read back one step late."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_attn.engine.graphs import CaptureFailed, StepGraphs
from paged_attn.engine.models import Forward, Inputs, with_newest
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

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_blocks: int,
        cuda_graphs: bool,
    ):
        self.forward, self.device = forward, device
        self.newest = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.staging = _Staging(device)
        self.graphs = None
        if cuda_graphs:
            self.graphs = StepGraphs(forward, self.newest, max_num_seqs, max_batch_tokens, max_blocks)

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

        logits = self._forward(step, ids, sources, logit_rows)
        tokens = self._sample(step, logits)
        self.newest.index_copy_(0, slots, tokens)
        return self._send_home(tokens)

    def _forward(self, step: Step, ids: Tensor, sources: Tensor, logit_rows: Tensor) -> Tensor:
        batch = step.batch
        if self.graphs is not None and self.graphs.has_room(step.is_decode, ids.numel()):
            try:
                return self.graphs.run(batch, step.is_decode, ids, sources, logit_rows)
            except CaptureFailed as error:
                warnings.warn(
                    "cuda_graphs: the model's forward pass does something that cannot be captured, so its kernels are "
                    "launched one by one; Engine(cuda_graphs=False) asks for that. A mixture of experts can be "
                    f'captured after model.set_experts_implementation("batched_mm"). Torch says: {error}',
                    stacklevel=2,
                )
                self.graphs = None
        return self.forward(
            Inputs(
                token_ids=with_newest(ids, sources, self.newest),
                positions=batch.positions,
                slot_mapping=batch.slot_mapping,
                block_table=batch.block_table,
                seq_lens=batch.seq_lens,
                cu_seqlens_q=None if step.is_decode else batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q,
                logit_rows=None if step.is_decode else logit_rows,
            )
        )

    def _sample(self, step: Step, logits: Tensor) -> Tensor:
        samples = step.samples
        params = [sequence.request.params for sequence in samples]
        seeds = [p.seed + sequence.index for p, sequence in zip(params, samples)]
        return sample(logits, params, seeds, [sequence.total for sequence in samples])

    def _send_home(self, tokens: Tensor) -> Sampled:
        if self.device.type == "cpu":
            return Sampled(tokens, None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Sampled(host, ready)


class _Staging:
    """Host lists to int64 device tensors in one copy.

    The pinned buffers take turns: when one is written again, the step that used it has been read back.
    """

    def __init__(self, device: torch.device, turns: int = 4):
        self.device, self.turn = device, 0
        self.buffers: list[Tensor | None] = [None] * turns

    def upload(self, *lists: list[int]) -> list[Tensor]:
        flat = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int64, device="cpu")
        if self.device.type != "cpu":
            self.turn = (self.turn + 1) % len(self.buffers)
            pinned = self.buffers[self.turn]
            if pinned is None or pinned.numel() < flat.numel():
                pinned = torch.empty(max(4096, 2 * flat.numel()), dtype=torch.int64, device="cpu", pin_memory=True)
                self.buffers[self.turn] = pinned
            pinned[: flat.numel()] = flat
            flat = pinned[: flat.numel()].to(self.device, non_blocking=True)
        return list(flat.split([len(numbers) for numbers in lists]))
