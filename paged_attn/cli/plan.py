"""How many sequences a memory budget holds, and what each block size wastes."""

import argparse
import re
from pathlib import Path

import numpy as np
import torch

from paged_attn import capacity
from paged_attn.cli._arguments import checked, positive
from paged_attn.cli._models import DTYPES
from paged_attn.cli._traces import read_csv

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def memory_size(text: str) -> int:
    """``40GiB``, ``80GB``, ``1.5 TiB`` or plain bytes, in bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", text, re.IGNORECASE)
    unit = match[2].upper() if match else ""
    unit = unit if unit in _UNITS else f"{unit}B"
    if match is None or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected a size like 40GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[unit])


_head_dim = checked(
    int,
    lambda d: 8 <= d <= capacity.MAX_HEAD_DIM and d % 8 == 0,
    f"a multiple of 8 up to {capacity.MAX_HEAD_DIM}",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, required=True)
    parser.add_argument("--kv-heads", type=positive, required=True)
    parser.add_argument("--head-dim", type=_head_dim, required=True)
    parser.add_argument("--memory", type=memory_size, required=True, help="for the cache, such as 40GiB")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--block-sizes", type=positive, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--trace", type=Path, help="CSV with columns input_len and output_len, one request a row")
    parser.add_argument("--input-len", type=positive, default=1024, help="prompt tokens, without a trace")
    parser.add_argument("--output-len", type=positive, default=256, help="output tokens, without a trace")
    parser.add_argument("--max-len", type=positive, default=4096, help="of contiguous reservations to compare with")


def size(num_bytes: float) -> str:
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop()
    return f"{num_bytes:.4g} {units[-1]}"


def table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def main(args: argparse.Namespace) -> int:
    if args.trace:
        inputs, outputs = read_csv(args.trace)
        what = f"{args.trace.name}: {len(inputs):,} requests"
    else:
        inputs, outputs = np.array([args.input_len]), np.array([args.output_len])
        what = "requests of one kind"
    lengths = inputs + outputs
    shape = {"num_layers": args.layers, "num_kv_heads": args.kv_heads, "head_dim": args.head_dim}
    float_options = {"dtype": DTYPES[args.dtype]}
    fp8_options = {"kv_dtype": torch.float8_e4m3fn}
    per_token = [capacity.bytes_per_block(**shape, block_size=1, **options) for options in (float_options, fp8_options)]

    print(f"{size(args.memory)} for {args.layers} layers, {args.kv_heads} KV heads of {args.head_dim}")
    print(f"a token takes {size(per_token[0])} in {args.dtype}, {size(per_token[1])} in fp8")
    print(f"{what}, {lengths.mean():,.0f} tokens on average, {lengths.max():,} at most")
    print("\nwaste: reserved but empty slots, and sequences held at once, both averaged over decode steps\n")

    rows = [["cache", "a block", "blocks", "waste", "sequences", "with fp8", "refused"]]
    for block_size in args.block_sizes:
        use = capacity.paged_use(inputs, outputs, block_size)
        held, counts = [], []
        for options in (float_options, fp8_options):
            block = capacity.bytes_per_block(**shape, block_size=block_size, **options)
            counts.append(args.memory // block)
            held.append(f"{counts[-1] * block_size / use.reserved:,.0f}")
        refused = (lengths > counts[0] * block_size).mean()
        block = capacity.bytes_per_block(**shape, block_size=block_size, **float_options)
        rows.append(
            [f"blocks of {block_size}", size(block), f"{counts[0]:,}", f"{use.waste:.1%}", *held, f"{refused:.1%}"]
        )
    for max_len in dict.fromkeys([args.max_len, int(lengths.max())]):
        use = capacity.contiguous_use(inputs, outputs, max_len)
        held = [f"{args.memory // (token * max_len):,}" for token in per_token]
        name = f"contiguous, {max_len:,}"
        refused = use.refused if args.memory >= per_token[0] * max_len else 1.0
        rows.append([name, size(per_token[0] * max_len), held[0], f"{use.waste:.1%}", *held, f"{refused:.1%}"])
    print(table(rows))
    return 0
