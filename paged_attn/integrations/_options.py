"""What a transformers attention module asks for, as keywords of ``paged_attention``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

TRANSFORMERS_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
if TRANSFORMERS_VERSION < (5, 17):
    raise ImportError(f"paged_attn needs transformers 5.17 or newer, found {transformers.__version__}")

# Keywords that say nothing about the scores of this library's callers: names transformers passes along.
_WITHOUT_EFFECT = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "deterministic",
    "num_items_in_batch",
    "logits_to_keep",
    "past_key_values",
    "hidden_states",
    "layer_idx",
    "token_type_ids",
    "block_table",
    "labels",
}


@dataclass(frozen=True)
class AttentionOptions:
    """Scale, mask, cap and sinks of one layer."""

    scale: float
    causal: bool
    window_size: int | None
    softcap: float
    sinks: Tensor | None

    @staticmethod
    def of(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict) -> AttentionOptions:
        """Read the keywords of transformers' attention call; refuse, by name, what the ops do not offer.

        Raises:
            ValueError: dropout, a bias, returned weights, or a keyword this adapter does not know.
        """
        rest = {name: setting for name, setting in kwargs.items() if setting is not None}
        if rest.pop("dropout", 0.0) > 0.0:
            raise ValueError("dropout: paged_attn has none; call model.eval()")
        if rest.pop("output_attentions", False):
            raise ValueError("output_attentions: paged_attn does not keep attention weights; use eager")
        if value.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"value: paged_attn needs the head dimension of the keys, {key.shape[-1]}, got {value.shape[-1]}"
            )
        is_causal = rest.pop("is_causal", getattr(module, "is_causal", True))
        sinks = rest.pop("s_aux", None)
        options = AttentionOptions(
            scale=rest.pop("scaling", query.shape[-1] ** -0.5),
            causal=bool(is_causal),
            window_size=rest.pop("sliding_window", None) if is_causal else None,
            softcap=float(rest.pop("softcap", 0.0)),
            sinks=None if sinks is None else sinks.detach().float(),
        )
        if "sliding_window" in rest:
            raise ValueError("sliding_window: paged_attn has a window for causal attention only")
        for name, setting in rest.items():
            if name not in _WITHOUT_EFFECT and setting is not False:
                raise ValueError(f"{name}: {type(module).__name__} asks for it and paged_attn does not offer it")
        return options

    def as_kwargs(self) -> dict:
        return {
            "scale": self.scale,
            "causal": self.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }

    def check_mask(self, mask: Tensor) -> None:
        """With a window, refuse rows with holes: packing the tokens that count would move the window."""
        if self.window_size is None:
            return
        steps = mask[:, 1:].int() - mask[:, :-1].int()
        if ((steps == 1).sum(-1) + mask[:, 0].int() > 1).any():
            raise ValueError("attention_mask: with a sliding window, each row's tokens must be contiguous")
