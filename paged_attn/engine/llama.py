"""A forward pass of its own for Llama-shaped models: joint projections and few kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import paged_attn
from paged_attn.engine.models import Inputs


@dataclass
class _Layer:
    key_cache: Tensor
    value_cache: Tensor
    scales: dict[str, Tensor]  # of a quantised cache
    input_norm: Tensor
    qkv: Tensor  # [(Hq + 2 Hkv) D, hidden]
    qkv_bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor


class LlamaForward:
    """Llama, Mistral without a window and Qwen2, the arithmetic of transformers.

    Joint weights replace the model's own, which become views of them: no weight is held twice. Residual sums happen
    inside the matrix products. ``compile`` hands the norms and the gate, a few kernels each, to torch.compile.
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

        self.norm, self.lm_head = base.norm.weight, model.lm_head.weight
        self.layers = []
        for i, layer in enumerate(base.layers):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
            self.layers.append(
                _Layer(
                    *cache.layer(i),
                    scale_options(cache, i),
                    input_norm=layer.input_layernorm.weight,
                    qkv=_join([module.weight for module in qkv]),
                    qkv_bias=None if qkv[0].bias is None else _join([module.bias for module in qkv]),
                    output=attention.o_proj.weight,
                    mlp_norm=layer.post_attention_layernorm.weight,
                    gate_up=_join([mlp.gate_proj.weight, mlp.up_proj.weight]),
                    down=mlp.down_proj.weight,
                )
            )
        self.rms_norm, self.gate = _rms_norm, _gate
        if compile:
            self.rms_norm, self.gate = (torch.compile(f, dynamic=True) for f in (_rms_norm, _gate))

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
        for i, layer in enumerate(self.layers):
            projected = F.linear(self.rms_norm(hidden, layer.input_norm, self.eps), layer.qkv, layer.qkv_bias)
            attended = self._attend(layer, projected, inputs, metadata_ready=i > 0)
            if i == len(self.layers) - 1 and inputs.logit_rows is not None:
                hidden, attended = hidden[inputs.logit_rows], attended[inputs.logit_rows]
            hidden.addmm_(attended, layer.output.t())
            gate_up = F.linear(self.rms_norm(hidden, layer.mlp_norm, self.eps), layer.gate_up)
            hidden.addmm_(self.gate(gate_up), layer.down.t())
        return F.linear(self.rms_norm(hidden, self.norm, self.eps), self.lm_head)

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


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden, weight.shape, weight, eps)


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


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


def _join(parameters: list[torch.nn.Parameter]) -> Tensor:
    """All rows in one tensor, of which the parameters become views."""
    sizes = [parameter.shape[0] for parameter in parameters]
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joint.split(sizes)):
        parameter.data = part
    return joint
