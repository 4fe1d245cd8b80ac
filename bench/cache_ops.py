"""Cache operations beside what torch and FlashInfer offer: microseconds, bytes moved and their share of the device's
copy rate.

Each row states its bytes: what the operation must read plus what it must write. Device rows are CUDA graphs over
buffers that rotate through a gibibyte or more; swaps are plain calls behind a busy device (their host time is a
column of its own), compared with one pinned copy.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

import paged_attn
from bench import common

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
ROW = KV_HEADS * HEAD_DIM  # elements of one token's keys

Row = dict[str, object]


def row(case: str, num_bytes: int, formula: str, times: dict[str, common.Timing], ceiling_tb_s: float) -> Row:
    """A line of the table; ``times`` has "ours" and others by name."""
    ours = times["ours"]
    return {
        "case": case,
        "MB": num_bytes / 1e6,
        "us": ours,
        "GB/s": 1e3 * ours.tb_s(num_bytes),
        "of ceiling": f"{ours.tb_s(num_bytes) / ceiling_tb_s:.1%}",
        **{f"{name} us": timing for name, timing in times.items() if name != "ours"},
        "bytes": formula,
    }


def pools(tokens: int, sets: int, layout: str, dtype: torch.dtype = torch.bfloat16) -> list[tuple[Tensor, Tensor]]:
    return common.paged_caches(
        -(-tokens // BLOCK_SIZE), BLOCK_SIZE, KV_HEADS, HEAD_DIM, sets=sets, dtype=dtype, layout=layout
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bench_write(tokens: int, layout: str, dtype: torch.dtype, scale_per: str, ceiling: float) -> Row:
    num_bytes = 2 * tokens * ROW * (2 + dtype.itemsize)
    sets = common.rotation(num_bytes)
    new = torch.randn(sets, 2, tokens, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    caches = pools(2 * tokens, sets, layout, dtype)
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]
    at = (slots // BLOCK_SIZE, slots % BLOCK_SIZE)
    scale_shape = {"tensor": (1,), "head": (KV_HEADS,), "token": caches[0][0].shape[:3]}.get(scale_per)
    scales = [
        {name: torch.ones(scale_shape, device="cuda") for name in ("k_scale", "v_scale")} if scale_shape else {}
        for _ in range(sets)
    ]

    def ours(i: int) -> None:
        paged_attn.write_kv(*new[i % sets], *caches[i % sets], slots, **scales[i % sets])

    def torch_put(i: int) -> None:
        for rows, cache in zip(new[i % sets], caches[i % sets]):
            cache.index_put_(at, rows)

    def flashinfer() -> common.Kernel | None:
        """Its append, for one sequence that has all blocks in order: the position of a token is its slot."""
        num_blocks = caches[0][0].shape[0]
        table = torch.arange(num_blocks, dtype=torch.int32, device="cuda").unsqueeze(0)
        batch = common.flashinfer_batch(caches, layout, table, torch.full_like(table[0, :1], num_blocks * BLOCK_SIZE))
        if batch is None:
            return None
        positions = slots.int()
        sequences = torch.zeros_like(positions)
        pages = (batch.indices, batch.indptr, batch.last_page_len)
        append = batch.module.append_paged_kv_cache
        return lambda i: append(*new[i % sets], sequences, positions, batch.caches[i % sets], *pages, layout)

    kernels = {"ours": ours}
    if dtype == torch.bfloat16:  # neither quantises
        kernels["torch"] = torch_put
        append = common.peer(f"FlashInfer append, {tokens} tokens", flashinfer)
        if append is not None:
            kernels["FlashInfer"] = append
    case = f"write_kv {tokens} tokens {layout} {name_of(dtype)}" + (f", scale a {scale_per}" if scale_per else "")
    formula = f"2 x tokens x {ROW} x (2 + {dtype.itemsize})"
    return row(case, num_bytes, formula, common.time_kernels(kernels, sets=sets), ceiling)


def bench_rope(tokens: int, ceiling: float) -> list[Row]:
    """Rotation and write in one launch, beside the same op without slots followed by write_kv, and torch's kernels."""
    num_bytes = tokens * HEAD_DIM * 2 * (2 * HEADS + 5 * KV_HEADS)
    sets = common.rotation(num_bytes)
    qkv = torch.randn(sets, tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    parts = [one.split([HEADS, KV_HEADS, KV_HEADS], dim=1) for one in qkv]
    caches = pools(2 * tokens, sets, "HND")
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]
    at = (slots // BLOCK_SIZE, slots % BLOCK_SIZE)
    positions = torch.arange(tokens, device="cuda")
    angles = torch.randn(tokens, HEAD_DIM // 2, device="cuda")
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)

    def fused(i: int) -> None:
        paged_attn.rope_write_kv(*parts[i % sets], positions, cos_sin, *caches[i % sets], slots)

    def separate(i: int) -> None:
        paged_attn.rope_write_kv(*parts[i % sets], positions, cos_sin, *caches[i % sets], slots[:0])
        paged_attn.write_kv(*parts[i % sets][1:], *caches[i % sets], slots)

    def torch_kernels(i: int) -> None:
        query, key, value = parts[i % sets]
        cos, sin = (half.repeat(1, 2).unsqueeze(1) for half in cos_sin[positions].bfloat16().chunk(2, dim=-1))
        for rows in (query, key):
            x, y = rows.chunk(2, dim=-1)
            rows.copy_(rows * cos + torch.cat([-y, x], dim=-1) * sin)
        for rows, cache in zip((key, value), caches[i % sets]):
            cache.index_put_(at, rows)

    kernels = {"fused": fused, "separate": separate, "torch": torch_kernels}
    times = common.time_kernels(kernels, sets=sets)
    formula = f"tokens x {HEAD_DIM} x 2 x (2 x {HEADS} + 5 x {KV_HEADS})"
    name = f"rope_write_kv {tokens} tokens"
    return [
        row(name, num_bytes, formula, {"ours": times["fused"], "torch": times["torch"]}, ceiling),
        row(f"{name}, rotation then write_kv", num_bytes, formula, {"ours": times["separate"]}, ceiling),
    ]


def bench_gather(lens: list[int], layout: str, dtype: torch.dtype, ceiling: float) -> Row:
    tokens = sum(lens)
    num_bytes = 2 * tokens * ROW * (2 + dtype.itemsize)
    sets = common.rotation(num_bytes)
    caches = pools(tokens, sets, layout, dtype)
    table, _ = common.random_block_table(lens, BLOCK_SIZE)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    blocks = table.flatten().long()

    def ours(i: int) -> None:
        paged_attn.gather_kv(*caches[i % sets], table, seq_lens, total_tokens=tokens)

    def torch_select(i: int) -> None:
        for cache in caches[i % sets]:
            cache.index_select(0, blocks).reshape(-1, KV_HEADS, HEAD_DIM)

    kernels = {"ours": ours, "torch": torch_select} if dtype == torch.bfloat16 else {"ours": ours}
    case = f"gather_kv {len(lens)} x {lens[0]} {layout} {name_of(dtype)}"
    formula = f"2 x tokens x {ROW} x ({dtype.itemsize} + 2)"
    return row(case, num_bytes, formula, common.time_kernels(kernels, sets=sets), ceiling)


def bench_copy(ceiling: float, layers: int = 32, num_blocks: int = 2000) -> list[Row]:
    pool = torch.randn(layers, 2, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    caches = [cache.transpose(1, 2) for cache in pool.flatten(0, 1).unbind()]

    def case(count: int, place: str) -> Row:
        num_bytes = 2 * len(caches) * BLOCK_SIZE * ROW * 2 * count
        sets = min(common.rotation(num_bytes), num_blocks // (2 * count))
        ids = torch.randperm(num_blocks)[: 2 * count * sets].view(sets, count, 2)
        on_device = ids.cuda()
        mapping = ids if place == "host" else on_device

        def torch_copy(i: int) -> None:
            src, dst = on_device[i % sets].unbind(1)
            for cache in caches:
                cache.index_copy_(0, dst, cache.index_select(0, src))

        kernels = {"ours": lambda i: paged_attn.copy_blocks(caches, mapping[i % sets]), "torch": torch_copy}
        formula = "2 x blocks x layers x 2 x 32 KiB"
        name = f"copy_blocks {count} x {layers} layers, {place} mapping"
        return row(name, num_bytes, formula, common.time_kernels(kernels, sets=sets), ceiling)

    return [case(count, place) for count in (1, 8, 1000) for place in ("host", "device")]


def bench_merge(tokens: int, ceiling: float) -> Row:
    num_bytes = 3 * tokens * HEADS * (HEAD_DIM * 2 + 4)
    sets = common.rotation(num_bytes)
    outputs = torch.randn(sets, 3, tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    lses = torch.randn(sets, 3, tokens, HEADS, device="cuda")

    def ours(i: int) -> None:
        (a, b, out), (lse_a, lse_b, out_lse) = outputs[i % sets], lses[i % sets]
        paged_attn.merge_attn_states(a, lse_a, b, lse_b, out=out, out_lse=out_lse)

    formula = f"3 x tokens x {HEADS} x ({HEAD_DIM} x 2 + 4)"
    times = common.time_kernels({"ours": ours}, sets=sets)
    return row(f"merge_attn_states {tokens} tokens", num_bytes, formula, times, ceiling)


def bench_swap(total: int = 128 << 20) -> list[Row]:
    """Blocks of 4 KiB (one KV head) and 32 KiB (eight) between device and pinned host memory."""
    device = torch.randint(-128, 127, (total,), device="cuda", dtype=torch.int8)
    host = torch.empty(total, dtype=torch.int8, pin_memory=True)
    host.copy_(device)

    def case(direction: str, source: Tensor, to: Tensor, heads: int, pattern: str, ceiling: float) -> Row:
        shape = (-1, heads, BLOCK_SIZE, HEAD_DIM)
        src, dst = (t.view(torch.bfloat16).view(shape).transpose(1, 2) for t in (source, to))
        count = src.shape[0] // 2
        if pattern == "scattered":
            mapping = torch.stack([torch.randperm(2 * count)[:count] for _ in range(2)], dim=1)
        else:
            mapping = torch.arange(count).view(-1, 1).repeat(1, 2)
        some = mapping[:256].tolist()

        def torch_loop(_: int) -> None:
            for a, b in some:
                dst[b].copy_(src[a], non_blocking=True)

        def ours(_: int) -> None:
            paged_attn.swap_blocks([src], [dst], mapping)

        ours(0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        ours(0)
        host_us = 1e6 * (time.perf_counter() - start)
        loop = common.time_calls(torch_loop, rounds=3)
        times = {
            "ours": common.time_calls(ours, rounds=7, host_ms=5.0),
            "torch": common.Timing(*(us * count / len(some) for us in (loop.us, loop.low, loop.high))),
        }
        name = f"swap_blocks {direction}, {pattern} {4 * heads} KiB"
        return row(name, total // 2, "blocks x block size", times, ceiling) | {"host us": host_us}

    rows = []
    for direction, source, to in (("to device", host, device), ("to host", device, host)):
        whole = common.time_calls(
            lambda _, to=to, source=source: to.copy_(source, non_blocking=True), rounds=7, host_ms=1.0
        )
        ceiling = whole.tb_s(total)
        rows.append(row(f"one pinned copy {direction}", total, "size", {"ours": whole}, ceiling))
        rows += [
            case(direction, source, to, heads, pattern, ceiling)
            for heads in (1, 8)
            for pattern in ("scattered", "contiguous")
        ]
    return rows


def bench_writes(ceiling: float) -> list[Row]:
    fp8 = torch.float8_e4m3fn
    cases = [(tokens, layout, torch.bfloat16, "") for tokens in (256, 2048, 8192) for layout in ("HND", "NHD")]
    cases += [(tokens, "HND", fp8, per) for tokens in (256, 8192) for per in ("tensor", "head", "token")]
    cases += [(8192, "HND", torch.int8, per) for per in ("tensor", "token")]
    return [bench_write(*case, ceiling) for case in cases]


def bench_gathers(ceiling: float) -> list[Row]:
    cases = [([1024], "HND"), ([1024] * 8, "HND"), ([2048] * 64, "HND"), ([2048] * 64, "NHD")]
    rows = [bench_gather(*case, torch.bfloat16, ceiling) for case in cases]
    eight_bit = [("HND", torch.float8_e4m3fn), ("NHD", torch.float8_e4m3fn), ("HND", torch.int8)]
    return [*rows, *(bench_gather([2048] * 64, *case, ceiling) for case in eight_bit)]


def plot(rows: list[Row], path: Path) -> None:
    """GB/s of ours and of torch's kernels, where there are both."""
    both = [r for r in rows if "torch us" in r]
    rates = {
        "paged_attn": [r["GB/s"] for r in both],
        "torch": [1e3 * r["torch us"].tb_s(1e6 * r["MB"]) for r in both],
    }
    common.bar_chart(path, [r["case"] for r in both], rates, ylabel="GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = ["write", "rope", "gather", "copy", "merge", "swap"]
    parser.add_argument("--only", choices=kinds, help="one kind; nothing is written")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of cache_ops.json and .svg")
    args = parser.parse_args()
    common.require_cuda()
    ceilings = common.Ceilings()
    print(f"copy {ceilings.copy_tb_s:.3f} TB/s, read {ceilings.read_tb_s:.3f} TB/s")
    rows: list[Row] = []
    benches = {
        "write": bench_writes,
        "rope": lambda ceiling: [r for tokens in (64, 256, 8192) for r in bench_rope(tokens, ceiling)],
        "gather": bench_gathers,
        "copy": bench_copy,
        "merge": lambda ceiling: [bench_merge(tokens, ceiling) for tokens in (64, 8192)],
        "swap": lambda _: bench_swap(),
    }
    with torch.inference_mode():
        for name, bench in benches.items():
            if args.only in (None, name):
                rows += bench(ceilings.copy_tb_s)
                torch.cuda.empty_cache()
    columns = ["case", "MB", "us", "GB/s", "of ceiling", "host us", "torch us", "FlashInfer us", "bytes"]
    common.print_table(rows, columns)
    if args.only:
        return
    common.write_results(
        "cache_ops", rows, directory=args.out, copy_tb_s=ceilings.copy_tb_s, read_tb_s=ceilings.read_tb_s
    )
    plot(rows, args.out / "cache_ops.svg")


if __name__ == "__main__":
    main()
