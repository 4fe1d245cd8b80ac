"""Decode: microseconds, GB/s and the distance to the ceiling, beside torch and FlashInfer.

The ceiling is the Hopper kernel with its loads alone (bench/decode_ceiling.cu, built with nvcc where it is missing).
Bytes are those of the visible keys and values. Every number is a CUDA graph of many calls over caches that rotate
through a gibibyte or more, all sharing one block table in random order; kernels of a case take turns in random order.
"default" assumes nothing, "ready" states ``metadata_ready``, "no PDL" launches plainly, "mma" is the path for compute
capability 8.0.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

import paged_attn
from bench import common
from paged_attn.cli._arguments import positive

CEILING = common.ROOT / "build" / "decode_ceiling.so"
NO_PDL = 2  # bit of the op's `flags`
SCALE_KINDS = ("tensor", "head", "token_head")
FLASHINFER = ("cores", "tensor", "xqa", "persistent")
PEERS = ("torch SDPA", *(f"FI {kind}" for kind in FLASHINFER))


@dataclass(frozen=True)
class Case:
    """``query_len`` queries at the end of each sequence; ``options`` go to ``paged_attention``."""

    name: str
    seq_lens: Sequence[int]
    query_len: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    layout: str = "HND"
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    options: dict[str, object] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        window = self.options.get("window_size")
        keys = sum(min(length, window + self.query_len - 1) if window else length for length in self.seq_lens)
        return 2 * keys * self.kv_heads * self.head_dim * self.kv_dtype.itemsize


def ragged(seed: int = 0) -> list[int]:
    """64 lengths from 64 to 8192."""
    lengths = random.Random(seed)
    return [lengths.randint(64, 8192) for _ in range(64)]


def decode_cases() -> list[Case]:
    sizes = {"1k": 1024, "4k": 4096, "8k": 8192, "32k": 32768, "128k": 131072}
    uniform = {1: ["1k", "8k", "32k", "128k"], 8: ["1k", "8k", "32k"], 64: ["1k", "8k"], 256: ["1k", "4k"]}
    cases = [Case(f"{s} x {name}", [sizes[name]] * s) for s, names in uniform.items() for name in names]
    return [
        *cases,
        Case("64 x 64..8k", ragged()),
        Case("63 x 1k + 64k", [1024] * 63 + [65536]),
        Case("15 x 512 + 128k", [512] * 15 + [131072]),
    ]


VERIFY = [
    Case("16 x 4 on 8k", [8192] * 16, query_len=4),
    Case("64 x 8 on 2k", [2048] * 64, query_len=8),
]


def variants() -> list[Case]:
    """The same bytes (as near as heads allow) in other shapes, and with the options of paged_attention."""
    base = Case("64 x 1k", [1024] * 64)
    changes: dict[str, dict[str, object]] = {
        **{f"blocks of {n}": {"block_size": n} for n in (1, 4, 8, 32, 64, 128, 256)},
        **{f"group {n}": {"heads": 8 * n} for n in (1, 2, 3, 7, 8)},
        "group 16, 4 KV heads": {"heads": 64, "kv_heads": 4, "seq_lens": [2048] * 64},
        "group 32, 1 KV head": {"kv_heads": 1, "seq_lens": [8192] * 64},
        "D 64": {"head_dim": 64, "seq_lens": [2048] * 64},
        "D 96": {"head_dim": 96, "seq_lens": [1360] * 64},
        "D 80": {"head_dim": 80, "seq_lens": [1632] * 64},
        "D 112": {"head_dim": 112, "seq_lens": [1168] * 64},
        "D 160": {"head_dim": 160, "seq_lens": [816] * 64},
        "D 80, NHD": {"head_dim": 80, "seq_lens": [1632] * 64, "layout": "NHD"},
        "D 96, NHD": {"head_dim": 96, "seq_lens": [1360] * 64, "layout": "NHD"},
        "D 192": {"head_dim": 192, "seq_lens": [688] * 64},
        "D 256": {"head_dim": 256, "seq_lens": [512] * 64},
        "fp16": {"dtype": torch.float16, "kv_dtype": torch.float16},
        "fp32": {"dtype": torch.float32, "kv_dtype": torch.float32, "seq_lens": [512] * 64},
        "window 256": {"options": {"window_size": 256}},
        "soft cap": {"options": {"softcap": 30.0}},
        "ALiBi": {"options": {"alibi_slopes": torch.logspace(-1, -3, base.heads)}},
        "sinks": {"options": {"sinks": torch.zeros(base.heads)}},
        "LSE": {"options": {"return_lse": True}},
    }
    return [base, *(replace(base, name=f"{base.name}, {name}", **change) for name, change in changes.items())]


class Inputs:
    """The tensors of a case on the GPU: ``sets`` caches to rotate through, one query and one block table."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.table, num_blocks = common.random_block_table(case.seq_lens, case.block_size)
        row = 2 * case.kv_heads * case.head_dim * case.kv_dtype.itemsize
        self.sets = common.rotation(num_blocks * case.block_size * row)
        self.caches = common.paged_caches(
            num_blocks,
            case.block_size,
            case.kv_heads,
            case.head_dim,
            sets=self.sets,
            dtype=case.kv_dtype,
            layout=case.layout,
        )
        tokens = len(case.seq_lens) * case.query_len
        self.query = torch.randn(tokens, case.heads, case.head_dim, device="cuda").to(case.dtype)
        self.out = torch.empty_like(self.query)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device="cuda")
        self.options = {
            name: value.cuda() if isinstance(value, Tensor) else value for name, value in case.options.items()
        }
        if case.query_len > 1:
            starts = torch.arange(len(case.seq_lens) + 1, dtype=torch.int32, device="cuda") * case.query_len
            self.options |= {"cu_seqlens_q": starts, "max_seqlen_q": case.query_len}

    def ours(self, **options) -> common.Kernel:
        options = {**self.options, **options}

        def call(i: int) -> None:
            paged_attn.paged_attention(
                self.query, *self.caches[i % self.sets], self.table, self.seq_lens, out=self.out, **options
            )

        return call

    def no_pdl(self) -> common.Kernel:
        op, scale = torch.ops.paged_attn.paged_attention.out, self.case.head_dim**-0.5
        starts, longest = self.options.get("cu_seqlens_q"), self.options.get("max_seqlen_q", 0)
        fixed = (starts, scale, True, None, 0.0, None, None, None, None, False, longest, NO_PDL)
        return lambda i: op(self.query, *self.caches[i % self.sets], self.table, self.seq_lens, *fixed, out=self.out)

    def scaled(self, kind: str) -> common.Kernel:
        """Random scales, one a ``tensor``, ``head`` or ``token_head``, stored like the caches and rotating too."""
        shape = {"tensor": (1,), "head": (self.case.kv_heads,), "token_head": self.caches[0][0].shape[:3]}[kind]

        def scale() -> Tensor:
            tensor = 0.5 + torch.rand(shape, device="cuda")
            return tensor.mT.contiguous().mT if kind == "token_head" and self.case.layout == "HND" else tensor

        kernels = [self.ours(metadata_ready=True, k_scale=scale(), v_scale=scale()) for _ in range(self.sets)]
        return lambda i: kernels[i % self.sets](i)

    def ceiling(self) -> common.Kernel | None:
        case = self.case
        if case.head_dim != 128 or case.query_len > 1 or (library := ceiling_library()) is None:
            return None

        def call(i: int) -> None:
            key, value = self.caches[i % self.sets]
            strides = (ctypes.c_int64 * 3)(*key.stride()[:3])
            failed = library.decode_ceiling(
                *(ctypes.c_void_p(t.data_ptr()) for t in (self.query, self.out, key, value, self.table, self.seq_lens)),
                len(case.seq_lens),
                case.heads,
                case.kv_heads,
                ctypes.c_int64(key.shape[0]),
                case.block_size,
                self.table.shape[1],
                strides,
                case.kv_dtype.itemsize,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
            if failed:
                raise RuntimeError("the ceiling kernel could not be launched")

        return call

    def torch_attention(self) -> common.Kernel | None:
        """SDPA on contiguous ``[S, Hkv, L, D]`` keys and values; for equal lengths alone."""
        case = self.case
        if len(set(case.seq_lens)) > 1 or case.kv_dtype != case.dtype or case.query_len > 1:
            return None
        shape = (len(case.seq_lens), case.kv_heads, case.seq_lens[0], case.head_dim)
        pairs = [tuple(torch.randn(shape, device="cuda", dtype=case.dtype) for _ in range(2)) for _ in range(self.sets)]
        query = self.query.unsqueeze(2)

        def call(i: int) -> None:
            torch.nn.functional.scaled_dot_product_attention(query, *pairs[i % self.sets], enable_gqa=True)

        return call

    def flashinfer(self, kind: str) -> common.Kernel | None:
        """FlashInfer on the same blocks: its decode kernel on CUDA ``cores`` or with ``tensor`` cores, ``xqa``, or the
        ``persistent`` BatchAttention. None where it cannot be imported."""
        batch = common.flashinfer_batch(self.caches, self.case.layout, self.table, self.seq_lens)
        if batch is None:
            return None
        case = self.case
        shape = (case.heads, case.kv_heads, case.head_dim)
        dtypes = {"q_data_type": case.dtype, "kv_data_type": case.kv_dtype}

        def xqa(i: int) -> None:
            batch.module.decode.xqa_batch_decode_with_kv_cache(
                self.query,
                batch.caches[i % self.sets],
                batch.workspace,
                self.table,
                self.seq_lens.view(torch.uint32),
                max(case.seq_lens),
                bmm1_scale=case.head_dim**-0.5,
                kv_layout=case.layout,
                out=self.out,
            )

        if kind == "xqa":
            return xqa
        if kind == "persistent":
            wrapper = batch.module.BatchAttention(case.layout)
            starts = torch.arange(len(case.seq_lens) + 1, dtype=torch.int32, device="cuda")
            wrapper.plan(
                starts, batch.indptr, batch.indices, self.seq_lens, *shape, case.head_dim, case.block_size, **dtypes
            )
        else:
            wrapper = batch.module.BatchDecodeWithPagedKVCacheWrapper(
                batch.workspace, case.layout, use_tensor_cores=kind == "tensor", backend="fa2"
            )
            wrapper.plan(batch.indptr, batch.indices, batch.last_page_len, *shape, case.block_size, **dtypes)
        return lambda i: wrapper.run(self.query, batch.caches[i % self.sets], out=self.out)


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def build_ceiling() -> None:
    """bench/decode_ceiling.cu with nvcc, into ``CEILING``."""
    CEILING.parent.mkdir(exist_ok=True)
    sources = [common.ROOT / "bench" / "decode_ceiling.cu", common.ROOT / "csrc/cuda/attention/sm90/tensor_map.cu"]
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
    subprocess.run([find_nvcc(), *flags, "-shared", "-Xcompiler=-fPIC", "-o", CEILING, *sources], check=True)


def ceiling_library() -> ctypes.CDLL | None:
    """The library of ``build_ceiling``, built on first use; None where that is not possible."""
    if not CEILING.exists():
        if find_nvcc() is None or torch.cuda.get_device_capability()[0] != 9:
            return None
        build_ceiling()
    return ctypes.CDLL(str(CEILING))


def times_of(case: Case, rounds: int, columns: Sequence[str]) -> dict[str, common.Timing]:
    inputs = Inputs(case)
    makers = {
        "ceiling": inputs.ceiling,
        "default": inputs.ours,
        "ready": lambda: inputs.ours(metadata_ready=True),
        "no PDL": inputs.no_pdl,
        "batch invariant": lambda: inputs.ours(metadata_ready=True, batch_invariant=True),
        "mma": lambda: inputs.ours(backend="mma"),
        **{kind: partial(inputs.scaled, kind) for kind in SCALE_KINDS},
        "torch SDPA": inputs.torch_attention,
        **{
            f"FI {kind}": partial(common.peer, f"FlashInfer {kind}, {case.name}", partial(inputs.flashinfer, kind))
            for kind in FLASHINFER
        },
    }
    kernels = {name: kernel for name in columns if (kernel := makers[name]()) is not None}
    return common.time_kernels(kernels, sets=inputs.sets, rounds=rounds, min_ms=5)


def measure(case: Case, rounds: int, columns: Sequence[str]) -> dict[str, object]:
    times = times_of(case, rounds, columns)
    torch.cuda.empty_cache()
    ready = times["ready"]
    row: dict[str, object] = {"case": case.name, "MB": case.num_bytes / 1e6, **times}
    row["GB/s"] = 1e3 * ready.tb_s(case.num_bytes)
    if "ceiling" in times:
        row["over ceiling us"] = ready.us - times["ceiling"].us
    peers = [times[name].us for name in PEERS if name in times]
    if peers:
        row["x best peer"] = min(peers) / ready.us
    return row


def measure_scales(case: Case, rounds: int) -> dict[str, object]:
    times = times_of(case, rounds, SCALE_KINDS)
    torch.cuda.empty_cache()
    row: dict[str, object] = {"case": case.name, "MB": case.num_bytes / 1e6, **times}
    row["token_head / tensor"] = times["token_head"].us / times["tensor"].us
    return row


def host_cost() -> dict[str, float]:
    """Microseconds of the host for a Python call, and for ``torch.add`` into a tensor as a scale of the machine.

    The least of many short bursts, in which the launch queue is not full and other processes hardly ever come between.
    """
    import time

    inputs = Inputs(Case("host", [64]))
    vector = torch.zeros(64, device="cuda")
    calls = {"paged_attention": inputs.ours(), "torch.add": lambda i: torch.add(vector, vector, out=vector)}
    burst, costs = 50, {}
    for name, call in calls.items():
        costs[name] = float("inf")
        for _ in range(100):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(burst):
                call(i)
            costs[name] = min(costs[name], (time.perf_counter() - start) / burst * 1e6)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=9, help="timings of each kernel (default: 9)")
    parser.add_argument("--kv", choices=["bf16", "fp8", "int8"], default="bf16", help="dtype of the cache")
    parser.add_argument("--layout", choices=["HND", "NHD"], default="HND", help="of the cache")
    parser.add_argument("--flashinfer", action="store_true", help="FlashInfer too, which compiles at first use")
    parser.add_argument(
        "--only", choices=["decode", "verify", "variants", "scales"], help="one section; nothing is written"
    )
    arguments = parser.parse_args()
    common.require_cuda()
    torch.manual_seed(0)

    changes: dict[str, object] = {"layout": arguments.layout}
    quantised = arguments.kv != "bf16"
    if quantised:
        kv_dtype, scale = (torch.float8_e4m3fn, 1.0) if arguments.kv == "fp8" else (torch.int8, 1 / 40)
        scales = {name: torch.full((1,), scale) for name in ("k_scale", "v_scale")}
        changes |= {"kv_dtype": kv_dtype, "options": scales}
    columns = ["ceiling", "default", "ready", "no PDL", "batch invariant", "mma", "torch SDPA"]
    if arguments.flashinfer and arguments.kv != "int8":  # which it does not read
        columns += PEERS[1:]
    ours = ["default", "ready", "mma"]
    rounds = arguments.rounds
    if quantised:
        columns.remove("no PDL")
    sections = {
        "decode": lambda: [measure(replace(case, **changes), rounds, columns) for case in decode_cases()],
        "verify": lambda: [measure(replace(case, **changes), rounds, ours) for case in VERIFY],
        "variants": lambda: [measure(case, rounds, ours[:2]) for case in variants()],
        "scales": lambda: [
            measure_scales(replace(case, **changes), rounds)
            for case in (*decode_cases(), *VERIFY)
            if len(case.seq_lens) >= 8
        ],
    }
    if quantised or arguments.layout != "HND":
        del sections["variants"]
    if not quantised:
        del sections["scales"]
    rows: dict[str, list[dict[str, object]]] = {}
    for name, make in sections.items():
        if arguments.only in (None, name):
            rows[name] = make()
            print(f"\n{name}, {arguments.kv}, {arguments.layout}, us")
            common.print_table(rows[name])
    host_us = host_cost()
    print("\na Python call costs the host " + ", ".join(f"{us:.1f} us ({name})" for name, us in host_us.items()))
    if arguments.only:
        return
    path = common.write_results(
        "decode" + (f"_{arguments.kv}" if quantised else "") + ("_nhd" if arguments.layout == "NHD" else ""),
        [row for part in rows.values() for row in part],
        bytes="2 x visible keys x KV heads x head_dim x element size",
        host_us=host_us,
    )
    with path.with_suffix(".md").open("w") as table, contextlib.redirect_stdout(table):
        for name, part in rows.items():
            print(f"{name}, {arguments.kv} cache, {arguments.layout}, microseconds\n")
            common.print_table(part)
            print()
    shown = [name for name in ("ceiling", "ready", "default", *PEERS) if name in rows["decode"][0]]

    def tb_s(row: dict[str, object], name: str) -> float:
        return row["MB"] / row[name].us if name in row else 0.0

    common.bar_chart(
        path.with_suffix(".svg"),
        [str(row["case"]) for row in rows["decode"]],
        {name: [tb_s(row, name) for row in rows["decode"]] for name in shown},
        ylabel="TB/s",
        title=f"Decode, {arguments.kv} cache, 32 query heads, 8 KV heads, head_dim 128, blocks of 16",
    )


if __name__ == "__main__":
    main()
