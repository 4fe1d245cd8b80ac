"""Several samples of one prompt: its blocks are stored once, the last one is copied when a sample writes to it."""

from _tiny_llama import default_device, tiny_llama

from paged_attn.engine import Engine, SamplingParams


def main(device: str = default_device()) -> Engine:
    engine = Engine(tiny_llama(device), num_blocks=128, block_size=8, max_num_seqs=16)
    prompt = list(range(10, 110))
    samples = SamplingParams(max_tokens=12, temperature=0.9, n=8, seed=1)
    engine.add_request(prompt, samples)
    peak = 0
    while engine.has_work:
        for output in engine.step():
            if output.completion:
                print(f"sample {output.index}: {output.completion.token_ids}")
        peak = max(peak, engine.cache.stats().blocks_used)
    alone = 8 * -(-(len(prompt) + samples.max_tokens) // 8)
    print(f"{peak} blocks at most; eight separate sequences would hold {alone}")
    return engine


if __name__ == "__main__":
    main()
