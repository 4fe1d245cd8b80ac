"""Small caches for the tests: the K/V of a token is its number, so that contents can be read back."""

import torch

import paged_attn
from paged_attn import PagedKVCache


def make(num_blocks: int = 16, *, device: str = "cpu", block_size: int = 4, **options) -> PagedKVCache:
    options = {"watermark": 0.0, "dtype": torch.float32, **options}
    return PagedKVCache(2, num_blocks, 2, 8, block_size=block_size, device=device, **options)


def write(cache: PagedKVCache, batch, values: list[float]) -> None:
    rows = torch.tensor(values, dtype=cache.dtype, device=cache.device)[:, None, None].expand(-1, 2, 8)
    for i in range(cache.num_layers):
        k_scale, v_scale = cache.scales(i) if cache.kv_dtype else (None, None)
        paged_attn.write_kv(
            rows + i, rows + i + 0.5, *cache.layer(i), batch.slot_mapping, k_scale=k_scale, v_scale=v_scale
        )


def run(cache: PagedKVCache, seq_id, tokens) -> list[tuple[int, int]]:
    """A step: prepare, write each token's number as its K/V, commit. Returns the blocks copied."""
    tokens = list(tokens)
    batch = cache.prepare([seq_id], [len(tokens)])
    write(cache, batch, tokens)
    cache.commit(seq_id, tokens)
    return [tuple(pair) for pair in batch.copies.tolist()]


def add_and_run(cache: PagedKVCache, seq_id, tokens, salt=None) -> int:
    tokens = list(tokens)
    hits = cache.add(seq_id, tokens, salt)
    run(cache, seq_id, tokens[hits:])
    return hits


def hits(cache: PagedKVCache, tokens, salt=None) -> int:
    found = cache.add("probe", list(tokens), salt)
    cache.free("probe")
    return found


def holders(cache: PagedKVCache, seq_id) -> list[int]:
    counts, _ = cache._manager.snapshot()
    return [int(counts[block]) for block in cache.block_ids(seq_id)]


def contents(cache: PagedKVCache, seq_id) -> list[float]:
    """What K/V say the tokens are, after checking that layers, heads, K and V agree."""
    as_int32 = {"dtype": torch.int32, "device": cache.device}
    table, length = (
        torch.tensor([cache.block_ids(seq_id)], **as_int32),
        torch.tensor([cache.length(seq_id)], **as_int32),
    )
    found = []
    for i in range(cache.num_layers):
        keys, values = paged_attn.gather_kv(*cache.layer(i), table, length)
        assert torch.equal(values, keys + 0.5)
        assert torch.equal(keys, keys[:, :1, :1].expand_as(keys))
        found.append((keys[:, 0, 0] - i).tolist())
    assert found[0] == found[1]
    return found[0]
