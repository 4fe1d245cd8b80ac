"""Host cost of the block manager: ``python -m bench.host``. Microseconds, medians, beside a manager in Python loops.

The Python manager makes the same decisions (``tests/cache_model.py``, hashes by hashlib) and is timed in the same run,
call by call in turn. "Cold" means that more than the last-level cache was written before each call. Numbers from
``PagedKVCache`` are those of ``_host`` and what the class adds: sequence names, locking, and torch tensors.
"""

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench import common
from paged_attn import PagedKVCache, _host
from paged_attn.cli._arguments import positive
from tests.cache_model import ModelManager, block_key, root_key

BLOCK_SIZE = 16
NUM_SEQS = 256
PROMPT = 8192
GATES = {  # microseconds, on two cores
    "decode step, warm": 40,
    "decode step, cold": 150,
    "add, nothing cached": 250,
    "add, all cached": 120,
    "free": 15,
    "hash chain of 512 blocks": 70,
}


class Samples:
    """Times of named calls; a call is timed once an iteration, so that neighbours in time are compared."""

    def __init__(self) -> None:
        self.ns: dict[tuple[str, str], list[int]] = {}
        self.recording = True
        self._flush = np.zeros(128 << 20, dtype=np.uint8)

    def time(self, case: str, manager: str, call: Callable[..., object], *args: object, cold: bool = False) -> object:
        if cold:
            self._flush[::64] += 1
        start = time.perf_counter_ns()
        result = call(*args)
        elapsed = time.perf_counter_ns() - start
        if self.recording:
            self.ns.setdefault((case, manager), []).append(elapsed)
        return result

    def rows(self) -> list[dict[str, object]]:
        rows = []
        for case in dict.fromkeys(case for case, _ in self.ns):
            row: dict[str, object] = {"case": case}
            for manager in ("_host", "PagedKVCache", "Python loops"):
                if (case, manager) in self.ns:
                    row[manager] = round(statistics.median(self.ns[case, manager]) / 1e3, 1)
            row["gate"] = next((gate for name, gate in GATES.items() if case.startswith(name)), "")
            rows.append(row)
        return rows


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(length)]


def decode(samples: Samples, num_blocks: int, rounds: int) -> None:
    """``prepare`` and ``commit`` for 256 sequences of about 1,000 tokens, one token each, numpy in and out."""
    label = "" if num_blocks < 10**6 else f", {num_blocks:,} blocks"
    rng = random.Random(0)
    host, model = _host.BlockManager(num_blocks, BLOCK_SIZE), ModelManager(num_blocks, BLOCK_SIZE)
    cache = PagedKVCache(1, num_blocks, 1, 8, block_size=BLOCK_SIZE, dtype=torch.float16, device="cpu")
    handles = []
    for i in range(NUM_SEQS):
        prompt = random_prompt(rng, rng.randrange(900, 1100))
        (handle, _), _ = host.add(prompt, None)
        host.commit(handle, prompt)
        handles.append(handle)
        for manager in (cache, model):
            manager.add(f"request-{i}", prompt)
            manager.commit(f"request-{i}", prompt)
    handles = np.array(handles)
    names = [f"request-{i}" for i in range(NUM_SEQS)]
    lens, tokens = np.ones(NUM_SEQS, dtype=np.int64), np.full(NUM_SEQS, 7)
    lens_list, tokens_list = lens.tolist(), tokens.tolist()

    def host_step() -> None:
        host.prepare(None, handles, lens)
        host.commit_batch(None, handles, tokens)

    def cache_step() -> None:
        cache.prepare(names, lens_list)
        cache.commit_batch(names, tokens_list)

    def model_step() -> None:
        step = model.prepare(names, lens_list)
        table = np.full((NUM_SEQS, max(map(len, step["table"]))), -1, dtype=np.int32)
        for row, blocks in zip(table, step["table"]):
            row[: len(blocks)] = blocks
        for key in ("slots", "positions", "seq_lens"):
            np.array(step[key])
        for name, token in zip(names, tokens_list):
            model.commit(name, [token])

    for cold in (False, True):
        case = f"decode step, {'cold' if cold else 'warm'}{label}"
        for i in range(rounds):
            samples.time(case, "_host", host_step, cold=cold)
            samples.time(case, "PagedKVCache", cache_step, cold=cold)
            if i % 4 == 0:
                samples.time(case, "Python loops", model_step, cold=cold)


def prompts(samples: Samples, num_blocks: int, rounds: int, evicting: bool = False) -> None:
    """Add a prompt of 8,192 tokens (a list), again when it is cached, and free it."""
    label = f", {num_blocks:,} blocks" if num_blocks >= 10**6 else ""
    first = "add, evicting 512 blocks" if evicting else f"add, nothing cached{label}"
    rng = random.Random(1)
    host, model = _host.BlockManager(num_blocks, BLOCK_SIZE), ModelManager(num_blocks, BLOCK_SIZE)
    cache = PagedKVCache(1, num_blocks, 1, 8, block_size=BLOCK_SIZE, dtype=torch.float16, device="cpu", watermark=0.0)
    warm_up = num_blocks // (PROMPT // BLOCK_SIZE) if evicting else 2
    for i in range(rounds + warm_up):
        samples.recording = i >= warm_up
        prompt = random_prompt(rng, PROMPT)
        (handle, _), _ = samples.time(first, "_host", host.add, prompt, None)
        samples.time(f"commit 8,192 tokens{label}", "_host", host.commit, handle, prompt)
        samples.time(f"free{label}", "_host", host.free, handle)
        (handle, hits), _ = samples.time(f"add, all cached{label}", "_host", host.add, prompt, None)
        assert hits == PROMPT - BLOCK_SIZE
        host.free(handle)
        managers = [("PagedKVCache", cache)] + [("Python loops", model)] * (i % 5 == 0 or i < warm_up)
        for name, manager in managers:
            samples.time(first, name, manager.add, "x", prompt)
            samples.time(f"commit 8,192 tokens{label}", name, manager.commit, "x", prompt)
            samples.time(f"free{label}", name, manager.free, "x")
            samples.time(f"add, all cached{label}", name, manager.add, "x", prompt)
            manager.free("x")


def hashes(samples: Samples, rounds: int) -> None:
    rng = random.Random(2)
    tokens = np.array(random_prompt(rng, PROMPT), dtype=np.int32)
    blocks = tokens.reshape(-1, BLOCK_SIZE).tolist()

    def by_hashlib() -> None:
        key = root_key(None)
        for block in blocks:
            key = block_key(key, block)

    case = "hash chain of 512 blocks"
    for _ in range(rounds):
        samples.time(case, "_host", _host.hash_chain, tokens, BLOCK_SIZE)
        samples.time(case, "Python loops", by_hashlib)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=100, help="samples of each call")
    parser.add_argument("--gate", action="store_true", help="fail where a median misses its gate")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of host.json")
    args = parser.parse_args()
    samples = Samples()
    decode(samples, 32_768, args.rounds)
    prompts(samples, 65_536, args.rounds)
    prompts(samples, 4_096, args.rounds, evicting=True)
    hashes(samples, args.rounds)
    decode(samples, 1_000_000, args.rounds)
    prompts(samples, 1_000_000, args.rounds)
    rows = samples.rows()
    common.write_results(
        "host",
        rows,
        device="cpu",
        directory=args.out,
        sha_instructions=_host.sha256_has_instructions(),
        python=platform.python_version(),
        unit="microseconds a call, median",
    )
    common.print_table(rows, ["case", "_host", "PagedKVCache", "Python loops", "gate"])
    missed = [row["case"] for row in rows if row["gate"] and row["_host"] > row["gate"]]
    if missed:
        print("gate missed:", "; ".join(missed))
    return 1 if args.gate and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
