"""Serve a trace of request lengths and report throughput, latency and memory."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from paged_attn._version import __version__
from paged_attn.cli import _traces as traces
from paged_attn.cli._arguments import device, folder, non_negative, positive, positive_number, refusal_ends_command
from paged_attn.cli._models import DTYPES, default_device, default_dtype, load_model
from paged_attn.cli.generate import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", default="lognormal", metavar="NAME", help='"lognormal", or a CSV with columns '
                        "input_len and output_len")  # fmt: skip
    parser.add_argument(
        "--num-requests", type=positive, default=96, metavar="N", help="requests of the trace (default 96)"
    )
    parser.add_argument(
        "--rate", type=positive_number, metavar="R", help="Poisson arrivals a second (default: all at once)"
    )
    parser.add_argument(
        "--shared-prefix", type=non_negative, default=0, metavar="N", help="tokens that all prompts begin with"
    )
    parser.add_argument(
        "--scale", type=positive_number, default=1.0, metavar="X", help="factor on all lengths of the trace"
    )
    parser.add_argument("--seed", type=non_negative, default=0, help="of token ids and arrivals")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=folder, metavar="PATH", help="folder of a transformers causal LM")
    model.add_argument("--shape", choices=traces.SHAPES, default="tiny", help="random weights of this shape")
    parser.add_argument("--num-blocks", type=positive, metavar="N", help="blocks in the pool (default: 90%% of a GPU)")
    parser.add_argument("--block-size", type=positive, default=16, metavar="TOKENS")
    parser.add_argument(
        "--num-host-blocks", type=non_negative, default=0, metavar="N", help="host blocks for --preemption swap"
    )
    parser.add_argument("--preemption", choices=("recompute", "swap"), default="recompute")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--max-num-seqs", type=positive, default=128, metavar="N", help="most sequences in a step")
    parser.add_argument("--max-batch-tokens", type=positive, default=8192, metavar="N", help="most tokens in a step")
    parser.add_argument("--device", type=device, default=default_device())
    parser.add_argument("--dtype", choices=DTYPES, help="default bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers")
    parser.add_argument(
        "--warmup", type=non_negative, default=0, metavar="N", help="unmeasured passes over the trace first"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write memory over time and latency curves")


@dataclass
class Sample:
    """The pool after one step."""

    time: float
    blocks_used: int
    blocks_shared: int
    waste: float
    running: int
    waiting: int
    preemptions: int


@dataclass
class Run:
    """What one pass over a trace showed."""

    seconds: float
    completions: list
    samples: list[Sample] = field(default_factory=list)


def main(args: argparse.Namespace) -> int:
    from paged_attn.engine import Engine

    if args.plot and importlib.util.find_spec("matplotlib") is None:
        sys.exit("matplotlib is missing: pip install 'paged-attn[plot]'")
    dtype = DTYPES[args.dtype or default_dtype(args.device)]
    if args.model:
        model, _ = load_model(args.model, args.device, dtype)
    else:
        model = traces.random_model(args.shape, args.device, dtype)
    with refusal_ends_command():
        engine = Engine(
            model,
            num_blocks=args.num_blocks,
            block_size=args.block_size,
            num_host_blocks=args.num_host_blocks,
            enable_prefix_caching=not args.no_prefix_cache,
            max_num_seqs=args.max_num_seqs,
            max_batch_tokens=args.max_batch_tokens,
            preemption=args.preemption,
            cuda_graphs=False if args.no_cuda_graphs else None,
            compile=args.compile,
        )
    loads = make_loads(args, engine.max_model_len)
    prompts = make_prompts(loads, args.shared_prefix, model.config.vocab_size, args.seed)
    for _ in range(args.warmup):
        serve(engine, loads, prompts)
    run = serve(engine, loads, prompts)
    result = summarise(engine, loads, run, args)
    print_result(result)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(result, run, args.plot)
    return 0


def make_loads(args: argparse.Namespace, max_len: int) -> list[traces.Load]:
    if args.trace == "lognormal":
        loads = traces.lognormal(args.num_requests)
    else:
        loads = traces.from_csv(Path(args.trace), args.num_requests, int(max_len / args.scale) - args.shared_prefix)
    if args.scale != 1.0:
        loads = [
            traces.Load(max(1, int(load.input_len * args.scale)), max(1, int(load.output_len * args.scale)))
            for load in loads
        ]
    if not loads:
        sys.exit(f"--trace: no request of {args.trace} fits {max_len} tokens")
    return traces.with_arrivals(loads, args.rate, args.seed)


def make_prompts(loads: list[traces.Load], shared: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids; the first ``shared`` are those of every prompt."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab_size, shared).tolist()
    return [prefix + rng.integers(0, vocab_size, load.input_len).tolist() for load in loads]


def serve(engine, loads: list[traces.Load], prompts: list[list[int]]) -> Run:
    """Submit each request when its time has come, step until all are done."""
    from paged_attn.engine import SamplingParams

    run = Run(0.0, [])
    bar = progress_bar(sum(load.output_len for load in loads))
    began, submitted, preempted = time.perf_counter(), 0, engine.scheduler.num_preemptions
    while submitted < len(loads) or engine.has_work:
        now = time.perf_counter() - began
        while submitted < len(loads) and loads[submitted].arrival <= now:
            params = SamplingParams(max_tokens=loads[submitted].output_len, ignore_eos=True)
            with refusal_ends_command(of=f"request {submitted}: "):
                engine.add_request(prompts[submitted], params, request_id=submitted)
            submitted += 1
        if not engine.has_work:
            time.sleep(min(0.01, loads[submitted].arrival - now))
            continue
        outputs = engine.step()
        bar.update(sum(len(output.token_ids) for output in outputs))
        run.completions += [output.completion for output in outputs if output.completion]
        stats = engine.cache.stats()
        run.samples.append(
            Sample(
                time=time.perf_counter() - began,
                blocks_used=stats.blocks_used,
                blocks_shared=stats.blocks_shared,
                waste=stats.waste,
                running=len(engine.scheduler.running),
                waiting=len(engine.scheduler.waiting),
                preemptions=engine.scheduler.num_preemptions - preempted,
            )
        )
    run.seconds = time.perf_counter() - began
    bar.close()
    return run


def summarise(engine, loads: list[traces.Load], run: Run, args: argparse.Namespace) -> dict:
    cache, samples = engine.cache, run.samples
    generated = sum(len(completion.token_ids) for completion in run.completions)
    lengths = [args.shared_prefix + load.input_len + load.output_len for load in loads]
    first = [c.token_times[0] - c.arrival for c in run.completions]
    per_token = [
        (c.token_times[-1] - c.token_times[0]) / (len(c.token_times) - 1)
        for c in run.completions
        if len(c.token_times) > 1
    ]
    between = np.concatenate([np.diff(c.token_times) for c in run.completions if len(c.token_times) > 1] or [[0.0]])
    steady = [s for s in samples if s.blocks_used]
    stats = cache.stats()
    gpu = engine.runner.device.type == "cuda"
    return {
        "setup": {
            **{key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
               if key not in ("main", "command")},
            "device_name": torch.cuda.get_device_name() if gpu else "CPU",
            "torch": torch.__version__,
            "paged_attn": __version__,
            "blocks": cache.num_blocks,
            "max_model_len": engine.max_model_len,
        },
        "requests": len(loads),
        "completed": len(run.completions),
        "prompt_tokens": sum(load.input_len + args.shared_prefix for load in loads),
        "output_tokens": generated,
        "seconds": run.seconds,
        "output_tokens_per_s": generated / run.seconds,
        "steps": len(samples),
        "time_to_first_token_s": percentiles(first),
        "time_per_output_token_s": percentiles(per_token),
        "time_between_tokens_s": percentiles(between),
        "blocks_used_peak": max(s.blocks_used for s in samples),
        "blocks_shared_peak": max(s.blocks_shared for s in samples),
        "sequences_peak": max(s.running for s in samples),
        "waste_mean": float(np.mean([s.waste for s in steady])) if steady else 0.0,
        "preemptions": samples[-1].preemptions,
        "prefix_hit_rate": stats.prefix_hit_rate,
        "evictions": stats.evictions,
        "contiguous": {
            "waste": 1 - sum(lengths) / (len(lengths) * engine.max_model_len),
            "sequences": cache.num_blocks * cache.block_size // engine.max_model_len,
        },
        "host_time_per_step_s": engine.stats().host_time / max(1, engine.stats().steps) if gpu else None,
        "series": [asdict(s) for s in thin(samples, 500)],
    }  # fmt: skip


def percentiles(numbers) -> dict[str, float]:
    if len(numbers) == 0:
        return {}
    return {name: float(np.percentile(numbers, q)) for name, q in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100))}


def thin(items: list, most: int) -> list:
    step = -(-len(items) // most)
    return items[::step] if items else items


def print_result(result: dict) -> None:
    def ms(name: str) -> str:
        return ", ".join(f"{q} {1e3 * seconds:.1f}" for q, seconds in result[name].items())

    contiguous = result["contiguous"]
    lines = [
        ("requests", f"{result['completed']} of {result['requests']} completed, {result['prompt_tokens']} prompt and "
         f"{result['output_tokens']} output tokens"),
        ("throughput", f"{result['output_tokens_per_s']:.1f} output tokens/s ({result['seconds']:.2f} s, "
         f"{result['steps']} steps)"),
        ("first token, ms", ms("time_to_first_token_s")),
        ("per token, ms", ms("time_per_output_token_s")),
        ("between tokens, ms", ms("time_between_tokens_s")),
        ("blocks", f"{result['blocks_used_peak']} of {result['setup']['blocks']} at most, "
         f"{result['blocks_shared_peak']} shared"),
        ("waste", f"{100 * result['waste_mean']:.1f}% in the mean; contiguous reservations of "
         f"{result['setup']['max_model_len']} tokens: {100 * contiguous['waste']:.1f}%"),
        ("sequences", f"{result['sequences_peak']} at once; contiguous reservations in the same memory: "
         f"{contiguous['sequences']}"),
        ("preemptions", str(result["preemptions"])),
        ("prefix hits", f"{100 * result['prefix_hit_rate']:.1f}% of prompt tokens; {result['evictions']} evictions"),
    ]  # fmt: skip
    if result["host_time_per_step_s"] is not None:
        lines.append(("host", f"{1e3 * result['host_time_per_step_s']:.2f} ms a step"))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name:<{width}}  {text}")


def plot(result: dict, run: Run, path: Path) -> None:
    """Blocks and sequences over time above, latency curves below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    memory, latency = figure.subplots(2, 1)
    times = [s.time for s in run.samples]
    memory.fill_between(times, [s.blocks_used for s in run.samples], alpha=0.3, label="blocks used")
    memory.plot(times, [s.blocks_shared for s in run.samples], label="blocks shared")
    memory.axhline(result["setup"]["blocks"], color="grey", linewidth=0.8, linestyle="--", label="pool")
    memory.set(xlabel="seconds", ylabel="blocks")
    counts = memory.twinx()
    counts.plot(times, [s.running for s in run.samples], color="tab:green", linewidth=0.9, label="running")
    counts.plot(times, [s.waiting for s in run.samples], color="tab:red", linewidth=0.9, label="waiting")
    counts.set_ylabel("sequences")
    handles, labels = (a + b for a, b in zip(memory.get_legend_handles_labels(), counts.get_legend_handles_labels()))
    memory.legend(handles, labels, fontsize="small")
    for name, seconds in (
        ("time to first token", [c.token_times[0] - c.arrival for c in run.completions]),
        ("time between tokens", np.concatenate([np.diff(c.token_times) for c in run.completions])),
    ):
        ordered = np.sort(np.asarray(seconds)) * 1e3
        latency.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=name)
    latency.set(xlabel="milliseconds", ylabel="share of requests or tokens", xscale="log")
    latency.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
