"""How the engine runs a model: any transformers causal LM through the attention hook, Llama-shaped ones as llama.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import paged_attn


@dataclass
class Inputs:
    """One forward pass over T tokens of S sequences. Rows of ``seq_lens`` 0 and slots of -1 are padding."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    block_table: Tensor  # int32 [S, M]
    seq_lens: Tensor  # int32 [S]
    cu_seqlens_q: Tensor | None  # int32 [S + 1]; None: one token a sequence
    max_seqlen_q: int
    logit_rows: Tensor | None  # int64 [R], tokens whose logits are wanted; None: all


Forward = Callable[[Inputs], Tensor]  # logits [R, V]


def with_newest(ids: Tensor, sources: Tensor, newest: Tensor) -> Tensor:
    """``ids``, or where ``sources`` names a slot, the newest token of that slot."""
    return torch.where(sources >= 0, newest[sources.clamp(min=0)], ids)


def make_forward(model: torch.nn.Module, cache: paged_attn.PagedKVCache, fused: bool | None, compile: bool) -> Forward:
    """The model's forward pass over ``cache``. ``fused``: None decides by the model, True insists."""
    from paged_attn.engine.llama import LlamaForward

    if fused is None:
        fused = LlamaForward.supports(model)
    elif fused and not LlamaForward.supports(model):
        raise ValueError(f"fused: {type(model).__name__} is not a Llama-shaped model")
    if fused:
        return LlamaForward(model, cache, compile)
    if compile:
        raise ValueError(f"compile: expected a Llama-shaped model, got {type(model).__name__}")
    return TransformersForward(model, cache)


class TransformersForward:
    """A transformers model as it is: its attention calls end in the page writer below."""

    def __init__(self, model: torch.nn.Module, cache: paged_attn.PagedKVCache):
        from paged_attn.integrations import transformers as integration

        integration.register()
        model.set_attn_implementation(integration.NAME)
        self.model = model
        self.writer = integration.StepCache(cache)

    def __call__(self, inputs: Inputs) -> Tensor:
        self.writer.inputs = inputs
        logits = self.model(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            past_key_values=self.writer,
            use_cache=True,
            logits_to_keep=0 if inputs.logit_rows is None else inputs.logit_rows,
        ).logits
        return logits[0]
