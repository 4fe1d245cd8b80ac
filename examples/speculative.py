"""Speculative decoding: a draft proposes, one call verifies, rejected tokens cost nothing.

``prepare`` makes room without advancing, so a rejected draft is simply not committed; ``rollback`` takes back tokens
that were, as the draft model's are here.
"""

import torch
from _tiny_llama import default_device, tiny_llama

from paged_attn.engine import make_cache
from paged_attn.engine.models import Inputs, make_forward


class Model:
    """A model over a cache of its own, holding one sequence."""

    def __init__(self, model, prompt: list[int]):
        self.cache = make_cache(model, num_blocks=64, block_size=8)
        self.forward = make_forward(model, self.cache, fused=None, compile=False)
        self.cache.add("s", prompt)

    @torch.inference_mode()
    def run(self, tokens: list[int]) -> list[int]:
        """The likeliest successor of each of the next tokens; nothing is committed."""
        step = self.cache.prepare(["s"], [len(tokens)])
        ids = torch.tensor(tokens, device=self.cache.device)
        logits = self.forward(
            Inputs(
                token_ids=ids,
                positions=step.positions,
                slot_mapping=step.slot_mapping,
                block_table=step.block_table,
                seq_lens=step.seq_lens,
                cu_seqlens_q=step.cu_seqlens_q,
                max_seqlen_q=len(tokens),
                logit_rows=None,
            )
        )
        return logits.argmax(-1).tolist()


def speculate(target, draft, prompt: list[int], count: int, width: int = 4) -> tuple[list[int], int]:
    """``count`` greedy tokens of ``target``, and the number of its forward passes."""
    main, drafter = Model(target, prompt), Model(draft, prompt)
    tokens = [*prompt, main.run(prompt)[-1]]
    main.cache.commit("s", prompt)
    passes = 1
    while len(tokens) < len(prompt) + count:
        proposal = []
        for _ in range(width):  # the draft catches up and goes ahead, committing as it goes
            pending = (tokens + proposal)[drafter.cache.length("s") :]
            proposal.append(drafter.run(pending)[-1])
            drafter.cache.commit("s", pending)
        verified = main.run([tokens[-1], *proposal])  # one call over width + 1 tokens
        passes += 1
        accepted = next((i for i in range(width) if verified[i] != proposal[i]), width)
        main.cache.commit("s", [tokens[-1], *proposal[:accepted]])
        tokens += [*proposal[:accepted], verified[accepted]]
        ahead = drafter.cache.length("s") - (len(tokens) - 1)
        if ahead > 0:
            drafter.cache.rollback("s", ahead)
    for model in (main, drafter):
        model.cache.check()
    return tokens[len(prompt) : len(prompt) + count], passes


def main(device: str = default_device()) -> tuple[list[int], int]:
    tokens, passes = speculate(tiny_llama(device), tiny_llama(device), list(range(30, 45)), count=40)
    print(f"{len(tokens)} tokens in {passes} passes of the target model")
    return tokens, passes


if __name__ == "__main__":
    main()
