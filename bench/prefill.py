"""Chunked prefill, verification and mixed batches: time and TFLOP/s beside FlashInfer and torch's own attention.

A case ``S x q on L`` has S sequences of L tokens in the cache whose last q are the queries. Arithmetic is 4 x heads x
head_dim for every visible (query, key) pair. FlashInfer runs on the same blocks where it can be imported; torch's flash
and cuDNN attention run on contiguous keys and values, one for every query head. All kernels of a case take turns in
random order: the chip is at its power cap, and the clock is part of the result. The section ``quantised`` sets
8-bit caches beside the unquantised one, ``head dims`` one head_dim beside another: what needs less power has the higher
clock there, and turns are long enough for each to have its own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

import paged_attn
from bench import common
from paged_attn.cli._arguments import positive

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """``options`` go to ``paged_attention``."""

    name: str
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    layout: str = "HND"
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None  # None: dtype
    scale_kind: str = "tensor"  # of a quantised cache
    options: dict[str, object] = field(default_factory=dict)
    backend: str = "auto"

    @property
    def flops(self) -> float:
        pairs = 0
        window = self.options.get("window_size")
        for q, length in zip(self.query_lens, self.seq_lens):
            for seen in range(length - q + 1, length + 1) if self.options.get("causal", True) else [length] * q:
                pairs += min(seen, window) if window else seen
        return 4.0 * self.heads * self.head_dim * pairs


def uniform(sequences: int, query_len: int, seq_len: int, **changes) -> Case:
    name = f"{sequences} x {query_len} on {seq_len}"
    return Case(name, [query_len] * sequences, [seq_len] * sequences, **changes)


PREFILL = [
    uniform(4, 4096, 4096),
    uniform(1, 16384, 16384),
    uniform(1, 2048, 8192),
    uniform(1, 2048, 32768),
    uniform(8, 512, 8192),
    uniform(1, 256, 32768),
    uniform(1, 64, 8192),
]
VERIFY = [uniform(16, 4, 8192), uniform(64, 8, 2048)]
QUANTISED = {
    "e4m3": {"cache_dtype": torch.float8_e4m3fn},
    "e5m2": {"cache_dtype": torch.float8_e5m2},
    "int8": {"cache_dtype": torch.int8},
    "e4m3, scales a token": {"cache_dtype": torch.float8_e4m3fn, "scale_kind": "token_head"},
}
HEAD_DIMS = (64, 96, 128, 192, 256)
QUANTISED_VARIANTS = ("NHD", "soft cap")
INVARIANT = [replace(case, name=f"{case.name}, batch invariant", options={"batch_invariant": True}) for case in VERIFY]


def variants(base: Case) -> list[Case]:
    """The same arithmetic in other shapes, layouts and with the options of paged_attention."""
    changes = {
        "fp16": {"dtype": torch.float16},
        "group 1": {"kv_heads": 32},
        "group 7": {"heads": 28, "kv_heads": 4},
        "NHD": {"layout": "NHD"},
        "blocks of 8": {"block_size": 8},
        "blocks of 128": {"block_size": 128},
        "not causal": {"options": {"causal": False}},
        "window 1024": {"options": {"window_size": 1024}},
        "soft cap": {"options": {"softcap": 30.0}},
        "ALiBi": {"options": {"alibi_slopes": torch.logspace(-1, -3, base.heads)}},
        "sinks": {"options": {"sinks": torch.zeros(base.heads)}},
        "batch invariant": {"options": {"batch_invariant": True}},
        "mma": {"backend": "mma"},
    }
    return [base, *(replace(base, name=f"{base.name}, {name}", **change) for name, change in changes.items())]


def head_dim_cases(base: Case) -> list[Case]:
    return [replace(base, name=f"{base.name}, D {head_dim}", head_dim=head_dim) for head_dim in HEAD_DIMS]


class Inputs:
    """The tensors of a case on the GPU: ``sets`` caches to rotate through, one query and one block table."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.table, self.num_blocks = common.random_block_table(case.seq_lens, case.block_size)
        cache_dtype = case.cache_dtype or case.dtype
        cache_bytes = 2 * cache_dtype.itemsize * self.num_blocks * case.block_size * case.kv_heads * case.head_dim
        self.sets = min(common.rotation(cache_bytes), 16)
        self.caches = common.paged_caches(
            self.num_blocks,
            case.block_size,
            case.kv_heads,
            case.head_dim,
            sets=self.sets,
            dtype=cache_dtype,
            layout=case.layout,
        )
        shape = (sum(case.query_lens), case.heads, case.head_dim)
        self.query = torch.randn(shape, device="cuda").to(case.dtype)
        self.out = torch.empty_like(self.query)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device="cuda")
        starts = [0]
        for length in case.query_lens:
            starts.append(starts[-1] + length)
        self.cu_seqlens_q = torch.tensor(starts, dtype=torch.int32, device="cuda")
        self.options = {
            name: value.cuda() if isinstance(value, Tensor) else value for name, value in case.options.items()
        }
        if cache_dtype != case.dtype:
            shapes = {
                "tensor": (1,),
                "head": (case.kv_heads,),
                "token_head": (self.num_blocks, case.block_size, case.kv_heads),
            }
            step = 1 / 40 if cache_dtype == torch.int8 else 1.0  # of paged_caches
            for name in ("k_scale", "v_scale"):
                self.options[name] = step * (0.5 + torch.rand(shapes[case.scale_kind], device="cuda"))

    def ours(self, backend: str) -> common.Kernel:
        def call(i: int) -> None:
            paged_attn.paged_attention(
                self.query,
                *self.caches[i % self.sets],
                self.table,
                self.seq_lens,
                cu_seqlens_q=self.cu_seqlens_q,
                max_seqlen_q=max(self.case.query_lens),
                out=self.out,
                backend=backend,
                **self.options,
            )

        return call

    def flashinfer(self, backend: str) -> common.Kernel | None:
        batch = common.flashinfer_batch(self.caches, self.case.layout, self.table, self.seq_lens)
        if batch is None:
            return None
        case = self.case
        wrapper = batch.module.BatchPrefillWithPagedKVCacheWrapper(batch.workspace, case.layout, backend=backend)
        wrapper.plan(
            self.cu_seqlens_q,
            batch.indptr,
            batch.indices,
            batch.last_page_len,
            case.heads,
            case.kv_heads,
            case.head_dim,
            case.block_size,
            causal=True,
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
        )
        return lambda i: wrapper.run(self.query, batch.caches[i % self.sets], out=self.out)

    def torch_attention(self, kind: str) -> common.Kernel:
        """Contiguous ``[S, heads, L, D]`` keys and values, gathered from the first cache."""
        case = self.case
        sequences, query_len, seq_len = len(case.query_lens), case.query_lens[0], case.seq_lens[0]

        def contiguous(cache: Tensor) -> Tensor:
            tokens = cache[self.table.long()].reshape(sequences, -1, case.kv_heads, case.head_dim)[:, :seq_len]
            return tokens.transpose(1, 2).repeat_interleave(case.heads // case.kv_heads, dim=1).contiguous()

        key, value = (contiguous(cache) for cache in self.caches[0])
        query = self.query.view(sequences, query_len, case.heads, case.head_dim).transpose(1, 2).contiguous()
        if kind == "flash":  # its causal mask is aligned at the bottom right
            return lambda i: aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        return lambda i: aten._scaled_dot_product_cudnn_attention(query, key, value, None, False, 0.0, True)


class Clock:
    """The SM clock right after a kernel: cycles of a multiprocessor over nanoseconds of the global timer."""

    SOURCE = """
    extern "C" __global__ void clock_kernel(long long* out) {
      long long t0, t1, c0 = clock64();
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
      do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t1)); while (t1 - t0 < 100000);
      out[0] = clock64() - c0, out[1] = t1 - t0;
    }
    """

    def __init__(self) -> None:
        self._kernel = torch.cuda._compile_kernel(self.SOURCE, "clock_kernel")
        self._out = torch.zeros(2, dtype=torch.int64, device="cuda")

    def after(self, kernel: common.Kernel, us: float) -> int:
        """MHz after about 20 ms of a kernel that takes ``us``."""
        samples = []
        for _ in range(3):
            for i in range(max(2, round(20e3 / us))):
                kernel(i)
            self._kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[self._out])
            cycles, nanoseconds = self._out.tolist()
            samples.append(1e3 * cycles / nanoseconds)
        return round(statistics.median(samples))


def kernels_of(case: Case, inputs: Inputs, peers: bool) -> dict[str, common.Kernel]:
    kernels = {"ours": inputs.ours(case.backend)}
    if not peers:
        return kernels
    kernels["ours"](0)
    expected = inputs.out.clone()

    def flashinfer(backend: str) -> common.Kernel | None:
        kernel = inputs.flashinfer(backend)
        if kernel is not None:
            kernel(0)
            torch.testing.assert_close(inputs.out, expected, rtol=0.02, atol=0.02)
        return kernel

    for backend in ("fa2", "fa3"):
        name = f"FlashInfer {backend}"
        kernel = common.peer(f"{name}, {case.name}", partial(flashinfer, backend))
        if kernel is not None:
            kernels[name] = kernel
    kernels["torch flash"] = inputs.torch_attention("flash")
    if case.query_lens == case.seq_lens:  # cuDNN's mask is aligned at the top left
        kernels["torch cuDNN"] = inputs.torch_attention("cudnn")
    return kernels


def measure(case: Case, clock: Clock, rounds: int, peers: bool) -> dict[str, object]:
    inputs = Inputs(case)
    kernels = kernels_of(case, inputs, peers)
    times = common.time_kernels(kernels, sets=inputs.sets, rounds=rounds)
    ours = times["ours"]
    row: dict[str, object] = {
        "case": case.name,
        "us": ours,
        "TFLOP/s": case.flops / ours.us * 1e-6,
        "MHz": clock.after(kernels["ours"], ours.us),
    }
    for name, timing in times.items():
        if name != "ours":
            row |= {f"{name} us": timing, f"{name} TFLOP/s": case.flops / timing.us * 1e-6}
    others = [timing.us for name, timing in times.items() if name != "ours"]
    if others:
        row["times the best peer"] = min(others) / ours.us
    torch.cuda.empty_cache()
    return row


def joined(name: str, *cases: Case) -> Case:
    """The sequences of several cases in one call."""
    return Case(name, [q for case in cases for q in case.query_lens], [n for case in cases for n in case.seq_lens])


def measure_mixed(rounds: int) -> list[dict[str, object]]:
    """Serving steps: 64 decode rows, or verification rows, and a 2,048-token chunk on 8k, in one call and as two."""
    chunk = uniform(1, 2048, 8192)
    rows: list[dict[str, object]] = []
    for few in (uniform(64, 1, 4096), uniform(64, 8, 2048)):
        cases = [few, chunk, joined(f"{few.name} and {chunk.name} in one call", few, chunk)]
        inputs = {case.name: Inputs(case) for case in cases}
        sets = max(one.sets for one in inputs.values())
        times = common.time_kernels({name: one.ours("auto") for name, one in inputs.items()}, sets=sets, rounds=rounds)
        total = times[few.name].us + times[chunk.name].us
        rows += [{"case": name, "us": time, "of the sum": time.us / total} for name, time in times.items()]
        del inputs
        torch.cuda.empty_cache()
    return rows


def measure_quantised(case: Case, rounds: int, turn_ms: float) -> dict[str, object]:
    """A case from 8-bit caches beside the same case from one of the query's dtype."""
    every = {"unquantised": Inputs(case)}
    every |= {name: Inputs(replace(case, **change)) for name, change in QUANTISED.items()}
    sets = min(inputs.sets for inputs in every.values())
    kernels = {name: inputs.ours(case.backend) for name, inputs in every.items()}
    times = common.time_kernels(kernels, sets=sets, rounds=rounds, min_ms=turn_ms)
    row: dict[str, object] = {"case": case.name} | {f"{name} us": timing for name, timing in times.items()}
    row["least speed of unquantised"] = times["unquantised"].us / max(timing.us for timing in times.values())
    torch.cuda.empty_cache()
    return row


def measure_head_dims(cases: Sequence[Case], rounds: int, turn_ms: float) -> list[dict[str, object]]:
    """Cases that differ in head_dim, 128 among them, all in turns, beside torch's own attention."""
    inputs = {case.head_dim: Inputs(case) for case in cases}
    kernels: dict[str, common.Kernel] = {}
    for head_dim, one in inputs.items():
        kernels[f"ours {head_dim}"] = one.ours(one.case.backend)
        for kind, library in (("cudnn", "torch cuDNN"), ("flash", "torch flash")):
            name = f"{library} {head_dim}"
            kernel = common.peer(name, partial(one.torch_attention, kind))
            if kernel is not None:
                kernels[name] = kernel
    sets = min(one.sets for one in inputs.values())
    times = common.time_kernels(kernels, sets=sets, rounds=rounds, min_ms=turn_ms)
    rows: list[dict[str, object]] = []
    for case in cases:
        row: dict[str, object] = {"head_dim": case.head_dim}
        for name in ("ours", "torch cuDNN", "torch flash"):
            timing, of_128 = (times.get(f"{name} {head_dim}") for head_dim in (case.head_dim, 128))
            if timing is not None:
                row[f"{name} us"] = round(timing.us, 1)
                row[f"{name} TFLOP/s"] = round(case.flops / timing.us * 1e-6, 1)
            if timing is not None and of_128 is not None:
                row[f"{name} of 128"] = round(of_128.us / timing.us * case.head_dim / 128, 3)
        rows.append(row)
    torch.cuda.empty_cache()
    return rows


def float64_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``[H, q, D]`` queries at the end of ``[H, L, D]`` keys and values, causal."""
    scores = query.double() @ key.double().transpose(1, 2) * query.shape[-1] ** -0.5
    rows, columns = scores.shape[1:]
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu(columns - rows + 1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value.double()


def accuracy(dtype: torch.dtype, head_dim: int, query_len: int = 512, seq_len: int = 2048) -> dict[str, object]:
    """Errors against float64 on the same rounded inputs, beside torch's flash attention; scores with a spread of 4."""
    case = uniform(1, query_len, seq_len, heads=8, kv_heads=2, head_dim=head_dim, dtype=dtype)
    inputs = Inputs(case)
    inputs.query.mul_(4)
    inputs.ours(case.backend)(0)
    ours = inputs.out.transpose(0, 1)
    tokens = [
        cache[inputs.table[0].long()].reshape(-1, case.kv_heads, head_dim).transpose(0, 1).repeat_interleave(4, dim=0)
        for cache in inputs.caches[0]
    ]
    query, (key, value) = inputs.query.transpose(0, 1), (t.contiguous() for t in tokens)
    flash = aten._scaled_dot_product_flash_attention(query[None], key[None], value[None], 0.0, True)[0][0]
    expected = float64_attention(query, key, value)

    def error(actual: Tensor) -> tuple[float, float]:
        difference = (actual.double() - expected).abs()
        return difference.square().mean().sqrt().item(), difference.max().item()

    (rms, worst), (flash_rms, flash_worst) = error(ours), error(flash)
    return {
        "case": f"{str(dtype).removeprefix('torch.')}, D {head_dim}",
        "rms error": rms,
        "torch flash rms": flash_rms,
        "rms ratio": rms / flash_rms,
        "worst ratio": worst / flash_worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=9, help="timings of each kernel (default: 9)")
    parser.add_argument(
        "--turn-ms",
        type=positive,
        default=200,
        help="how long a kernel of quantised and head dims runs at a time (default: 200)",
    )
    parser.add_argument(
        "--only",
        choices=["prefill", "verify", "variants", "head dims", "quantised", "mixed", "accuracy"],
        help="one section; nothing is written to bench/results",
    )
    arguments = parser.parse_args()
    common.require_cuda()
    torch.manual_seed(0)
    clock = Clock()
    rounds = arguments.rounds

    def section(make: Callable[[], list[dict[str, object]]], name: str) -> list[dict[str, object]]:
        if arguments.only not in (None, name):
            return []
        rows = make()
        print(f"\n{name}")
        common.print_table(rows)
        return rows

    peers = section(lambda: [measure(case, clock, rounds, peers=True) for case in PREFILL], "prefill")
    verify = section(
        lambda: [measure(case, clock, rounds, peers=case in VERIFY) for case in (*VERIFY, *INVARIANT)], "verify"
    )
    base = PREFILL[0]
    others = section(lambda: [measure(case, clock, rounds, peers=False) for case in variants(base)], "variants")
    head_dims = section(lambda: measure_head_dims(head_dim_cases(base), rounds, arguments.turn_ms), "head dims")
    eight_bit = [
        *PREFILL,
        *(case for case in head_dim_cases(base) if case.head_dim != base.head_dim),
        *(case for case in variants(base) if case.name.partition(", ")[2] in QUANTISED_VARIANTS),
    ]
    quantised = section(lambda: [measure_quantised(case, rounds, arguments.turn_ms) for case in eight_bit], "quantised")
    mixed = section(lambda: measure_mixed(rounds), "mixed")
    errors = section(
        lambda: [accuracy(t, d) for t in (torch.bfloat16, torch.float16) for d in (64, 128, 256)], "accuracy"
    )
    if arguments.only:
        return
    path = common.write_results(
        "prefill",
        [*peers, *verify, *others, *quantised],
        flops="4 x heads x head_dim x visible (query, key) pairs",
        mixed=[{**row, "us": round(row["us"].us, 2)} for row in mixed],
        head_dims=head_dims,
        turn_ms=arguments.turn_ms,
        accuracy=errors,
    )
    names = dict.fromkeys(key.removesuffix(" TFLOP/s") for row in peers for key in row if key.endswith(" TFLOP/s"))
    series = {"ours": [row["TFLOP/s"] for row in peers]}
    series |= {name: [row.get(f"{name} TFLOP/s", 0.0) for row in peers] for name in names}
    common.bar_chart(
        path.with_suffix(".svg"), [row["case"] for row in peers], series, ylabel="TFLOP/s", title="Chunked prefill"
    )


if __name__ == "__main__":
    main()
