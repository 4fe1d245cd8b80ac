"""Inputs that show mistakes, and comparisons that see them.

Inputs are peaky (with a flat softmax a kernel may ignore the query or drop a block and still pass), block ids are
scattered, every slot that belongs to no token is poisoned, and unused table entries hold garbage.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from . import reference

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
LAYOUTS = ("NHD", "HND", "interleaved")
SCALE_KINDS = ("tensor", "head", "token_head")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-12}
GARBAGE_IDS = (-1, "num_blocks", 2**31 - 1)

_INT8_STEP = 1 / 32


@dataclass(frozen=True)
class Batch:
    """The tensors of one ``paged_attention`` call."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def run(self, op: Callable[..., Any], **options: Any) -> Any:
        """Call ``op`` with these tensors; ``options`` go beside them or in their place."""
        named = {"cu_seqlens_q": self.cu_seqlens_q, "k_scale": self.k_scale, "v_scale": self.v_scale}
        named = {name: tensor for name, tensor in named.items() if tensor is not None}
        return op(self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, **(named | options))

    def expected(self, **options: Any) -> Any:
        """The reference's result."""
        return self.run(reference.paged_attention, **options)

    def to(self, device: str) -> "Batch":
        """The same numbers on ``device``, each tensor with its strides."""
        fields = {name: None if value is None else to_device(value, device) for name, value in vars(self).items()}
        return replace(self, **fields)


def to_device(tensor: Tensor, device: str) -> Tensor:
    """Move a tensor and keep its strides."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def make_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    """Two zeroed ``[NB, BS, Hkv, D]`` views of the given storage: NHD, HND, or K and V interleaved block by block."""
    if layout == "interleaved":
        storage = torch.zeros(num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
        return storage.unbind(1)
    if layout == "NHD":
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    if layout == "HND":
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        key, value = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
        return key.transpose(1, 2), value.transpose(1, 2)
    raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")


def make_table(
    seq_lens: Sequence[int], block_size: int, *, garbage: int | str = -1, spare_blocks: int = 3, seed: int = 0
) -> tuple[Tensor, int]:
    """A block table of scattered ids with two spare columns, and the number of blocks it needs, spare ones included."""
    blocks_of = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(blocks_of) + spare_blocks
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()
    fill = num_blocks if garbage == "num_blocks" else garbage
    table = torch.full((len(seq_lens), max(blocks_of, default=0) + 2), fill, dtype=torch.int32)
    for row, start, count in zip(table, accumulate(blocks_of, initial=0), blocks_of, strict=False):
        row[:count] = ids[start : start + count]
    return table, num_blocks


def page(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    query_lens: Sequence[int] | None = None,
    block_size: int = 16,
    layout: str = "NHD",
    cache_dtype: torch.dtype | None = None,
    scale_kind: str | None = None,
    poison: float = math.nan,
    poison_key: bool = True,
    poison_value: bool = True,
    garbage: int | str = -1,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """Put each sequence's float32 ``[L, Hkv, D]`` keys and values into blocks.

    Args:
        query: ``[T, Hq, D]``; its dtype is the cache's unless ``cache_dtype`` says otherwise.
        scale_kind: None, "tensor", "head" or "token_head": random scales for a quantised cache.
        poison: what fills every slot without a token, of keys and values as ``poison_key`` and ``poison_value`` say.
    """
    seq_lens = [len(tokens) for tokens in keys]
    table, num_blocks = make_table(seq_lens, block_size, garbage=garbage, seed=seed)
    num_kv_heads, head_dim = keys[0].shape[1:]
    cache_dtype = cache_dtype or query.dtype
    generator = torch.Generator().manual_seed(seed + 1)

    def fill(cache: Tensor, tokens_of: Sequence[Tensor], poisoned: bool) -> Tensor | None:
        rest = poison if poisoned else 0.0
        staged = torch.full(cache.shape, rest)
        scale = _random_scale(scale_kind, cache.shape, generator)
        if scale_kind == "token_head":
            scale_poison = torch.full(cache.shape[:3], rest)
        for row, tokens in zip(table, tokens_of, strict=True):
            position = torch.arange(len(tokens))
            blocks, offsets = row[position // block_size].long(), position % block_size
            staged[blocks, offsets] = tokens.float()
            if scale_kind == "token_head":
                scale_poison[blocks, offsets] = scale[blocks, offsets]
        if cache_dtype == torch.int8:
            staged = (staged / _INT8_STEP).round().nan_to_num(nan=127.0).clamp(-127, 127)
            scale = _INT8_STEP * (torch.ones(1) if scale is None else scale)
            if scale_kind == "token_head":
                scale_poison *= _INT8_STEP
        cache.copy_(staged.to(cache_dtype))
        if scale_kind != "token_head":
            return scale
        # Stored as the cache is, so that HND tests strides.
        return scale_poison.transpose(1, 2).contiguous().transpose(1, 2) if layout == "HND" else scale_poison

    key_cache, value_cache = make_cache(
        num_blocks, block_size, num_kv_heads, head_dim, dtype=cache_dtype, layout=layout
    )
    k_scale = fill(key_cache, keys, poison_key)
    v_scale = fill(value_cache, values, poison_value)
    starts = None if query_lens is None else torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    batch = Batch(
        query, key_cache, value_cache, table, torch.tensor(seq_lens, dtype=torch.int32), starts, k_scale, v_scale
    )
    return batch.to(device)


def _random_scale(kind: str | None, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
    if kind is None:
        return None
    sizes = {"tensor": (1,), "head": shape[2:3], "token_head": shape[:3]}
    return 0.5 + torch.rand(sizes[kind], generator=generator)


def peaky_batch(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    padding_rows: int = 0,
    spread: float = 3.0,
    seed: int = 0,
    **paging: Any,
) -> Batch:
    """Random sequences whose scores, at the default scale, have a standard deviation of ``spread``.

    Args:
        padding_rows: rows of ``query`` past ``cu_seqlens_q[-1]``, poisoned.
        paging: arguments of :func:`page`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_tokens = len(seq_lens) if query_lens is None else sum(query_lens)
    query = spread * normal(num_tokens, num_heads, head_dim)
    query = torch.cat([query, torch.full((padding_rows, num_heads, head_dim), math.nan)])
    keys = [normal(length, num_kv_heads, head_dim) for length in seq_lens]
    values = [normal(length, num_kv_heads, head_dim) for length in seq_lens]
    return page(query.to(dtype), keys, values, query_lens=query_lens, seed=seed, **paging)


def flat_batch(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    one_hot: bool = False,
    padding_rows: int = 0,
    **paging: Any,
) -> Batch:
    """Keys 0, query 1, value of token t is t + 1: a row that sees tokens a .. b gives the mean of a + 1 .. b + 1.

    With ``one_hot`` only the first token's value is 1, the others 0: the output is 1 / (number of keys).
    """
    num_tokens = padding_rows + (len(seq_lens) if query_lens is None else sum(query_lens))
    query = torch.ones(num_tokens, num_heads, head_dim, dtype=dtype)
    keys = [torch.zeros(length, num_kv_heads, head_dim) for length in seq_lens]
    numbers = [torch.arange(1.0, length + 1) for length in seq_lens]
    if one_hot:
        numbers = [(number == 1).float() for number in numbers]
    values = [number.view(-1, 1, 1).expand(-1, num_kv_heads, head_dim) for number in numbers]
    return page(query, keys, values, query_lens=query_lens, **paging)


def assert_close(actual: Tensor, expected: Tensor | float | Sequence[Any], *, tolerance: float | None = None) -> None:
    """Three comparisons: where values are not finite, each element, and the direction of the whole.

    Args:
        expected: tensor, number or nested list, broadcast to ``actual`` from the left.
        tolerance: bound on ``|actual - expected| / (1 + |expected|)``; by default that of the dtype of ``actual``.

    Raises:
        AssertionError: naming the first comparison that fails and the worst place.
    """
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    actual = actual.detach().cpu().double()
    expected = torch.as_tensor(expected).detach().cpu().double()
    expected = expected.reshape(*expected.shape, *[1] * (actual.dim() - expected.dim())).expand_as(actual)
    if actual.numel() == 0:
        return
    for name, test in (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf)):
        differs = test(actual) != test(expected)
        assert not differs.any(), f"{name} in {int(differs.sum())} wrong places, the first at {_first(differs)}"
    finite = torch.isfinite(expected)
    actual, expected = actual.where(finite, 0.0), expected.where(finite, 0.0)

    error = (actual - expected).abs() / (1 + expected.abs())
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    assert error.max() <= tolerance, (
        f"{int((error > tolerance).sum())} of {error.numel()} elements differ, the most at {worst}: "
        f"got {actual[worst]:.7g}, expected {expected[worst]:.7g}, error {error.max():.3g} > {tolerance:.3g}"
    )
    norms = actual.norm() * expected.norm()
    cosine_difference = 1 - float((actual * expected).sum() / norms) if norms > 0 else 0.0
    assert cosine_difference <= max(tolerance**2, 1e-12), f"cosine difference {cosine_difference:.3g}"


class Refusal:
    """Whether the call under :func:`or_refused` was refused."""

    refused = False


@contextmanager
def or_refused(*arguments: str) -> Iterator[Refusal]:
    """The call inside may be refused, by an error that names one of ``arguments``; any other error passes through."""
    outcome = Refusal()
    try:
        yield outcome
    except (TypeError, ValueError) as error:
        if not any(argument in str(error) for argument in arguments):
            raise
        outcome.refused = True


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal shape, dtype and bytes, NaN payloads included."""
    assert actual.dtype == expected.dtype, f"got {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    differs = (bits(actual) != bits(expected)).cpu()
    assert not differs.any(), (
        f"{int(differs.sum())} of {differs.numel()} elements differ, the first at {_first(differs)}"
    )


def bits(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, its bytes read as integers."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(integers[tensor.element_size()]).clone()


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
