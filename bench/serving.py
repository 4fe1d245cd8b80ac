"""Serving: the engine on the 96-request set with a Llama-3-8B of random weights, and where a decode step's time goes.

python -m bench.serving [--modes graphs compile] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from bench import common
from paged_attn.cli import _traces as traces
from paged_attn.cli._arguments import non_negative, positive
from paged_attn.cli.serve_bench import make_prompts, serve
from paged_attn.engine import Engine, SamplingParams

KINDS = {
    "rope and write": r"rope|write_kv|kv_write",
    "attention": r"decode_|prefill_|attention|paged_attn.*(decode|prefill|merge)",
    "weights": r"gemm|nvjet|cutlass|splitk|gemv",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=traces.SHAPES, default="llama-3-8b")
    parser.add_argument("--num-requests", type=positive, default=96)
    parser.add_argument("--num-blocks", type=positive, default=8192)
    parser.add_argument("--max-num-seqs", type=positive, default=96)
    parser.add_argument("--max-batch-tokens", type=positive, nargs="+", default=[8192], help="one measurement each")
    parser.add_argument("--live", type=positive, nargs="*", default=[1, 8, 24], help="sequences of the profiled steps")
    parser.add_argument("--modes", choices=("graphs", "compile"), nargs="*", default=["graphs", "compile"])
    parser.add_argument(
        "--peer-requests", type=non_negative, default=16, help="requests for transformers' continuous batching"
    )
    parser.add_argument("--passes", type=positive, default=2, help="measured passes, after one to warm up")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    if max(args.live, default=0) > args.max_num_seqs:
        parser.error(f"argument --live: expected at most --max-num-seqs {args.max_num_seqs}, got {max(args.live)}")
    if max(args.max_batch_tokens) < args.max_num_seqs:
        parser.error(f"argument --max-batch-tokens: expected --max-num-seqs {args.max_num_seqs} or more")
    common.require_cuda()

    began = time.perf_counter()
    model = traces.random_model(args.shape, "cuda", torch.bfloat16)
    print(f"model in {time.perf_counter() - began:.1f} s", flush=True)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    rows, steps = [], []
    for mode in args.modes:
        name = "CUDA graphs and torch.compile" if mode == "compile" else "CUDA graphs"
        engine = Engine(
            model,
            num_blocks=args.num_blocks,
            max_num_seqs=args.max_num_seqs,
            max_batch_tokens=max(args.max_batch_tokens),
            enable_prefix_caching=False,
            compile=mode == "compile",
        )
        rows += [{"engine": name, **row} for row in throughput(engine, model.config.vocab_size, args)]
        common.print_table(rows)
        sys.stdout.flush()
        steps += [{"engine": name, **step_times(engine, live, model.config.vocab_size, weights)} for live in args.live]
        common.print_table(steps)
        del engine
        torch.cuda.empty_cache()
    common.write_results("serving", rows, directory=args.out, shape=args.shape, decode_steps=steps)
    if args.peer_requests:
        peers = transformers_batching(model, args.peer_requests)
        common.print_table(peers)
        common.write_results("serving_peers", peers, directory=args.out, shape=args.shape)
    return 0


def throughput(engine: Engine, vocab_size: int, args: argparse.Namespace) -> list[dict]:
    """Output tokens/s of the whole set, submitted at once; the first pass warms up and is dropped."""
    loads = traces.lognormal(args.num_requests)
    prompts = make_prompts(loads, 0, vocab_size, seed=0)
    serve(engine, loads, prompts)
    rows = []
    for budget in args.max_batch_tokens * args.passes:
        engine.scheduler.max_batch_tokens = budget
        before = engine.stats().host_time
        run = serve(engine, loads, prompts)
        generated = sum(len(completion.token_ids) for completion in run.completions)
        assert generated == sum(load.output_len for load in loads)
        rows.append(
            {
                "tokens a step": budget,
                "tokens/s": generated / run.seconds,
                "seconds": run.seconds,
                "steps": len(run.samples),
                "all admitted after, s": next(s.time for s in run.samples if s.waiting == 0),
                "host ms a step": 1e3 * (engine.stats().host_time - before) / len(run.samples),
            }
        )
        print(rows[-1], flush=True)
    engine.scheduler.max_batch_tokens = max(args.max_batch_tokens)
    return rows


def transformers_batching(model, count: int, max_tokens: int = 64) -> list[dict]:
    """Output tokens/s of transformers' continuous batching and of the engine on the first prompts of the set."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from paged_attn.integrations.transformers import register

    prompts = make_prompts(traces.lognormal(count), 0, model.config.vocab_size, seed=0)
    generation = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    register(decode_tables=True)
    rows = []
    for name, graphs in (("paged|sdpa", None), ("paged|paged_attn", True)):
        model.set_attn_implementation(name)
        config = ContinuousBatchingConfig(block_size=32, num_blocks=1024, max_batch_tokens=2048, use_cuda_graph=graphs)
        options = {"generation_config": generation, "continuous_batching_config": config, "progress_bar": False}
        began = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, **options)
        seconds = time.perf_counter() - began
        generated = sum(len(output.generated_tokens) for output in outputs.values())
        rows.append({"engine": f"transformers, {name}", "tokens/s": generated / seconds, "seconds": seconds})
    engine = Engine(model, num_blocks=2048, max_num_seqs=count, eos_token_ids=[])
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.generate(prompts, params)
    began = time.perf_counter()
    engine.generate(prompts, params)
    seconds = time.perf_counter() - began
    rows.append({"engine": "paged_attn.engine, warm", "tokens/s": count * max_tokens / seconds, "seconds": seconds})
    return rows


def step_times(
    engine: Engine, live: int, vocab_size: int, weights: int, prompt_len: int = 512, count: int = 12
) -> dict:
    """Microseconds of a decode step of ``live`` sequences by kind of kernel, and the host's idle gaps."""
    from torch.profiler import ProfilerActivity, profile

    for prompt in make_prompts([traces.Load(prompt_len, 1)] * live, 0, vocab_size, seed=1):
        engine.add_request(prompt, SamplingParams(max_tokens=3 * count, ignore_eos=True))
    while len(engine.scheduler.running) < live or any(s.computed < s.prompt_len for s in engine.scheduler.running):
        engine.step()
    for _ in range(count // 2):
        engine.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        engine.step()
    torch.cuda.synchronize()
    wall = 1e6 * (time.perf_counter() - began) / count
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_work:
        engine.step()
    kinds, names = defaultdict(float), defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next((k for k, pattern in KINDS.items() if re.search(pattern, event.name, re.IGNORECASE)), "other")
            kinds[kind] += event.device_time / count
            names[event.name[:90]][0] += event.device_time / count
            names[event.name[:90]][1] += 1
    for name, (us, calls) in sorted(names.items(), key=lambda item: -item[1][0])[:14]:
        print(f"{us:8.1f} us {calls / count:6.1f} x  {name}")
    return {
        "live": live,
        "step us": wall,
        **{f"{kind} us": kinds[kind] for kind in (*KINDS, "other")},
        "gaps us": wall - sum(kinds.values()),
        "weights TB/s": weights / kinds["weights"] * 1e-6 if kinds["weights"] else 0.0,
    }


if __name__ == "__main__":
    sys.exit(main())
