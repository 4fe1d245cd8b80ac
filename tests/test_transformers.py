"""transformers' ``generate()`` and ``generate_batch()`` through our attention: token for token those of eager."""

import pytest
import torch

import paged_attn

from .tiny import ARCHITECTURES, generate, tiny_model, transformers

import paged_attn.integrations.transformers as integration  # isort: skip
from paged_attn.integrations.transformers import PagedCache, padding_mask, register  # isort: skip

register()

CACHES = ["dynamic", "static", "paged"]
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


def padded_batch(device: str) -> dict:
    """Prompts of 3, 9 and 7 tokens, padded on the left."""
    ids = torch.randint(2, 97, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    mask[2, :2] = 0
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def run(model, inputs: dict, implementation: str, **options) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    torch.manual_seed(1)
    return model.generate(**inputs, max_new_tokens=12, **options)


def cache_options(model, cache: str) -> dict:
    if cache == "static":
        return {"cache_implementation": "static", "disable_compile": True}
    return {"past_key_values": PagedCache.for_model(model, num_blocks=96, block_size=4)} if cache == "paged" else {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generate_equals_eager(device, architecture, mode):
    model = tiny_model(architecture, device)
    inputs = padded_batch(device)
    expected = run(model, inputs, "eager", **MODES[mode])
    for cache in CACHES:
        output = run(model, inputs, "paged_attn", **MODES[mode], **cache_options(model, cache))
        assert output.tolist() == expected.tolist(), cache


def test_padding_takes_no_slots_and_rows_equal_prompts_alone(device):
    model = tiny_model("llama", device)
    inputs = padded_batch(device)
    cache = PagedCache.for_model(model, num_blocks=96, block_size=4)
    output = run(model, inputs, "paged_attn", do_sample=False, past_key_values=cache)
    for row, (ids, mask) in enumerate(zip(inputs["input_ids"], inputs["attention_mask"])):
        prompt = ids[mask.bool()].tolist()
        assert output[row, 9:].tolist() == generate(model, prompt, 12)
        # the last sampled token is never run
        assert cache.kv_cache.length(row) == len(prompt) + 11
    cache.kv_cache.check()


def test_row_that_ends_early(device):
    model = tiny_model("llama", device)
    inputs = padded_batch(device)
    stop = run(model, inputs, "eager", do_sample=False)[1, 9 + 4].item()
    expected = run(model, inputs, "eager", do_sample=False, eos_token_id=stop)
    cache = PagedCache.for_model(model, num_blocks=96, block_size=4)
    output = run(model, inputs, "paged_attn", do_sample=False, eos_token_id=stop, past_key_values=cache)
    assert output.tolist() == expected.tolist()


def test_beams_share_full_blocks(device):
    model = tiny_model("llama", device)
    cache = PagedCache.for_model(model, num_blocks=96, block_size=4)
    run(model, padded_batch(device), "paged_attn", do_sample=False, num_beams=4, past_key_values=cache)
    stats = cache.kv_cache.stats()
    assert stats.blocks_shared > 0
    assert stats.copies > 0
    cache.kv_cache.check()
    cache.reset()
    assert cache.kv_cache.num_free_blocks == 96


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_assisted_generation_rolls_back(device, architecture):
    # the assistant keeps transformers' own cache, which cannot roll back over a window in every case: one without
    model, assistant = tiny_model(architecture, device), tiny_model("llama", device, seed=5)
    prompt = list(range(5, 16))
    assistant.set_attn_implementation("eager")
    expected = generate(model, prompt, 20)
    for proposals in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        cache = PagedCache.for_model(model, num_blocks=96, block_size=4)
        assert generate(model, prompt, 20, "paged_attn", past_key_values=cache, **proposals) == expected
        cache.kv_cache.check()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_cache_serves_one_batch_after_another(device, prefix_caching):
    """Nothing is found of what a prompt before left in the pool, by this cache or by the next one over it."""
    model = tiny_model("llama", device)
    cache = PagedCache.for_model(model, num_blocks=96, block_size=4, enable_prefix_caching=prefix_caching)
    for prompt in ([5, 6, 7], list(range(20, 40)), list(range(40, 60))):
        assert generate(model, prompt, 8, "paged_attn", past_key_values=cache) == generate(model, prompt, 8)
        cache.reset()
        cache = PagedCache(cache.kv_cache)


def test_a_batch_that_does_not_fit_leaves_the_cache_empty(device):
    model = tiny_model("llama", device)
    cache = PagedCache.for_model(model, num_blocks=4, block_size=4)
    with pytest.raises(paged_attn.OutOfBlocks):
        run(model, padded_batch(device), "paged_attn", past_key_values=cache)
    assert cache.kv_cache.num_free_blocks == 4
    assert generate(model, [5, 6, 7], 8, "paged_attn", past_key_values=cache) == generate(model, [5, 6, 7], 8)


def test_full_pool_raises_and_loses_nothing(device):
    model = tiny_model("llama", device)
    cache = PagedCache.for_model(model, num_blocks=5, block_size=4)
    with pytest.raises(paged_attn.OutOfBlocks):
        generate(model, list(range(5, 16)), 20, "paged_attn", past_key_values=cache)
    cache.kv_cache.check()


def test_batch_selection(device):
    model = tiny_model("llama", device)
    model.set_attn_implementation("paged_attn")
    inputs = padded_batch(device)
    cache = PagedCache.for_model(model, num_blocks=96, block_size=4)
    with torch.no_grad():
        full = model(**inputs, past_key_values=cache).logits[:, -1]
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1, 2, 5]))
        assert cache.batch_size == 3
        mask = torch.cat([inputs["attention_mask"][[0, 1, 2]], torch.ones(3, 1, dtype=torch.long, device=device)], 1)
        output = model(input_ids=full.argmax(-1)[:, None], attention_mask=mask, past_key_values=cache).logits
        model.set_attn_implementation("eager")
        ids = torch.cat([inputs["input_ids"], full.argmax(-1)[:, None]], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
    # rows 1, 2, 5 of the repeated batch are rows 0, 1, 2 of the first
    assert torch.equal(output[:, -1].argmax(-1), expected.argmax(-1))


NEEDS_5_17 = pytest.mark.skipif(
    not transformers.__version__.startswith("5.17."), reason="generate_batch() needs transformers 5.17"
)


# What is not offered is refused by name


def test_refusals(device):
    model = tiny_model("llama", device)
    model.set_attn_implementation("paged_attn")
    ids = torch.tensor([[5, 6, 7, 8]], device=device)
    with torch.no_grad():
        with pytest.raises(ValueError, match="output_attentions"):
            model(ids, output_attentions=True)
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids, attention_mask=torch.zeros(1, 1, 4, 4, device=device))
        with pytest.raises(ValueError, match="position_bias"):
            model(ids, position_bias=torch.zeros(1, 4, 4, 4, device=device))
        with pytest.raises(ValueError, match="packed_sequence"):
            model(ids, position_ids=torch.tensor([[0, 1, 0, 1]], device=device), use_cache=False)


def test_window_refuses_holes(device):
    model = tiny_model("mistral", device)
    model.set_attn_implementation("paged_attn")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]], device=device)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]], device=device)
    with torch.no_grad(), pytest.raises(ValueError, match="contiguous"):
        model(ids, attention_mask=mask)


def test_chunked_mask_is_refused():
    from transformers.masking_utils import chunked_causal_mask_function

    with pytest.raises(ValueError, match="chunked_overlay"):
        padding_mask(1, 8, 8, mask_function=chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int)))


def test_paged_cache_needs_our_attention(device):
    model = tiny_model("llama", device)
    cache = PagedCache.for_model(model, num_blocks=96, block_size=4)
    with pytest.raises(RuntimeError, match="attn_implementation"):
        generate(model, [5, 6, 7], 4, "eager", past_key_values=cache)


# Continuous batching


def check_generate_batch(device: str, architecture: str, **options) -> None:
    pytest.importorskip("psutil")
    model = tiny_model(architecture, device)
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(2, 97, (n,), generator=generator).tolist() for n in (3, 9, 1, 40, 17)]
    prompts.append(prompts[3][:32] + [7, 8, 9])
    expected = [generate(model, prompt, 10) for prompt in prompts]
    model.set_attn_implementation("paged|paged_attn")
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            **{"block_size": 8, "num_blocks": 64, "max_batch_tokens": 24, "use_cuda_graph": False, **options}
        ),
        progress_bar=False,
    )
    assert [list(output.generated_tokens) for output in outputs.values()] == expected


def test_newer_versions_have_no_generate_batch(monkeypatch):
    """Only 5.17 hands its pool to another attention."""
    monkeypatch.setattr(integration, "TRANSFORMERS_VERSION", (5, 18))
    with pytest.raises(ValueError, match=r"decode_tables: generate_batch\(\) needs transformers 5\.17"):
        register(decode_tables=True)


@NEEDS_5_17
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_generate_batch_equals_eager(device, architecture):
    check_generate_batch(device, architecture)


@NEEDS_5_17
def test_generate_batch_in_cuda_graphs(cuda):
    check_generate_batch(cuda, "llama", use_cuda_graph=True, use_async_batching=True)


@NEEDS_5_17
@pytest.mark.parametrize("delay", [0.003, 0.02])
def test_generate_batch_behind_its_late_reset(cuda, monkeypatch, delay):
    """transformers copies inputs on a stream of its own: not before they have been reset on the current one."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs

    reset = ContinuousBatchingAsyncIOs.reset

    def late_reset(self):
        torch.cuda._sleep(int(delay * 1.7e9))
        reset(self)

    monkeypatch.setattr(ContinuousBatchingAsyncIOs, "reset", late_reset)
    check_generate_batch(cuda, "llama", use_cuda_graph=True, use_async_batching=True)


@NEEDS_5_17
def test_register_may_be_repeated():
    from transformers.generation.continuous_batching import input_outputs

    classes = input_outputs.ContinuousBatchingIOs, input_outputs.ContinuousBatchingAsyncIOs
    before = [inputs.get_model_kwargs for inputs in classes]
    register()
    assert [inputs.get_model_kwargs for inputs in classes] == before


@NEEDS_5_17
def test_generate_batch_captures_a_mixture_of_experts(cuda):
    model = tiny_model("gpt_oss", cuda)
    before = model.get_experts_implementation()
    model.set_experts_implementation("batched_mm")
    try:
        check_generate_batch(cuda, "gpt_oss", use_cuda_graph=True, use_async_batching=True)
    finally:
        model.set_experts_implementation(before)


@NEEDS_5_17
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_generate_batch_with_decode_tables(device, architecture, monkeypatch):
    """Asked for, transformers hands over block tables; models with sliding layers go on without."""
    from transformers.generation.continuous_batching import initialization

    from paged_attn.integrations import _paged_continuous

    decide = initialization.ensure_decode_fast_path_is_available
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", decide)
    register(decode_tables=True)
    seen = []
    attend = _paged_continuous._group_tables

    def watch(group, cu_seqlens_k, max_seqlen_k, cache, kwargs):
        seen.append(kwargs["block_table"] is not None)
        return attend(group, cu_seqlens_k, max_seqlen_k, cache, kwargs)

    monkeypatch.setattr(_paged_continuous, "_group_tables", watch)
    check_generate_batch(device, architecture)
    assert any(seen) == (architecture == "llama")
