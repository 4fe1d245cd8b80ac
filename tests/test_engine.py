"""The engine's tokens are those of each request on its own, whatever the schedule."""

import random

import pytest
import torch

from .tiny import generate, tiny_model

from paged_attn.engine import Engine, SamplingParams  # isort: skip


def make_engine(architecture: str, device: str, **options) -> Engine:
    defaults = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_batch_tokens": 16, "eos_token_ids": []}
    return Engine(tiny_model(architecture, device), **{**defaults, **options})


def random_requests(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 30 tokens, some of which share a beginning; 1 to 16 tokens to generate."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 97) for _ in range(17)]
    prompts = []
    for _ in range(count):
        own = [rng.randrange(2, 97) for _ in range(rng.choice([1, 2, 3, 4, 5, 9, 16, 30]))]
        prompts.append((shared[: rng.choice([0, 8, 17])] + own)[:32])
    return prompts, [SamplingParams(max_tokens=rng.choice([1, 2, 5, 9, 16])) for _ in prompts]


def expected_tokens(architecture: str, device: str, prompts, params) -> list[list[int]]:
    model = tiny_model(architecture, device)
    return [generate(model, prompt, own.max_tokens) for prompt, own in zip(prompts, params)]


def check_empty(engine: Engine) -> None:
    engine.cache.check()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert len(engine.scheduler.free_slots) == engine.runner.newest.numel()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [14, 64])
def test_randomised_requests_equal_each_alone(device, overlap, preemption, num_blocks):
    prompts, params = random_requests(40, seed=num_blocks)
    engine = make_engine(
        "llama", device, num_blocks=num_blocks, overlap=overlap, preemption=preemption, num_host_blocks=6
    )
    completions = engine.generate(prompts, params)
    assert [c.token_ids for c in completions] == expected_tokens("llama", device, prompts, params)
    assert engine.cache.stats().prefix_hit_rate > 0
    if num_blocks == 14:
        assert engine.stats().preemptions > 0
        assert engine.cache.stats().evictions > 0
        assert (engine.cache.stats().swaps > 0) == (preemption == "swap")
    check_empty(engine)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("fused", [False, None])
def test_architectures(device, architecture, fused):
    prompts, params = random_requests(8, seed=5)
    engine = make_engine(architecture, device, fused=fused, overlap=True)
    completions = engine.generate(prompts, params)
    assert [c.token_ids for c in completions] == expected_tokens(architecture, device, prompts, params)
    check_empty(engine)


def test_requests_arrive_and_are_cancelled_along_the_way(device):
    rng = random.Random(2)
    prompts, params = random_requests(30, seed=3)
    expected = expected_tokens("llama", device, prompts, params)
    engine = make_engine("llama", device, num_blocks=14, overlap=True)
    waiting, tokens, ended = list(range(30)), {i: [] for i in range(30)}, {}
    while waiting or engine.has_work:
        for _ in range(rng.randrange(4)):
            if waiting:
                i = waiting.pop()
                engine.add_request(prompts[i], params[i], request_id=i)
        if rng.random() < 0.2 and engine.requests:
            engine.cancel(rng.choice(sorted(engine.requests)))
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.completion:
                ended[output.request_id] = output.completion
        engine.cache.check()
    reasons = {i: completion.finish_reason for i, completion in ended.items()}
    assert len(reasons) == 30
    assert {"length", "cancelled"} == set(reasons.values())
    for i, completion in ended.items():
        assert tokens[i] == completion.token_ids
        assert completion.token_ids == expected[i][: len(completion.token_ids)]
        assert reasons[i] == "cancelled" or completion.token_ids == expected[i]
    check_empty(engine)


def test_samples_fork_the_prompt(device):
    prompt = list(range(5, 15))  # two and a half blocks: the last is copied by those who write it
    one = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    many = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=4)
    engine = make_engine("llama", device)
    samples = engine.generate([prompt], many)
    assert engine.cache.stats().copies == 3
    assert len({tuple(sample.token_ids) for sample in samples}) > 1
    # a sample depends on its seed alone: not on the batch, on preemption, or on the order of steps
    for overlap in (False, True):
        alone = make_engine("llama", device, overlap=overlap)
        assert alone.generate([prompt], one)[0].token_ids == samples[0].token_ids
        crowded = make_engine("llama", device, overlap=overlap, num_blocks=12)
        again = crowded.generate([prompt, prompt[::-1]], many)
        assert crowded.stats().preemptions > 0
        assert [sample.token_ids for sample in again[:4]] == [sample.token_ids for sample in samples]
        check_empty(crowded)
    check_empty(engine)


def test_cancelled_prompt_with_samples_leaves_nothing(device):
    for steps in range(6):
        engine = make_engine("llama", device, overlap=True, max_batch_tokens=8)
        request_id = engine.add_request(range(5, 25), SamplingParams(max_tokens=5, n=3))
        for _ in range(steps):
            engine.step()
        engine.cancel(request_id)
        ended = [output.completion.finish_reason for _ in range(3) for output in engine.step() if output.completion]
        assert ended == ["cancelled"] * 3
        check_empty(engine)


def test_shared_prefix_is_stored_once(device):
    system = list(range(2, 42))  # ten blocks
    engine = make_engine("llama", device, max_batch_tokens=64)
    for i in range(4):
        engine.add_request([*system, 50 + i], SamplingParams(max_tokens=8))
    engine.step()
    engine.step()
    stats = engine.cache.stats()
    assert stats.blocks_shared == 10
    assert stats.blocks_used == 14
    cached = [output.completion.cached_tokens for _ in range(9) for output in engine.step() if output.completion]
    assert sorted(cached) == [0, 40, 40, 40]
    check_empty(engine)


def test_salt_keeps_prefixes_apart(device):
    engine = make_engine("llama", device, max_batch_tokens=64)
    for salt in ("a", "b", None):
        engine.add_request(range(2, 42), SamplingParams(max_tokens=2), salt=salt)
    while engine.has_work:
        engine.step()
    assert engine.cache.stats().prefix_hit_rate == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_conditions(device, overlap):
    prompt = [5, 6, 7, 8]
    tokens = generate(tiny_model("llama", device), prompt, 16)
    stop = tokens[5]
    cut = tokens[: tokens.index(stop) + 1]

    class Letters:
        def decode(self, ids):
            return "".join(chr(0x4E00 + token) for token in ids)

    text = Letters().decode(tokens[3:5])
    for options, params in (
        ({}, SamplingParams(max_tokens=16, stop_token_ids=(stop,))),
        ({"eos_token_ids": [stop]}, SamplingParams(max_tokens=16)),
    ):
        completion = make_engine("llama", device, overlap=overlap, **options).generate([prompt], params)[0]
        assert (completion.token_ids, completion.finish_reason) == (cut, "stop")
    engine = make_engine("llama", device, overlap=overlap, tokenizer=Letters())
    completion = engine.generate([prompt], SamplingParams(max_tokens=16, stop=(text,)))[0]
    assert completion.finish_reason == "stop"
    assert text in Letters().decode(completion.token_ids)
    assert text not in Letters().decode(completion.token_ids[:-1])
    ignoring = make_engine("llama", device, overlap=overlap, eos_token_ids=[stop])
    completion = ignoring.generate([prompt], SamplingParams(max_tokens=16, ignore_eos=True))[0]
    assert (completion.token_ids, completion.finish_reason) == (tokens, "length")


def test_stream_yields_tokens_as_they_come(device):
    engine = make_engine("llama", device)
    outputs = list(engine.stream([[5, 6, 7]], SamplingParams(max_tokens=6)))
    assert [len(output.token_ids) for output in outputs] == [1] * 6
    assert [output.completion is None for output in outputs] == [True] * 5 + [False]
    assert len(outputs[-1].completion.token_times) == 6


def test_refusals(device):
    engine = make_engine("llama", device, num_blocks=8)
    two = SamplingParams(max_tokens=2)
    for error, call in (
        ("prompt: expected at least one", lambda: engine.add_request([])),
        ("the cache holds 32", lambda: engine.add_request([5] * 20, SamplingParams(max_tokens=16))),
        ("the engine's longest is 512", lambda: engine.add_request([5] * 500, SamplingParams(max_tokens=16))),
        ("max_tokens", lambda: SamplingParams(max_tokens=0)),
        ("top_p", lambda: SamplingParams(top_p=0.0)),
        ("stop", lambda: engine.add_request([5], SamplingParams(max_tokens=2, stop=("x",)))),
        ("preemption", lambda: make_engine("llama", device, preemption="drop")),
        ("max_batch_tokens", lambda: make_engine("llama", device, max_batch_tokens=4)),
        ("n: expected at most max_num_seqs 8", lambda: engine.add_request([5], SamplingParams(max_tokens=2, n=9))),
        ("fused", lambda: make_engine("gemma2", device, fused=True)),
        ("max_num_seqs", lambda: make_engine("llama", device, max_num_seqs=0)),
        ("cache: expected dtype", lambda: make_engine("llama", device, dtype=torch.float16)),
        ("cache: expected num_layers", lambda: make_engine("llama", device, num_layers=1)),
        ("num_blocks: expected without", lambda: make_engine("llama", device, cache=engine.cache)),
        ("prompt: expected ids below", lambda: engine.add_request([5, 97], two)),
        ("token_ids", lambda: engine.add_request([5, -1], two)),
        ("salt", lambda: engine.add_request([5], two, salt=7)),
        ("top_k", lambda: SamplingParams(top_k=2**63)),
        ("seed", lambda: SamplingParams(seed=2**63)),
        ("seed", lambda: SamplingParams(seed=2**63 - 1, n=2)),
        ("stop_token_ids", lambda: SamplingParams(stop_token_ids=5)),
        ("stop: ", lambda: SamplingParams(stop="end")),
        ("stop: ", lambda: SamplingParams(stop=("end", ""))),
        ("prompt", lambda: engine.generate([[5], []], two)),
    ):
        with pytest.raises(ValueError, match=error):
            call()
    assert not engine.requests
    engine.add_request([5], SamplingParams(max_tokens=2), request_id="x")
    with pytest.raises(ValueError, match="in use"):
        engine.add_request([5], SamplingParams(max_tokens=2), request_id="x")
    with pytest.raises(KeyError):
        engine.cancel("y")


def test_blocks_held_by_others_are_named(device):
    engine = make_engine("llama", device, num_blocks=8)
    engine.cache.add("foreign", list(range(30)))
    engine.add_request([5] * 8, SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="something else holds"):
        engine.step()


def test_sampling_follows_the_distribution():
    from paged_attn.engine.sampling import sample

    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(0)
    count = 20_000
    params = [SamplingParams(temperature=1.0)] * count
    tokens = sample(logits.expand(count, -1), params, [7] * count, list(range(count)))
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, logits.exp(), atol=0.015, rtol=0)
    for options, allowed in (({"top_k": 2}, 2), ({"top_p": 0.6}, 1), ({"top_p": 0.7}, 2)):
        params = [SamplingParams(temperature=1.0, **options)] * 500
        tokens = sample(logits.expand(500, -1), params, list(range(500)), [0] * 500)
        assert tokens.unique().tolist() == list(range(allowed))


def test_greedy_takes_the_first_largest(device):
    from paged_attn.engine.sampling import sample

    logits = torch.randn(5, 128 * 64, device=device).round()  # many ties
    assert sample(logits, [SamplingParams()] * 5, [0] * 5, [0] * 5).tolist() == [
        int((row == row.max()).nonzero()[0]) for row in logits
    ]
    assert sample(logits[:0], [], [], []).tolist() == []


def test_greedy_and_sampled_rows_mix():
    from paged_attn.engine.sampling import sample

    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(), SamplingParams(temperature=5.0)]
    tokens = sample(logits.expand(2, -1), params, [0, 0], [1, 1])
    assert tokens[0] == logits[0].argmax()


def test_fused_weights_are_not_held_twice():
    model = tiny_model.__wrapped__("llama", "cpu")
    attention = model.model.layers[0].self_attn
    Engine(model, num_blocks=8)
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.k_proj.weight.untyped_storage().data_ptr()


def test_blocks_behind_the_window_are_given_back(device):
    engine = make_engine("mistral", device)  # a window of 6 tokens in blocks of 4
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=40))
    used = []
    while engine.has_work:
        engine.step()
        used.append(engine.cache.stats().blocks_used)
    assert max(used) <= 3
    check_empty(engine)


@pytest.mark.parametrize("kv_scale", ["tensor", "token_head"])
def test_quantised_pages_on_every_route(device, kv_scale):
    """The fused forward, the attention hook and generate() read and write the same quantised keys and values."""
    from paged_attn.integrations.transformers import PagedCache

    prompt, model = [5, 6, 7, 8, 9], tiny_model("llama", device)
    options = {"kv_dtype": torch.int8, "kv_scale": kv_scale, "num_blocks": 16, "block_size": 4}
    routes = []
    for fused in (True, False):
        engine = make_engine("llama", device, fused=fused, **options)
        set_scales(engine.cache)
        routes.append(engine.generate([prompt], SamplingParams(max_tokens=12))[0].token_ids)
    cache = PagedCache.for_model(model, **options)
    set_scales(cache.kv_cache)
    routes.append(generate(model, prompt, 12, "paged_attn", past_key_values=cache))
    assert routes[0] == routes[1] == routes[2]


def set_scales(cache) -> None:
    if cache.kv_scale == "tensor":
        for i in range(cache.num_layers):
            for scale in cache.scales(i):
                scale.fill_(0.05)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_steps_of_fixed_size(device, architecture, monkeypatch):
    """What a graph captures, run as it is: inputs in fixed buffers, padded with inert rows that keep old entries."""
    from paged_attn.engine import graphs

    def record(self, step):
        result = step()
        return lambda: result.copy_(step()), result

    monkeypatch.setattr(graphs.StepGraphs, "_record", record)
    prompts, params = random_requests(30, seed=6)
    engine = make_engine(architecture, device, num_blocks=20, overlap=True, cuda_graphs=True, max_batch_tokens=40)
    completions = engine.generate(prompts, params)
    assert [c.token_ids for c in completions] == expected_tokens(architecture, device, prompts, params)
    assert {key for key, _ in engine.runner.graphs.graphs} == {True, False}
    assert engine.stats().preemptions > 0
    check_empty(engine)


def test_a_model_that_cannot_be_captured_runs_without_graphs(device, monkeypatch):
    """One warning, which says what to do about it, and the same tokens."""
    from paged_attn.engine import graphs

    def record(self, step):
        raise graphs.CaptureFailed("operation not permitted")

    monkeypatch.setattr(graphs.StepGraphs, "_record", record)
    prompts, params = random_requests(4, seed=6)
    engine = make_engine("llama", device, num_blocks=60, cuda_graphs=True)
    advice = r"cuda_graphs.*cuda_graphs=False.*set_experts_implementation.*operation not permitted"
    with pytest.warns(UserWarning, match=advice) as warned:
        completions = engine.generate(prompts, params)
    assert len(warned) == 1
    assert [c.token_ids for c in completions] == expected_tokens("llama", device, prompts, params)


def test_under_another_default_device(device):
    prompts, params = random_requests(4, seed=6)
    params = [SamplingParams(max_tokens=own.max_tokens, temperature=0.8, seed=3) for own in params]
    expected = make_engine("llama", device).generate(prompts, params)
    with torch.device("meta"):
        completions = make_engine("llama", device).generate(prompts, params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]


def test_a_mixture_of_experts_is_captured(cuda):
    """Nothing in the hook hinders it: with experts that are not chosen on the host every step is a graph."""
    engine = make_engine("gpt_oss", cuda, cuda_graphs=True)
    model = tiny_model("gpt_oss", cuda)
    before = model.get_experts_implementation()
    model.set_experts_implementation("batched_mm")
    try:
        prompts, params = random_requests(4, seed=6)
        completions = engine.generate(prompts, params)
        assert engine.runner.graphs is not None
        assert {is_decode for is_decode, _ in engine.runner.graphs.graphs} == {True, False}
        assert [c.token_ids for c in completions] == expected_tokens("gpt_oss", cuda, prompts, params)
    finally:
        model.set_experts_implementation(before)
