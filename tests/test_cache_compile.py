"""PagedKVCache's tensors under torch.compile."""

import torch

import paged_attn
from paged_attn import PagedKVCache


def two_layers(key, value, query, layers, slots, table, lens, cu):
    for key_cache, value_cache in layers:
        paged_attn.write_kv(key + query.mean(), value, key_cache, value_cache, slots)
        query = paged_attn.paged_attention(query, key_cache, value_cache, table, lens, cu_seqlens_q=cu)
    return query


def test_inductor_with_dynamic_shapes_keeps_every_write():
    torch._dynamo.reset()
    compiled = torch.compile(two_layers, fullgraph=True, dynamic=True)
    caches = [PagedKVCache(2, 8, 2, 16, block_size=4, dtype=torch.float32, device="cpu") for _ in range(2)]
    layers, plain_layers = ([cache.layer(i) for i in range(2)] for cache in caches)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    for tokens in (5, 7, 6):
        key, value, query = torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 4, 16)
        lens, cu = torch.tensor([tokens], dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
        step = (torch.arange(tokens), table, lens, cu)
        output, expected = (
            compiled(key, value, query, layers, *step),
            two_layers(key, value, query, plain_layers, *step),
        )
        torch.testing.assert_close(output, expected)
        for layer, plain in zip(layers, plain_layers):
            torch.testing.assert_close(layer, plain)
