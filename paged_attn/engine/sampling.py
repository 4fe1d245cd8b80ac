"""Next tokens from logits. Noise comes from a hash of (seed, position, token), so a sample does not depend on the
batch it ran in, on preemption, or on the device."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from paged_attn.engine.request import SamplingParams


def sample(logits: Tensor, params: Rows[SamplingParams], seeds: Rows[int], positions: Rows[int]) -> Tensor:
    """One token a row, int64 ``[R]``, from ``logits [R, V]``. ``seeds`` and ``positions`` choose each row's noise."""
    greedy = _argmax(logits)
    if all(p.temperature == 0.0 for p in params):
        return greedy

    def column(numbers: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device="cpu").to(logits.device, non_blocking=True)[:, None]

    temperature = column([p.temperature for p in params], torch.float32)
    scores = logits.float() / temperature.clamp(min=1e-6)
    if any(p.top_k or p.top_p < 1.0 for p in params):
        vocab = logits.shape[-1]
        top_k = column([p.top_k or vocab for p in params], torch.int64)
        top_p = column([p.top_p for p in params], torch.float32)
        scores = _keep_likeliest(scores, top_k, top_p)
    noise = gumbel_noise(column(list(seeds), torch.int64), column(list(positions), torch.int64), logits.shape[-1])
    return torch.where(temperature[:, 0] == 0.0, greedy, (scores + noise).argmax(-1))


def _argmax(logits: Tensor, parts: int = 64) -> Tensor:
    """The first largest of each row, in two rounds: one row alone would keep a single block of a GPU busy."""
    rows, vocab = logits.shape
    if vocab % parts:
        return logits.argmax(-1)
    best, place = logits.view(rows, parts, vocab // parts).max(-1)
    part = best.argmax(-1, keepdim=True)
    return (part * (vocab // parts) + place.gather(1, part))[:, 0]


def _keep_likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf for all but the ``top_k`` likeliest tokens, and the fewest of them whose probability reaches ``top_p``."""
    ordered, tokens = scores.sort(dim=-1, descending=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, tokens, ordered)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise ``[R, vocab]``: scores + noise is largest at a token with its softmax probability."""
    keys = _mix(seeds + _mix(positions))
    hashed = _mix(keys + torch.arange(vocab, device=keys.device))
    uniform = ((hashed & 0xFFFFFF).double() + 0.5) / (1 << 24)
    return -(-uniform.log()).log().float()


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64, whose products wrap."""
    x = x + -0x61C8864680B583EB
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that brings in zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
