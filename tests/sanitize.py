"""Every CUDA path once on small shapes, under compute-sanitizer: ``python -m tests.sanitize [TOOL...]``.

racecheck counts an arrival at a barrier in shared memory for the thread that makes it alone. Where one lane arrives for
its warp, it may report what the other lanes have read and written before: the scales per token in prefill from 8-bit
caches, and the query rows where decode of many rows from them takes 32 tokens a warp.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def attend(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    """Decode, verification and prefill, plain and with all options."""
    import paged_attn

    from .conftest import Ops
    from .test_attention import OPTIONS, check_attention

    ops = Ops(paged_attn, "cuda", backend)
    shape = {"dtype": dtype, "head_dim": head_dim, "layout": "HND"}
    check_attention(ops, [530, 17, 0, 1], None, **shape)
    check_attention(ops, [300, 17, 5], [150, 3, 1], OPTIONS["all"], **shape)


def attend_quantised(backend: str, cache_dtype: torch.dtype, scale_kind: str) -> None:
    import paged_attn

    from .conftest import Ops
    from .test_attention import check_attention

    ops = Ops(paged_attn, "cuda", backend)
    quantised = {"dtype": torch.bfloat16, "cache_dtype": cache_dtype, "scale_kind": scale_kind}
    check_attention(ops, [530, 17], None, head_dim=128, **quantised)
    check_attention(ops, [130, 17], [40, 1], **quantised)
    check_attention(ops, [90, 17], [64, 1], num_heads=128, **quantised)


def attend_shared_stages() -> None:
    """Decode that reads several KV heads together, in lines of 128 bytes, with more items than multiprocessors."""
    import paged_attn

    from .conftest import Ops
    from .test_attention import check_attention

    ops = Ops(paged_attn, "cuda", "sm90")
    shape = {"dtype": torch.bfloat16, "num_heads": 12, "num_kv_heads": 4, "layout": "NHD"}
    seq_lens = [0, 1, 17, 700, *range(20, 150)]
    check_attention(ops, seq_lens, None, head_dim=96, **shape)
    check_attention(ops, seq_lens, None, head_dim=160, cache_dtype=torch.float8_e4m3fn, scale_kind="head", **shape)


def attend_large_tiles() -> None:
    import paged_attn

    from .conftest import Ops
    from .test_attention import check_large_tiles

    check_large_tiles(Ops(paged_attn, "cuda", "mma"))


def move() -> None:
    """The operations on the cache."""
    import paged_attn

    from . import test_cases_cache as cache
    from . import test_gather as gather
    from . import test_merge as merge
    from . import test_rope_write as rope
    from . import test_write as write
    from .conftest import Ops

    ops = Ops(paged_attn, "cuda")
    cache.check_negative_slots(ops)
    cache.check_copy_extent(ops, torch.bfloat16, "HND")
    cache.check_swap_extent(ops, torch.bfloat16)
    write.check_quantised_write(ops, torch.float8_e4m3fn, scale_kind="token_head")
    write.check_write(ops, torch.bfloat16, 3, 24)
    for cache_dtype in (None, torch.int8):
        rope.rotate_and_write(
            ops, rope.cos_sin_table(64, 64), dtype=torch.bfloat16, head_dim=64, cache_dtype=cache_dtype
        )
    gather.check_gather(ops, dtype=torch.bfloat16)
    gather.check_gather(ops, cache_dtype=torch.int8, scale_kind="head")
    merge.check_merge(ops, torch.bfloat16)


UNQUANTISED = [
    *itertools.product(("sm90", "mma"), [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 256)]),
    ("auto", (torch.float32, 128)),
]
QUANTISED = [
    *itertools.product(
        ("auto", "mma"), [(torch.float8_e4m3fn, "head"), (torch.float8_e5m2, "tensor"), (torch.int8, "token_head")]
    )
]
# Each is a process of its own: a tool spends its time on preparing the kernels that a process loads.
PARTS: dict[str, Callable[[], None]] = {
    f"{backend} {dtype} {head_dim}": partial(attend, backend, dtype, head_dim)
    for backend, (dtype, head_dim) in UNQUANTISED
}
PARTS |= {
    f"{backend} {dtype} {kind}": partial(attend_quantised, backend, dtype, kind) for backend, (dtype, kind) in QUANTISED
}
PARTS["sm90 shared stages"] = attend_shared_stages
PARTS["mma large tiles"] = attend_large_tiles
PARTS["cache"] = move


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    candidates = [shutil.which("compute-sanitizer"), *(f"{home}/bin/compute-sanitizer" for home in homes if home)]
    return next((path for path in candidates if path and Path(path).exists()), None)


def check(sanitizer: str, tool: str, part: str) -> bool:
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", "--print-limit", "5"]
    if tool != "initcheck":  # which must see torch's kernels write
        command += ["--kernel-name", "kns=paged_attn"]
    # Allocations of their own, so that a read past a tensor's end is a read past an allocation.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command += [sys.executable, "-m", "tests.sanitize", "--part", part]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"{tool}, {part}: {'errors' if run.returncode else 'clean'}", flush=True)
    if run.returncode:
        print(run.stdout, flush=True)
    return run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=TOOLS, metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--part", choices=PARTS, help="run this alone, in this process, under no tool")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time; default: one a core")
    arguments = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part]()
        torch.cuda.synchronize()
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None or not torch.cuda.is_available():
        print("needs a CUDA device and compute-sanitizer, which comes with the CUDA toolkit", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(arguments.jobs) as pool:
        clean = list(pool.map(lambda job: check(sanitizer, *job), itertools.product(arguments.tools, PARTS)))
    print(f"{sum(clean)} of {len(clean)} clean")
    return int(not all(clean))


if __name__ == "__main__":
    sys.exit(main())
