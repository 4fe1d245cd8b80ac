"""A small Llama with random weights, so that the examples need no download."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(device: str, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().to(device)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
