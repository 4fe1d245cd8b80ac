"""A minimal attention layer on PagedKVCache in plain PyTorch: prefill, then one token at a time."""

import torch
from torch import nn

from paged_attn import PagedKVCache, paged_attention, write_kv


class PagedSelfAttention(nn.Module):
    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, cache: PagedKVCache, layer: int):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, hidden // num_heads
        self.qkv = nn.Linear(hidden, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.key_cache, self.value_cache = cache.layer(layer)  # [num_blocks, block_size, num_kv_heads, head_dim]

    def forward(self, x: torch.Tensor, step) -> torch.Tensor:  # x: [tokens of all sequences, hidden]
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        write_kv(key, value, self.key_cache, self.value_cache, step.slot_mapping)
        tables = (step.block_table, step.seq_lens)
        y = paged_attention(query, self.key_cache, self.value_cache, *tables, cu_seqlens_q=step.cu_seqlens_q)
        return self.out(y.flatten(1))


def main(device: str = "cuda" if torch.cuda.is_available() else "cpu") -> torch.Tensor:
    torch.manual_seed(0)
    cache = PagedKVCache(1, 32, num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.float32, device=device)
    layer = PagedSelfAttention(64, num_heads=4, num_kv_heads=2, cache=cache, layer=0).to(device)
    prompts = {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8, 9, 10, 11, 12, 13, 14, 15]}
    for seq_id, tokens in prompts.items():
        cache.add(seq_id, tokens)
    with torch.no_grad():
        step = cache.prepare(["a", "b"], [5, 10])  # both prompts in one call
        layer(torch.randn(15, 64, device=device), step)
        for seq_id, tokens in prompts.items():
            cache.commit(seq_id, tokens)
        for token in range(3):  # then a token each
            step = cache.prepare(["a", "b"], [1, 1])
            y = layer(torch.randn(2, 64, device=device), step)
            for seq_id in prompts:
                cache.commit(seq_id, [100 + token])
    print(f"lengths {[cache.length(seq_id) for seq_id in prompts]}, output {tuple(y.shape)}")
    print(cache.describe())
    return y


if __name__ == "__main__":
    main()
