"""PagedKVCache: construction, the tensors of a step, what can be read, streams and devices."""

import resource

import numpy as np
import pytest
import torch

import paged_attn
from paged_attn import CacheCorrupted, OutOfBlocks, PagedKVCache

from .cache_helpers import add_and_run, contents, hits, make, run

# ---- construction and memory


@pytest.mark.parametrize("default", ["cpu", "meta", "cuda"])
def test_torch_default_device_is_the_default_alone(device, default):
    """What belongs on the host stays there, whatever device ``torch.set_default_device`` names."""
    if default == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with torch.device(default):
        cache = make(num_host_blocks=4, device=device, kv_dtype=torch.int8, kv_scale="token_head")
        prompt = list(range(9))
        cache.add("a", prompt)
        assert cache.prepare(["a"], [9]).positions.tolist() == prompt
        cache.commit("a", prompt)
        cache.layer(0)[0].fill_(5)
        cache.preempt("a", "swap")
        cache.layer(0)[0].zero_()
        assert cache.resume("a") == 0
        assert cache.layer(0)[0][cache.block_ids("a")].unique().tolist() == [5]
        if default != "meta":
            assert PagedKVCache(1, 1, 1, 8).device.type == default


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_layers_are_views_of_one_shape(device, layout):
    cache = PagedKVCache(3, 5, 2, 64, block_size=16, device=device, layout=layout)
    for i in range(3):
        for view in cache.layer(i):
            assert view.shape == (5, 16, 2, 64)
            assert view.dtype == torch.bfloat16
            assert view.stride(-1) == 1
    heads_first = cache.layer(0)[0].stride(2) > cache.layer(0)[0].stride(1)
    assert heads_first == (layout == "HND")
    assert cache.layer(0)[0].data_ptr() != cache.layer(1)[0].data_ptr()
    assert torch.equal(cache.layer(-1)[1], cache.layer(2)[1])
    with pytest.raises(IndexError):
        cache.layer(3)


def test_every_block_is_usable():
    cache = make(5)
    assert cache.num_free_blocks == 5
    assert cache.add("a", range(20)) == 0
    assert cache.block_ids("a") == [0, 1, 2, 3, 4]
    assert cache.num_free_blocks == 0


def test_bytes_per_block_and_budget():
    llama = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
    assert PagedKVCache.bytes_per_block(**llama, block_size=16) == 2_097_152
    fp8 = {**llama, "kv_dtype": torch.float8_e4m3fn}
    assert PagedKVCache.bytes_per_block(**fp8) == 1_048_576
    assert PagedKVCache.bytes_per_block(**fp8, kv_scale="token_head") == 1_048_576 + 32 * 2 * 16 * 8 * 4
    assert (10 << 30) // PagedKVCache.bytes_per_block(**llama) == 5120
    assert (10 << 30) // PagedKVCache.bytes_per_block(**fp8) == 10240
    small = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "device": "cpu"}
    cache = PagedKVCache.from_budget(10_000, **small)  # a block: 2 * 2 * 16 * 2 * 8 * 2 = 2048 bytes
    assert cache.num_blocks == cache.num_free_blocks == 4


def test_bytes_per_block_knows_the_constructors_names():
    options = {"layout": "NHD", "watermark": 0.5, "num_host_blocks": 3, "enable_prefix_caching": False}
    assert PagedKVCache.bytes_per_block(1, 1, 8, num_blocks=7, device="cpu", **options) == 512
    with pytest.raises(TypeError, match="blocksize"):
        PagedKVCache.bytes_per_block(1, 1, 8, blocksize=32)


def test_a_share_is_of_the_free_memory(monkeypatch):
    small = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 1, "device": "cpu"}
    monkeypatch.setattr(paged_attn.capacity, "free_memory", lambda device: 500)  # of 1000, others use 500
    assert PagedKVCache.from_budget(0.2, **small).num_blocks == 3  # 100 bytes, 32 a block
    with pytest.raises(ValueError, match="no block fits"):
        PagedKVCache.from_budget(0.05, **small)


@pytest.mark.parametrize("budget", [0, -1, 31, 0.0, 1.5, -0.2, True, "1GiB"])
def test_impossible_budgets_are_refused(budget):
    with pytest.raises(ValueError, match="bytes_or_fraction"):
        PagedKVCache.from_budget(budget, 1, 1, 8, block_size=1, device="cpu")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_kv_heads": -1}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 2.5}, "head_dim"),
        ({"head_dim": 7}, "head_dim"),
        ({"head_dim": 264}, "head_dim"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 2**31}, "block_size"),
        ({"num_blocks": 2**31}, "num_blocks"),
        ({"num_blocks": "4"}, "num_blocks"),
        ({"dtype": torch.int8}, "dtype"),
        ({"kv_dtype": torch.float16}, "kv_dtype"),
        ({"kv_dtype": torch.int8, "kv_scale": "row"}, "kv_scale"),
        ({"kv_scale": "head"}, "kv_scale"),
        ({"layout": "DHN"}, "layout"),
        ({"num_host_blocks": -1}, "num_host_blocks"),
        ({"watermark": 1.0}, "watermark"),
        ({"watermark": "1%"}, "watermark"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching"),
        ({"partial_match": None}, "partial_match"),
        ({"device": "meta"}, "device"),
    ],
)
def test_bad_configurations_are_refused_by_name(options, name):
    with pytest.raises(ValueError, match=f"^{name}:"):
        PagedKVCache(**{"num_layers": 1, "num_blocks": 4, "num_kv_heads": 1, "head_dim": 8, "device": "cpu", **options})


def test_sizes_may_be_numpy_integers():
    sizes = {"num_layers": 1, "num_blocks": 4, "num_kv_heads": 1, "head_dim": 8, "block_size": 2}
    cache = PagedKVCache(**{name: np.int32(size) for name, size in sizes.items()}, device="cpu")
    assert cache.layer(0)[0].shape == (4, 2, 1, 8)
    assert PagedKVCache.from_budget(np.int64(1000), 1, 1, 8, block_size=2, device="cpu").num_blocks == 15


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_scales(device, kv_dtype):
    shapes = {"tensor": (1,), "head": (2,), "token_head": (16, 4, 2)}
    for kv_scale, shape in shapes.items():
        cache = make(device=device, kv_dtype=kv_dtype, kv_scale=kv_scale)
        assert cache.layer(0)[0].dtype == kv_dtype
        for scale in cache.scales(1):
            assert scale.shape == shape
            assert scale.dtype == torch.float32
            assert scale.eq(1).all()
        cache.scales(0)[0].fill_(2)
        assert cache.scales(0)[1].eq(1).all()
        assert cache.scales(1)[0].eq(1).all()
    with pytest.raises(ValueError, match="not quantised"):
        make(device=device).scales(0)


# ---- steps


def test_prepare_returns_the_tensors_of_the_step(device):
    cache = make(device=device)
    cache.add("a", range(6))
    cache.add("b", range(50, 53))
    batch = cache.prepare(["a", "b"], [6, 3])
    assert batch.block_table.tolist() == [[0, 1], [2, -1]]
    assert batch.seq_lens.tolist() == [6, 3]
    assert batch.cu_seqlens_q.tolist() == [0, 6, 9]
    assert batch.slot_mapping.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert batch.max_seqlen_q == 6
    for tensor in (batch.block_table, batch.seq_lens, batch.cu_seqlens_q):
        assert tensor.dtype == torch.int32
    assert batch.slot_mapping.dtype == batch.positions.dtype == torch.int64
    assert {t.device for t in vars(batch).values() if isinstance(t, torch.Tensor)} == {cache.device}


def test_an_empty_batch():
    batch = make().prepare([], [])
    assert batch.block_table.shape == (0, 0)
    assert batch.cu_seqlens_q.tolist() == [0]


def test_prepare_may_be_repeated_and_less_committed():
    cache = make()
    cache.add("a", range(4))
    first = cache.prepare(["a"], [7])
    assert torch.equal(cache.prepare(["a"], [7]).slot_mapping, first.slot_mapping)
    assert cache.length("a") == 0
    cache.commit("a", range(3))
    cache.commit("a", [3, 9])
    assert cache.length("a") == 5
    assert cache.prepare(["a"], [1]).positions.tolist() == [5]
    assert len(cache.block_ids("a")) == 2
    cache.check()


def test_prepare_refuses_names_that_it_cannot_count():
    cache = make()
    cache.add("a", range(6))
    before = cache.block_ids("a")
    with pytest.raises(TypeError):
        cache.prepare((name for name in ["a"]), [20])
    assert cache.block_ids("a") == before


def test_prepare_is_all_or_nothing():
    cache = make(3)
    cache.add("a", range(4))
    cache.add("b", range(4))
    with pytest.raises(OutOfBlocks):
        cache.prepare(["a", "b"], [5, 5])
    assert cache.block_ids("a") == [0]
    assert cache.num_free_blocks == 1
    cache.check()


def test_refusing_a_step_takes_no_memory():
    cache = make(8)
    cache.add("a", [1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OutOfBlocks):
        cache.prepare(["a"], [2**31 - 2])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB
    assert cache.num_free_blocks == 7


@pytest.mark.parametrize(
    ("seq_ids", "query_lens", "error"),
    [
        (["a", "x"], [1, 1], KeyError),
        (["a", "a"], [1, 1], ValueError),
        (["a"], [-1], ValueError),
        (["a"], [1, 1], ValueError),
        (["a"], [1.5], ValueError),
        (["a"], [1 << 40], ValueError),
    ],
)
def test_bad_steps_are_refused(seq_ids, query_lens, error):
    cache = make()
    cache.add("a", range(4))
    with pytest.raises(error):
        cache.prepare(seq_ids, query_lens)
    cache.check()
    assert cache.block_ids("a") == [0]


def test_commit_checks_tokens_and_room():
    cache = make()
    cache.add("a", [5, 6, 7])
    with pytest.raises(ValueError, match="token 1 is 6 in the registered prompt, got 9"):
        cache.commit("a", [5, 9])
    cache.commit("a", [5, 6, 7])
    with pytest.raises(ValueError, match="prepare made room"):
        cache.commit("a", [1, 2])
    assert cache.length("a") == 3
    with pytest.raises(KeyError):
        cache.commit("x", [1])


def test_commit_batch():
    cache = make()
    cache.add("a", range(4))
    cache.add("b", range(10, 13))
    cache.prepare(["a", "b"], [4, 3])
    cache.commit_batch(["a", "b"], [0, 1, 2, 3, 10, 11, 12], [4, 3])
    cache.prepare(["a", "b"], [1, 1])
    cache.commit_batch(["a", "b"], np.array([7, 8]))
    assert (cache.length("a"), cache.length("b")) == (5, 4)
    with pytest.raises(ValueError, match="token_ids"):
        cache.commit_batch(["a", "b"], [1])
    assert hits(cache, [10, 11, 12, 8, 0]) == 4
    cache.check()


def test_a_step_reuses_no_buffer_that_the_caller_still_holds(device):
    cache = make(64, device=device)
    cache.add("a", range(8))
    batches = [cache.prepare(["a"], [n]) for n in range(1, 9)]
    for n, batch in enumerate(batches, 1):
        assert batch.positions.tolist() == list(range(n))
        assert batch.seq_lens.tolist() == [n]


def test_pinned_buffers_are_not_rewritten_under_a_queued_copy(cuda):
    cache = make(64, device=cuda)
    cache.add("a", range(40))
    cache.prepare(["a"], [40])
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # about 50 ms
    batches = [cache.prepare(["a"], [n]) for n in range(1, 41)]
    for n, batch in enumerate(batches, 1):
        assert batch.positions.tolist() == list(range(n))


# ---- reading


def test_stats():
    cache = make(10)
    add_and_run(cache, "a", range(10))
    stats = cache.stats()
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_free) == (10, 3, 7)
    assert (stats.blocks_cached, stats.blocks_shared, stats.tokens) == (2, 0, 10)
    assert stats.waste == pytest.approx(2 / 12)
    cache.fork("a", ["b"])
    cache.add("c", range(12))
    stats = cache.stats()
    assert stats.blocks_shared == 3
    assert stats.tokens == 28
    assert stats.waste == pytest.approx(6 / 16)
    assert stats.prefix_hit_rate == pytest.approx(8 / 22)


def test_check_names_the_fault():
    cache = make()
    add_and_run(cache, "a", range(6))
    cache.check()
    cache._manager.corrupt(1, 2)
    with pytest.raises(CacheCorrupted, match="shared blocks"):
        cache.check()
    cache._manager.corrupt(1, 0)
    with pytest.raises(CacheCorrupted, match="block 1: held by nobody, but not free"):
        cache.check()


def test_describe_shows_who_holds_what():
    cache = make(12, num_host_blocks=4)
    add_and_run(cache, "a", range(10))
    cache.fork("a", ["b"])
    run(cache, "b", [7])
    add_and_run(cache, "gone", range(100, 108))
    cache.free("gone")
    text = cache.describe()
    assert "12 blocks: 4 used (2 shared), 8 free (2 of them cached)" in text
    assert "##ABcc......" in text
    assert "A 'a': 10 tokens, blocks 0-2" in text
    assert "B 'b': 11 tokens, blocks 0-1 3" in text
    cache.preempt("b", "swap")
    assert "'b': 11 tokens, blocks swapped" in cache.describe()


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    cache = make(12, events=True)
    cache.plot(tmp_path / "empty.svg")
    add_and_run(cache, "a", range(10))
    cache.fork("a", ["b", "c"])
    run(cache, "b", [7])
    cache.plot(tmp_path / "pool.png")
    cache.plot(tmp_path / "pool.svg")
    assert (tmp_path / "pool.png").read_bytes().startswith(b"\x89PNG")
    assert "sharing" in (tmp_path / "pool.svg").read_text()


def test_events_replay_to_the_present(device):
    from paged_attn.pool_view import EVENT_KINDS, occupancy

    from .cache_random import NUM_BLOCKS, RandomRun

    run = RandomRun(1, device, events=True)
    for _ in range(400):
        run.step()
    events = run.cache.events()
    assert events["number"].tolist() == list(range(len(events)))
    assert {EVENT_KINDS[kind] for kind in events["kind"]} == set(EVENT_KINDS)
    replayed = occupancy(events, NUM_BLOCKS)
    present, published = run.cache._manager.snapshot()
    assert np.array_equal(replayed["holders"], present)
    assert np.array_equal(replayed["published"], published)
    assert replayed["used"][-1] == run.cache.stats().blocks_used
    assert (run.cache.stats().copies, run.cache.stats().swaps) == (
        (events["kind"] == EVENT_KINDS.index("copied")).sum(),
        np.isin(events["kind"], [EVENT_KINDS.index("swapped_out"), EVENT_KINDS.index("swapped_in")]).sum(),
    )
    named = events["sequence"][events["sequence"] >= 0]
    assert {run.cache.event_seq_id(s) for s in named.tolist()} <= set(range(run.next_id))
    run.cache.events(clear=True)
    assert len(run.cache.events()) == 0
    assert len(make().events()) == 0


# ---- streams and devices


def test_moves_follow_the_current_stream(cuda):  # E-stream
    cache = make(device=cuda, num_host_blocks=4)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # about 50 ms before the K/V are there
        add_and_run(cache, "a", range(6))
        cache.fork("a", ["b"])
        run(cache, "b", [60])
        cache.preempt("a", "swap")
        add_and_run(cache, "filler", range(100, 100 + 4 * cache.num_free_blocks))
        cache.free("filler")
        cache.resume("a")
        assert contents(cache, "a") == list(range(6))
        assert contents(cache, "b") == [*range(6), 60]


def test_the_cache_stays_on_its_device(cuda):  # E-device
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    cache = make(device="cuda:1", num_host_blocks=4)
    add_and_run(cache, "a", range(6))
    cache.fork("a", ["b"])
    run(cache, "b", [60])
    cache.preempt("a", "swap")
    cache.resume("a")
    assert contents(cache, "a") == list(range(6))
    assert contents(cache, "b") == [*range(6), 60]
    assert cache.prepare(["a"], [1]).block_table.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
