"""A forward pass of its own for Llama-shaped models: joint projections, few kernels, nothing between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import paged_attn
from paged_attn.engine.models import Inputs


@dataclass
class _Projection:
    """A norm and the linear map behind it: queries, keys and values of a layer, or the logits."""

    norm: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass
class _Layer:
    key_cache: Tensor
    value_cache: Tensor
    scales: dict[str, Tensor]  # of a quantised cache
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor
    next: _Projection


class LlamaForward:
    """Llama, Mistral without a window and Qwen2, the arithmetic of transformers.

    Joint weights replace the model's own, which become views of them: no weight is held twice. ``compile`` hands all
    that lies between two attention calls to torch.compile.
    """

    def __init__(self, model: torch.nn.Module, cache: paged_attn.PagedKVCache, compile: bool):
        from paged_attn.integrations.transformers import scale_options

        config, base = model.config, model.model
        self.heads = [config.num_attention_heads, cache.num_kv_heads, cache.num_kv_heads]
        self.head_dim, self.eps = cache.head_dim, config.rms_norm_eps
        self.scale = base.layers[0].self_attn.scaling
        self.embedding = base.embed_tokens.weight
        positions = torch.arange(config.max_position_embeddings, device=model.device)[None]
        halves = [table[0, :, : self.head_dim // 2] for table in base.rotary_emb(base.norm.weight, positions)]
        self.cos_sin = torch.cat(halves, dim=-1)

        projections = [_join_qkv(layer) for layer in base.layers]
        projections.append(_Projection(base.norm.weight, model.lm_head.weight, None))
        self.first = projections[0]
        self.layers = [
            _Layer(
                *cache.layer(i),
                scale_options(cache, i),
                output=layer.self_attn.o_proj.weight,
                mlp_norm=layer.post_attention_layernorm.weight,
                gate_up=_join([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                down=layer.mlp.down_proj.weight,
                next=projections[i + 1],
            )
            for i, layer in enumerate(base.layers)
        ]
        self.after_attention = torch.compile(_after_attention, dynamic=True) if compile else _after_attention

    @staticmethod
    def supports(model: torch.nn.Module) -> bool:
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            config.model_type in ("llama", "mistral", "qwen2")
            and type(model).__name__.endswith("ForCausalLM")
            and config.hidden_act == "silu"
            and not _has_window(config)
            and not getattr(config, "mlp_bias", False)
            and rope.get("rope_type", "default") in ("default", "linear", "llama3")
            and all(type(module) is torch.nn.Linear for module in _linears(model))
            and all(layer.self_attn.o_proj.bias is None for layer in model.model.layers)
        )

    def __call__(self, inputs: Inputs) -> Tensor:
        hidden = F.embedding(inputs.token_ids, self.embedding)
        projected = _project(hidden, self.first.norm, self.first.weight, self.first.bias, self.eps)
        for i, layer in enumerate(self.layers):
            attended = self._attend(layer, projected, inputs, metadata_ready=i > 0)
            if i == len(self.layers) - 1 and inputs.logit_rows is not None:
                hidden, attended = hidden[inputs.logit_rows], attended[inputs.logit_rows]
            hidden, projected = self.after_attention(
                attended,
                hidden,
                layer.output,
                layer.mlp_norm,
                layer.gate_up,
                layer.down,
                layer.next.norm,
                layer.next.weight,
                layer.next.bias,
                self.eps,
            )
        return projected

    def _attend(self, layer: _Layer, projected: Tensor, inputs: Inputs, metadata_ready: bool) -> Tensor:
        query, key, value = projected.view(-1, sum(self.heads), self.head_dim).split(self.heads, dim=1)
        pages = (layer.key_cache, layer.value_cache)
        paged_attn.rope_write_kv(
            query, key, value, inputs.positions, self.cos_sin, *pages, inputs.slot_mapping, **layer.scales
        )
        return paged_attn.paged_attention(
            query,
            *pages,
            inputs.block_table,
            inputs.seq_lens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_seqlen_q,
            scale=self.scale,
            metadata_ready=metadata_ready,
            **layer.scales,
        ).flatten(1)


def _project(hidden: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.linear(F.rms_norm(hidden, norm.shape, norm, eps), weight, bias)


def _after_attention(
    attended: Tensor,
    hidden: Tensor,
    output: Tensor,
    mlp_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    next_norm: Tensor,
    next_weight: Tensor,
    next_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """From attention to the next projection: ``hidden`` after this layer, and what the next attention call takes."""
    hidden = _accumulate(hidden, attended, output)
    gate, up = _project(hidden, mlp_norm, gate_up, None, eps).chunk(2, dim=-1)
    hidden = _accumulate(hidden, F.silu(gate) * up, down)
    return hidden, _project(hidden, next_norm, next_weight, next_bias, eps)


def _accumulate(hidden: Tensor, states: Tensor, weight: Tensor) -> Tensor:
    """``hidden`` plus a linear map of ``states``: inside the matrix product, or by a kernel that the compiler fuses."""
    if torch.compiler.is_compiling():
        return hidden + F.linear(states, weight)
    return hidden.addmm_(states, weight.t())


def _has_window(config) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def _linears(model: torch.nn.Module):
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _join_qkv(layer: torch.nn.Module) -> _Projection:
    modules = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    bias = None if modules[0].bias is None else _join([module.bias for module in modules])
    return _Projection(layer.input_layernorm.weight, _join([module.weight for module in modules]), bias)


def _join(parameters: list[torch.nn.Parameter]) -> torch.nn.Parameter:
    """All rows in one tensor, of which the parameters become views."""
    sizes = [parameter.shape[0] for parameter in parameters]
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joint.split(sizes)):
        parameter.data = part
    return torch.nn.Parameter(joint, requires_grad=False)
