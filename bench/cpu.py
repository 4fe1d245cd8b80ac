"""Paged attention on the CPU beside gathering the pages and calling torch's scaled_dot_product_attention.

The kernel reads an HND cache (the default of PagedKVCache). Gathering reads an NHD cache, from which the pages come out
as SDPA takes them; decode folds the query heads of a group into query rows, the fastest way to call SDPA there. All
columns of a row are timed in turn within one run. Run from the repository's root: ``python -m bench.cpu``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import paged_attn
from bench import common
from paged_attn.cli._arguments import positive
from paged_attn.cli._models import DTYPES

KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``length`` tokens, the last ``query_len`` of which attend."""

    name: str
    batch: int
    length: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.length * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def cases(dtype: torch.dtype) -> list[Case]:
    return [
        Case("SmolLM2 decode, 8 x 4096", 8, 4096, 1, 9, 3, 64, dtype),
        Case("SmolLM2 decode, 1 x 4096", 1, 4096, 1, 9, 3, 64, dtype),
        Case("Llama-3-8B decode, 4 x 2048", 4, 2048, 1, 32, 8, 128, dtype),
        Case("SmolLM2 verify, 8 x 4 on 2048", 8, 2048, 4, 9, 3, 64, dtype),
        Case("SmolLM2 prefill, 1 x 1024 on 2048", 1, 2048, 1024, 9, 3, 64, dtype),
    ]


@dataclass
class Inputs:
    """The tensors of a call; the cache's storage is NHD or HND."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor

    @classmethod
    def of(cls, case: Case) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        columns = -(-case.length // BLOCK_SIZE)
        num_blocks = case.batch * columns
        key_cache, value_cache = (
            torch.randn(num_blocks, BLOCK_SIZE, case.num_kv_heads, case.head_dim, generator=generator).to(case.dtype)
            for _ in range(2)
        )
        tokens = case.batch * case.query_len
        return cls(
            torch.randn(tokens, case.num_heads, case.head_dim, generator=generator).to(case.dtype),
            key_cache,
            value_cache,
            torch.randperm(num_blocks, generator=generator).int().view(case.batch, columns),
            torch.full((case.batch,), case.length, dtype=torch.int32),
            torch.arange(case.batch + 1, dtype=torch.int32) * case.query_len,
        )

    def heads_first(self, dtype: torch.dtype | None = None) -> Inputs:
        """The same values in HND storage, rounded to ``dtype`` if one is given."""

        def move(cache: Tensor) -> Tensor:
            cache = cache.float().mul(40).round() if dtype == torch.int8 else cache
            return cache.transpose(1, 2).contiguous().to(dtype or cache.dtype).transpose(1, 2)

        return replace(self, key_cache=move(self.key_cache), value_cache=move(self.value_cache))

    def attend(self) -> Tensor:
        return paged_attn.paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.seq_lens,
            cu_seqlens_q=self.cu_seqlens_q,
        )


class Gather:
    """Keys and values as ``[S, Hkv, L, D]``: views of pages gathered into buffers that are allocated once."""

    def __init__(self, inputs: Inputs, case: Case) -> None:
        self.caches = (inputs.key_cache, inputs.value_cache)
        self.blocks = inputs.block_table.flatten()
        self.pages = [torch.empty_like(cache[self.blocks]) for cache in self.caches]
        shape = (case.batch, -1, case.num_kv_heads, case.head_dim)
        self.views = [pages.view(shape)[:, : case.length].transpose(1, 2) for pages in self.pages]

    def __call__(self) -> list[Tensor]:
        for cache, pages in zip(self.caches, self.pages):
            torch.index_select(cache, 0, self.blocks, out=pages)
        return self.views


def torch_attention(inputs: Inputs, case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """SDPA of the case's queries on contiguous keys and values, to ``[T, Hq, D]``."""
    if case.query_len == 1:
        group = case.num_heads // case.num_kv_heads
        query = inputs.query.view(case.batch, case.num_kv_heads, group, case.head_dim)
        return lambda key, value: F.scaled_dot_product_attention(query, key, value).view(inputs.query.shape)
    query = inputs.query.view(case.batch, case.query_len, case.num_heads, case.head_dim).transpose(1, 2)
    mask = torch.ones(case.query_len, case.length, dtype=torch.bool).tril(case.length - case.query_len)

    def attend(key: Tensor, value: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return output.transpose(1, 2).reshape(inputs.query.shape)

    return attend


def time_in_turn(kernels: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, common.Timing]:
    samples: dict[str, list[float]] = {name: [] for name in kernels}
    for kernel in kernels.values():
        kernel()
    for _ in range(rounds):
        for name, kernel in kernels.items():
            start = time.perf_counter()
            kernel()
            samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: common.Timing.of(values) for name, values in samples.items()}


def bench(case: Case, rounds: int) -> dict[str, object]:
    nhd = Inputs.of(case)
    hnd = nhd.heads_first()
    gather, sdpa = Gather(nhd, case), torch_attention(nhd, case)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
    torch.testing.assert_close(hnd.attend(), sdpa(*gather()), rtol=tolerance, atol=tolerance)

    contiguous = [part.contiguous() for part in gather()]
    quantised = {name: nhd.heads_first(dtype).attend for name, dtype in KV_DTYPES.items()}
    times = time_in_turn(
        {
            "paged": hnd.attend,
            "gather + SDPA": lambda: sdpa(*gather()),
            "SDPA alone": lambda: sdpa(*contiguous),
            **{f"paged, {name}": attend for name, attend in quantised.items()},
        },
        rounds,
    )
    return {
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "KV MB": case.kv_bytes / 1e6,
        **{f"{name} us": timing for name, timing in times.items()},
        "speedup": times["gather + SDPA"].us / times["paged"].us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=21, help="samples of each column; medians are shown")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="write bench/results/cpu.json")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    chosen = [case for name in args.dtype for case in cases(DTYPES[name]) if args.case in case.name]
    rows = [bench(case, args.rounds) for case in chosen]
    common.print_table(rows)
    if args.json:
        print(common.write_results("cpu", rows, device="cpu", rounds=args.rounds))


if __name__ == "__main__":
    main()
