"""Small random language models of many architectures, sharp enough that a wrong attention changes their tokens."""

from functools import lru_cache

import pytest
import torch

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
ARCHITECTURES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "num_key_value_heads": 4}),
}


@lru_cache
def tiny_model(architecture: str, device: str, seed: int = 0):
    """A model in float32; whoever uses it sets its attention implementation first."""
    config_name, options = ARCHITECTURES[architecture]
    config = getattr(transformers, config_name)(**{**COMMON, **options})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
            elif parameter.ndim > 1:
                parameter.mul_(4.0)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.to(device)


def generate(model, prompt: list[int], max_tokens: int, implementation: str = "eager", **options) -> list[int]:
    """Greedy tokens of one prompt on its own, by transformers' ``generate``."""
    model.set_attn_implementation(implementation)
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **options
    )
    return output[0, len(prompt) :].tolist()
