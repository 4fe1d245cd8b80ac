"""Swap the attention of a transformers model: one line for the kernels, one more for the pages."""

import torch
from _tiny_llama import default_device, tiny_llama

from paged_attn.integrations import transformers as paged


def main(device: str = default_device()) -> list[torch.Tensor]:
    model = tiny_llama(device)
    prompts = torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 25]], device=device)
    options = {"attention_mask": (prompts != 0).long(), "max_new_tokens": 20, "do_sample": False}
    outputs = [model.generate(prompts, **options)]

    paged.register()
    model.set_attn_implementation("paged_attn")  # or from_pretrained(..., attn_implementation="paged_attn")
    outputs.append(model.generate(prompts, **options))

    cache = paged.PagedCache.for_model(model, num_blocks=64)
    outputs.append(model.generate(prompts, **options, num_beams=4, past_key_values=cache))
    stats = cache.kv_cache.stats()
    print(f"greedy tokens equal: {torch.equal(outputs[0], outputs[1])}")
    print(f"4 beams for each of 2 prompts: {stats.blocks_used} blocks, {stats.blocks_shared} of them shared")
    return outputs


if __name__ == "__main__":
    main()
