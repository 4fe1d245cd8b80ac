"""Every CUDA path once on small shapes, under compute-sanitizer: ``python -m tests.sanitize [TOOL...]``."""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
INSIDE = "PAGED_ATTN_UNDER_SANITIZER"


def attend_everywhere() -> Iterator[str]:
    """Decode, verification and prefill by each backend; every kind of cache; all options.  Yields what has run."""
    import paged_attn

    from .conftest import Ops
    from .test_attention import OPTIONS, check_attention

    shapes = [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 256)]
    for backend, served in {"sm90": shapes, "mma": shapes, "auto": [(torch.float32, 128)]}.items():
        ops = Ops(paged_attn, "cuda", backend)
        for dtype, head_dim in served:
            shape = {"dtype": dtype, "head_dim": head_dim, "layout": "HND"}
            check_attention(ops, [530, 17, 0, 1], None, **shape)
            check_attention(ops, [300, 17, 5], [150, 3, 1], OPTIONS["all"], **shape)
            yield f"attention, {backend}, {dtype}, head_dim {head_dim}"
    for cache_dtype, kind in ((torch.float8_e4m3fn, "head"), (torch.float8_e5m2, "tensor"), (torch.int8, "token_head")):
        for backend in ("auto", "mma"):
            quantised = {"dtype": torch.bfloat16, "cache_dtype": cache_dtype, "scale_kind": kind}
            ops = Ops(paged_attn, "cuda", backend)
            check_attention(ops, [530, 17], None, head_dim=128, **quantised)
            check_attention(ops, [130, 17], [40, 1], **quantised)
        yield f"attention, {cache_dtype}, scales per {kind}"


def move_everywhere() -> Iterator[str]:
    """The operations on the cache.  Yields what has run."""
    import paged_attn

    from . import test_cases_cache as cache
    from . import test_gather as gather
    from . import test_merge as merge
    from . import test_write as write
    from .conftest import Ops

    ops = Ops(paged_attn, "cuda")
    cache.check_negative_slots(ops)
    cache.check_copy_extent(ops, torch.bfloat16, "HND")
    cache.check_swap_extent(ops, torch.bfloat16)
    yield "copy and swap"
    write.check_quantised_write(ops, torch.float8_e4m3fn, scale_kind="token_head")
    write.check_write(ops, torch.bfloat16, 3, 24)
    yield "write"
    gather.check_gather(ops, dtype=torch.bfloat16)
    gather.check_gather(ops, cache_dtype=torch.int8, scale_kind="head")
    merge.check_merge(ops, torch.bfloat16)
    yield "gather and merge"


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    candidates = [shutil.which("compute-sanitizer"), *(f"{home}/bin/compute-sanitizer" for home in homes if home)]
    return next((path for path in candidates if path and Path(path).exists()), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=TOOLS, metavar="TOOL", help=", ".join(TOOLS))
    tools = parser.parse_args().tools
    if os.environ.get(INSIDE):
        for done in itertools.chain(attend_everywhere(), move_everywhere()):
            print(done, flush=True)
        torch.cuda.synchronize()
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None or not torch.cuda.is_available():
        print("needs a CUDA device and compute-sanitizer, which comes with the CUDA toolkit", file=sys.stderr)
        return 1
    # Allocations of their own, so that a read past a tensor's end is a read past an allocation.
    environment = os.environ | {INSIDE: "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    results = []
    for tool in tools:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "1", "--print-limit", "5"]
        if tool != "initcheck":  # which must see torch's kernels write
            command += ["--kernel-name", "kns=paged_attn"]
        results.append(subprocess.run([*command, sys.executable, "-m", "tests.sanitize"], env=environment).returncode)
        print(f"{tool}: {'clean' if results[-1] == 0 else 'errors'}", flush=True)
    return int(any(results))


if __name__ == "__main__":
    sys.exit(main())
