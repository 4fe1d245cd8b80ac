"""What the benchmarks share: timing in CUDA graphs, ceilings of the device, the record of a run, tables and plots.

A kernel is a callable of the call's index: it picks its buffers by that index, so that calls rotate through sets of
buffers whose total is many times the L2 cache. Run a benchmark from the repository's root: ``python -m bench.NAME``.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
SOURCES = ["setup.py", "csrc", "paged_attn", "bench/*.py", "bench/*.cu"]  # what a result depends on
ROTATION_BYTES = 1 << 30

Kernel = Callable[[int], object]


@dataclass
class Timing:
    """Microseconds a call: the median over rounds, and the 10th and 90th percentile."""

    us: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])

    def tb_s(self, num_bytes: float) -> float:
        """TB/s when a call moves ``num_bytes``."""
        return num_bytes / self.us * 1e-6


def require_cuda() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")


def rotation(bytes_per_call: float, total: int = ROTATION_BYTES) -> int:
    """How many buffer sets to rotate through, so that together they exceed ``total`` bytes."""
    return max(2, math.ceil(total / bytes_per_call))


def _elapsed_us(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def capture(kernel: Kernel, calls: int) -> torch.cuda.CUDAGraph:
    """One graph of ``kernel(0) .. kernel(calls - 1)``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            kernel(i)
    return graph


def time_kernels(
    kernels: Mapping[str, Kernel], *, sets: int, rounds: int = 11, min_ms: float = 10.0, seed: int = 0
) -> dict[str, Timing]:
    """Time kernels against each other: each is one graph of many calls, and a round replays every graph once, in
    random order.

    Args:
        kernels: by name; each must be capturable.
        sets: buffer sets the kernels rotate through (see ``rotation``); a graph holds at least that many calls.
        rounds: replays of each graph.
        min_ms: about the least duration of a graph.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, kernel in kernels.items():
        for i in range(2):
            kernel(i)
        torch.cuda.synchronize()
        probes = min(sets, 20)
        us = _elapsed_us(lambda kernel=kernel, probes=probes: [kernel(i) for i in range(probes)]) / probes
        calls = min(max(sets, math.ceil(min_ms * 1e3 / us)), max(sets, 4096))
        graphs[name] = capture(kernel, calls), calls
        graphs[name][0].replay()
    torch.cuda.synchronize()
    order, shuffler = list(graphs), random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            graph, calls = graphs[name]
            samples[name].append(_elapsed_us(graph.replay) / calls)
    return {name: Timing.of(samples[name]) for name in graphs}


def time_calls(kernel: Kernel, *, rounds: int = 11, calls: int = 1, host_ms: float = 0.0) -> Timing:
    """Time what cannot be captured: ``rounds`` samples of ``calls`` plain calls between two events.

    The device is kept busy for about ``host_ms`` before the first event, so that the host's share of up to that time is
    hidden, as in a program whose host runs ahead.
    """
    kernel(0)
    samples = []
    for r in range(rounds):
        torch.cuda.synchronize()
        if host_ms:
            torch.cuda._sleep(int(host_ms * 2e6))
        samples.append(_elapsed_us(lambda r=r: [kernel(r * calls + i) for i in range(calls)]) / calls)
    return Timing.of(samples)


_READ_SOURCE = """
extern "C" __global__ void read_kernel(const uint4* data, int count, unsigned* sink) {
  unsigned sum = 0;
  int i = blockIdx.x * 2048 + threadIdx.x;
#pragma unroll
  for (int k = 0; k < 8; ++k, i += 256) {
    if (i < count) {
      const uint4 v = data[i];
      sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}
"""


class Ceilings:
    """What plain copies and reads reach on this device: of 4 GiB, and of any size."""

    def __init__(self) -> None:
        self._sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._read_kernel = torch.cuda._compile_kernel(_READ_SOURCE, "read_kernel")
        big = 4 << 30
        self.read_tb_s = self.read(big).tb_s(big)
        self.copy_tb_s = self.copy(big // 2).tb_s(big)

    def read(self, num_bytes: int) -> Timing:
        """A kernel that reads ``num_bytes`` once, 16 bytes a thread at a time."""
        sets = rotation(num_bytes)
        count = num_bytes // 16
        data = torch.randint(-(1 << 31), 1 << 31, (sets, count * 4), dtype=torch.int32, device="cuda")
        grid = (math.ceil(count / 2048), 1, 1)

        def read(i: int) -> None:
            self._read_kernel(grid=grid, block=(256, 1, 1), args=[data[i % sets], count, self._sink])

        return time_kernels({"read": read}, sets=sets)["read"]

    def copy(self, num_bytes: int) -> Timing:
        """``Tensor.copy_`` of ``num_bytes``: it reads and writes that many. Not in a graph, where it would become a
        copy node, which is slower."""
        sets = rotation(2 * num_bytes)
        source = torch.randint(-(1 << 31), 1 << 31, (sets, num_bytes // 4), dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        return time_calls(lambda i: target[i % sets].copy_(source[i % sets]), calls=sets, host_ms=1.0)


def paged_caches(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    sets: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "HND",
) -> list[tuple[Tensor, Tensor]]:
    """``sets`` pairs of random caches, each viewed as ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
    shape = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
    caches = []
    for _ in range(sets):
        both = torch.randn(2, num_blocks, *shape, head_dim, dtype=torch.bfloat16, device="cuda")
        both = (both * 40).round().to(dtype) if dtype == torch.int8 else both.to(dtype)
        caches.append(tuple(part if layout == "NHD" else part.transpose(1, 2) for part in both))
    return caches


def random_block_table(seq_lens: Sequence[int], block_size: int, *, seed: int = 0) -> tuple[Tensor, int]:
    """A table ``[S, M]`` that deals blocks to the sequences in random order, and how many blocks it uses."""
    counts = [math.ceil(length / block_size) for length in seq_lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, blocks in zip(table, order.split(counts)):
        row[: len(blocks)] = blocks
    return table.cuda(), sum(counts)


@dataclass(frozen=True)
class FlashInferBatch:
    """A batch as FlashInfer's wrappers take it.

    ``indptr``, ``indices`` and ``last_page_len`` list the blocks of every sequence; ``caches`` are the pairs in the
    dimension order that FlashInfer names ``layout``.
    """

    module: ModuleType
    workspace: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    caches: list[tuple[Tensor, Tensor]]


def flashinfer_batch(
    caches: Sequence[tuple[Tensor, Tensor]], layout: str, block_table: Tensor, seq_lens: Tensor
) -> FlashInferBatch | None:
    """The batch for FlashInfer, with 256 MiB of zeroed workspace; None where it cannot be imported."""
    try:
        module = importlib.import_module("flashinfer")
    except ImportError:
        return None
    block_size = caches[0][0].shape[1]
    counts = (seq_lens + block_size - 1) // block_size
    return FlashInferBatch(
        module,
        torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"),
        torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)]),
        torch.cat([row[:count] for row, count in zip(block_table, counts.tolist())]),
        (seq_lens - 1) % block_size + 1,
        [tuple(t if layout == "NHD" else t.transpose(1, 2) for t in pair) for pair in caches],
    )


def peer(name: str, make: Callable[[], Kernel | None]) -> Kernel | None:
    """The kernel of another library that ``make`` returns, called once.

    None where there is none, or, with the reason printed, where it fails: such libraries compile at first use.
    """
    try:
        kernel = make()
        if kernel is not None:
            kernel(0)
            torch.cuda.synchronize()
        return kernel
    except Exception as error:  # no part of it is ours
        print(f"{name} is missing: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return None


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")), "CPU")


def source_commit() -> str:
    """The commit that runs: HEAD, with "-dirty" where the code differs from it; "unknown" outside a git checkout.

    ``COMMIT`` in the environment comes first.
    """
    named = os.environ.get("COMMIT")
    if named or not (ROOT / ".git").exists():
        return named or "unknown"
    git = ("git", "-C", str(ROOT))
    head = _output_of(*git, "rev-parse", "--short=12", "HEAD")
    changed = _output_of(*git, "status", "--porcelain", "--", *SOURCES)
    return "unknown" if head is None or changed is None else f"{head}-dirty" if changed else head


def run_record(device: str = "cuda") -> dict[str, object]:
    """Where and when a result was measured, and what."""
    if device == "cpu":
        facts: dict[str, object] = {"device": _cpu_name(), "threads": torch.get_num_threads()}
    else:
        properties = torch.cuda.get_device_properties(0)
        facts = {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
            "cuda": torch.version.cuda,
        }
    return {
        **facts,
        "torch": torch.__version__,
        "commit": source_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def to_json(result: Mapping[str, object]) -> str:
    """JSON in which a row of a list takes one line, so that another run changes as many lines as there are rows."""

    def text(value: object) -> str:
        if not isinstance(value, list) or not value:
            return json.dumps(value)
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {text(value)}" for key, value in result.items()) + "\n}\n"


def write_results(
    name: str, rows: Sequence[Mapping[str, object]], *, device: str = "cuda", directory: Path = RESULTS, **facts
) -> Path:
    """Write ``NAME.json``: the record of the run, ``facts`` (bytes formula, ceilings), and the rows."""

    def plain(value: object) -> object:
        if isinstance(value, Timing):
            return {key: round(number, 3) for key, number in asdict(value).items()}
        return round(value, 4) if isinstance(value, float) else value

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    result = {
        **run_record(device),
        **facts,
        "rows": [{key: plain(value) for key, value in row.items()} for row in rows],
    }
    path.write_text(to_json(result))
    return path


def cell(value: object) -> str:
    """How tables show a value: three significant digits; a timing is its median, None is empty."""
    if isinstance(value, Timing):
        value = value.us
    elif isinstance(value, Mapping):  # a timing as ``write_results`` stored it
        value = value["us"]
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def print_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str] | None = None) -> None:
    """Print rows as a Markdown table."""
    from tabulate import tabulate

    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    cells = [[cell(row.get(key)) for key in columns] for row in rows]
    print(tabulate(cells, columns, tablefmt="github", disable_numparse=True))


def bar_chart(
    path: Path, labels: Sequence[str], series: Mapping[str, Sequence[float]], *, ylabel: str, title: str = ""
) -> None:
    """Save grouped bars as SVG: one group a label, one colour a series."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text, not as outlines
    matplotlib.rcParams["svg.hashsalt"] = "paged_attn"  # the same ids every time
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(max(6.0, 0.7 * len(labels) + 2), 3.6), layout="constrained")
    width = 0.8 / len(series)
    for k, (name, values) in enumerate(series.items()):
        axes.bar([x + (k - (len(series) - 1) / 2) * width for x in range(len(labels))], values, width, label=name)
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    axes.set(ylabel=ylabel, title=title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
