"""Generate text for several prompts at once through the paged cache."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from paged_attn.cli._arguments import (
    device,
    folder,
    non_negative,
    non_negative_number,
    positive,
    refusal_ends_command,
    share,
)
from paged_attn.cli._models import DTYPES, default_device, default_dtype, load_model

SYSTEM = (
    "You are a friendly assistant. You answer in plain words, you keep your answers short, and when you do not know "
    "something you say so instead of making it up."
)
PROMPTS = [
    "What is the capital of France?",
    "Write two sentences about a fox that learns to read.",
    "Name three things that float on water, and say in a few words why they do.",
    "Why is the sky blue?",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=folder, metavar="PATH", help="folder of a transformers causal LM (default: SmolLM2-135M)"
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--system", default=SYSTEM, metavar="TEXT", help="system prompt, which all prompts share")
    parser.add_argument(
        "--samples", type=positive, default=1, metavar="N", help="continuations of each prompt, by fork"
    )
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="most new tokens (default 64)")
    parser.add_argument(
        "--temperature", type=non_negative_number, help="default 0 (greedy) for one sample, 0.8 for several"
    )
    parser.add_argument("--top-k", type=non_negative, default=0, metavar="K")
    parser.add_argument("--top-p", type=share, default=1.0, metavar="P")
    parser.add_argument("--seed", type=non_negative, default=0)
    parser.add_argument("--block-size", type=positive, default=16, metavar="TOKENS")
    parser.add_argument(
        "--num-blocks", type=positive, default=1024, metavar="N", help="blocks in the pool (default 1024)"
    )
    parser.add_argument("--max-num-seqs", type=positive, default=64, metavar="N", help="most sequences in a step")
    parser.add_argument("--device", type=device, default=default_device())
    parser.add_argument("--dtype", choices=DTYPES, help="default bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--verify", action="store_true", help="compare greedy tokens with transformers' generate()")


def main(args: argparse.Namespace) -> int:
    from paged_attn.engine import Engine, SamplingParams

    if args.verify and (args.samples > 1 or (args.temperature or 0.0) > 0.0):
        sys.exit("--verify: needs one greedy sample a prompt")
    began = time.perf_counter()
    dtype = DTYPES[args.dtype or default_dtype(args.device)]
    model, tokenizer = load_model(args.model, args.device, dtype)
    print(f"{type(model).__name__}, {model.num_parameters() / 1e6:.1f} M parameters, {dtype}, {args.device}; "
          f"loaded in {time.perf_counter() - began:.1f} s")  # fmt: skip

    texts = args.prompt or PROMPTS
    prompts = [encode(tokenizer, args.system, text) for text in texts]
    temperature = args.temperature if args.temperature is not None else (0.8 if args.samples > 1 else 0.0)
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        n=args.samples,
        seed=args.seed,
    )
    with refusal_ends_command():
        engine = Engine(
            model,
            num_blocks=args.num_blocks,
            block_size=args.block_size,
            max_num_seqs=args.max_num_seqs,
            max_batch_tokens=max(2048, args.max_num_seqs),
        )
        for prompt in prompts:
            engine.add_request(prompt, params)

    began, completions, peak = time.perf_counter(), {}, None
    bar = progress_bar(len(prompts) * args.samples * args.max_tokens)
    while engine.has_work:
        for output in engine.step():
            bar.update(len(output.token_ids))
            if output.completion:
                completions[output.request_id, output.index] = output.completion
        stats = engine.cache.stats()
        peak = stats if peak is None or stats.blocks_used > peak.blocks_used else peak
    bar.close()
    seconds = time.perf_counter() - began

    ordered = [completions[key] for key in sorted(completions)]
    for i, completion in enumerate(ordered):
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True).strip()
        number = f" (sample {completion.index + 1})" if args.samples > 1 else ""
        print(f"\n[{i // args.samples + 1}] {texts[i // args.samples]}{number}\n    {text}")
    generated = sum(len(completion.token_ids) for completion in ordered)
    report(engine, peak, ordered, generated, seconds)
    if args.verify:
        return verify(model, prompts, ordered, args)
    return 0


def encode(tokenizer, system: str, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer(f"{system}\n\n{text}" if system else text).input_ids
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(ids, add_special_tokens=False).input_ids


def report(engine, peak, completions: list, generated: int, seconds: float) -> None:
    """Speed, and what the same requests would have taken in contiguous reservations of the model's longest sequence."""
    cache, stats = engine.cache, engine.cache.stats()
    block_bytes = cache.bytes_per_block(
        cache.num_layers, cache.num_kv_heads, cache.head_dim, block_size=cache.block_size, dtype=cache.dtype
    )
    paged = peak.blocks_used * block_bytes / 2**20
    contiguous = len(completions) * -(-engine.max_model_len // cache.block_size) * block_bytes / 2**20
    print(f"\n{generated} tokens in {seconds:.2f} s: {generated / seconds:.1f} tokens/s, {engine.stats().steps} steps")
    print(f"paged:      {peak.blocks_used} blocks at most ({paged:.1f} MiB), {peak.blocks_shared} of them shared; "
          f"waste {100 * peak.waste:.1f}%; {stats.copies} copies on write; "
          f"{100 * stats.prefix_hit_rate:.0f}% of prompt tokens found cached")  # fmt: skip
    print(f"contiguous: {len(completions)} reservations of {engine.max_model_len} tokens ({contiguous:.1f} MiB); "
          f"waste {100 * (1 - peak.tokens / (len(completions) * engine.max_model_len)):.1f}%; "
          f"paging takes {contiguous / max(paged, 1e-9):.0f} times less")  # fmt: skip


def verify(model, prompts: list[list[int]], completions: list, args: argparse.Namespace) -> int:
    """Run each prompt alone through transformers' own cache and eager attention."""
    model.set_attn_implementation("eager")
    wrong = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions)):
        ids = torch.tensor([prompt], device=model.device)
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.max_tokens, do_sample=False
        )
        if expected[0, len(prompt) :].tolist() != completion.token_ids:
            wrong.append(i + 1)
    if wrong:
        print(f"verify: prompts {wrong} differ from transformers' generate()")
        return 1
    print(f"verify: all {len(prompts)} continuations are token for token those of transformers' generate()")
    return 0


def progress_bar(total: int, unit: str = "token"):
    """A tqdm bar, or nothing where tqdm is not installed or nobody is watching."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, unit=unit, leave=False, disable=None)


class _NoBar:
    def update(self, count: int) -> None:
        pass

    def close(self) -> None:
        pass
