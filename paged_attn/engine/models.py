"""How the engine runs a model: any transformers causal LM through the attention hook, Llama-shaped ones fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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


def make_forward(model: torch.nn.Module, cache: paged_attn.PagedKVCache, fused: bool | None, compile: bool) -> Forward:
    """The model's forward pass over ``cache``. ``fused``: None decides by the model, True insists."""
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


@dataclass
class _Layer:
    input_norm: Tensor
    qkv: Tensor  # [(Hq + 2 Hkv) D, hidden]
    qkv_bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scales: dict[str, Tensor]


class LlamaForward:
    """Llama, Mistral without a window and Qwen2: the same arithmetic with joint projections and few kernels.

    The joint weights replace the model's own, which become views of them: no weight is held twice.
    """

    def __init__(self, model: torch.nn.Module, cache: paged_attn.PagedKVCache, compile: bool):
        config, base = model.config, model.model
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            cache.num_kv_heads,
            cache.head_dim,
        )
        self.eps = config.rms_norm_eps
        self.scale = base.layers[0].self_attn.scaling
        self.embedding, self.norm, self.lm_head = base.embed_tokens.weight, base.norm.weight, model.lm_head.weight
        self.layers = [self._fuse(layer, cache, i) for i, layer in enumerate(base.layers)]
        positions = torch.arange(config.max_position_embeddings, device=model.device)[None]
        halves = [table[0, :, : self.head_dim // 2] for table in base.rotary_emb(self.norm, positions)]
        self.cos_sin = torch.cat(halves, dim=-1)
        self.run_layer = torch.compile(self._layer, dynamic=True) if compile else self._layer

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
            and all(type(module) is torch.nn.Linear for module in _projections(model))
            and all(layer.self_attn.o_proj.bias is None for layer in model.model.layers)
        )

    @staticmethod
    def _fuse(layer: torch.nn.Module, cache: paged_attn.PagedKVCache, index: int) -> _Layer:
        from paged_attn.integrations.transformers import scale_options

        key_cache, value_cache = cache.layer(index)
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=_join([module.weight for module in qkv]),
            qkv_bias=None if qkv[0].bias is None else _join([module.bias for module in qkv]),
            output=attention.o_proj.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=_join([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight,
            key_cache=key_cache,
            value_cache=value_cache,
            scales=scale_options(cache, index),
        )

    def __call__(self, inputs: Inputs) -> Tensor:
        hidden = F.embedding(inputs.token_ids, self.embedding)
        for i, layer in enumerate(self.layers):
            hidden = self.run_layer(layer, hidden, inputs, i > 0)
        if inputs.logit_rows is not None:
            hidden = hidden[inputs.logit_rows]
        return F.linear(F.rms_norm(hidden, self.norm.shape, self.norm, self.eps), self.lm_head)

    def _layer(self, w: _Layer, hidden: Tensor, inputs: Inputs, metadata_ready: bool) -> Tensor:
        normed = F.rms_norm(hidden, w.input_norm.shape, w.input_norm, self.eps)
        qkv = F.linear(normed, w.qkv, w.qkv_bias).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        paged_attn.rope_write_kv(
            query,
            key,
            value,
            inputs.positions,
            self.cos_sin,
            w.key_cache,
            w.value_cache,
            inputs.slot_mapping,
            **w.scales,
        )
        attended = paged_attn.paged_attention(
            query,
            w.key_cache,
            w.value_cache,
            inputs.block_table,
            inputs.seq_lens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_seqlen_q,
            scale=self.scale,
            metadata_ready=metadata_ready,
            **w.scales,
        )
        hidden = hidden.addmm_(attended.flatten(1), w.output.t())
        normed = F.rms_norm(hidden, w.mlp_norm.shape, w.mlp_norm, self.eps)
        gate, up = F.linear(normed, w.gate_up).chunk(2, dim=-1)
        return hidden.addmm_(F.silu(gate).mul_(up), w.down.t())


def _has_window(config) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def _projections(model: torch.nn.Module):
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _join(parameters: list[torch.nn.Parameter]) -> Tensor:
    """One tensor of all rows; the parameters become views of it."""
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joint.split([parameter.shape[0] for parameter in parameters])):
        parameter.data = part
    return joint
