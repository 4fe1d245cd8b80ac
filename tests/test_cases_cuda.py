"""Graphs, streams, devices (group E), and mappings on the host."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.testing import (
    FLOAT_DTYPES,
    Batch,
    assert_close,
    assert_same_bits,
    bits,
    flat_batch,
    make_cache,
    peaky_batch,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BUSY_CYCLES = 40_000_000  # some 25 ms


def captured(function):
    """A graph of one call, after a warm-up on a side stream; and what the call returned while captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


# Graphs: lengths and tables changed in place


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("path", ["auto", "mma", "sm90"])
def test_replay_with_other_lengths(path, dtype, batch_invariant):
    """One decode graph serves every length up to the table's width."""
    width, num_seqs = 3000, 4
    pools = [peaky_batch([width] * num_seqs, dtype=dtype, head_dim=128, seed=seed).to("cuda") for seed in range(2)]
    batch = pools[0]
    query, table, lengths = batch.query.clone(), batch.block_table.clone(), torch.ones_like(batch.seq_lens)
    live = Batch(query, batch.key_cache, batch.value_cache, table, lengths)
    options = {"batch_invariant": batch_invariant, "return_lse": True, "backend": path}
    try:
        graph, (output, lse) = captured(lambda: live.run(paged_attn.paged_attention, **options))
    except ValueError as error:
        if "backend" not in str(error):
            raise
        pytest.skip(str(error))
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    for now in ([1, 1, 1, 1], [3000, 1, 511, 0], [16, 17, 2999, 1024], [0, 0, 0, 0], [700, 3000, 3000, 5]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        table.copy_(table[order])
        query.copy_(query.flip(0))
        output.fill_(math.nan)
        graph.replay()
        eager, eager_lse = live.run(paged_attn.paged_attention, **options)
        assert_same_bits(output, eager)
        assert_same_bits(lse, eager_lse)
        assert_close(output, live.to("cpu").expected())


@pytest.mark.parametrize("path", ["auto", "mma", "sm90"])
def test_replay_of_a_mixed_batch(path):
    """Query lengths change too: 64 rows, of which as many are padding as the step leaves."""
    batch = peaky_batch([500] * 4, [16] * 4, dtype=torch.bfloat16, head_dim=128).to("cuda")
    starts, lengths = batch.cu_seqlens_q.clone(), batch.seq_lens.clone()
    live = Batch(batch.query, batch.key_cache, batch.value_cache, batch.block_table, lengths, starts)
    options = {"backend": path, "return_lse": True}
    try:
        graph, (output, lse) = captured(lambda: live.run(paged_attn.paged_attention, **options))
    except ValueError as error:
        if "backend" not in str(error):
            raise
        pytest.skip(str(error))
    for query_lens, now in (
        ([16, 16, 16, 16], [500] * 4),
        ([1, 1, 1, 1], [500, 1, 17, 64]),
        ([40, 0, 3, 1], [40, 9, 2, 0]),
    ):
        starts.copy_(torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32))
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        output.fill_(math.nan)
        graph.replay()
        expected, expected_lse = live.to("cpu").expected(return_lse=True)
        assert_close(output, expected)
        assert_close(lse, expected_lse, tolerance=1e-3)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_same_bits_from_query_tiles_cut_by_keys(num_kv_heads):
    """Whichever piece ends last adds them up."""
    batch = peaky_batch(
        [9000, 700, 5000], [150, 33, 64], dtype=torch.bfloat16, num_heads=4 * num_kv_heads, num_kv_heads=num_kv_heads
    ).to("cuda")
    graph, (output, lse) = captured(lambda: batch.run(paged_attn.paged_attention, return_lse=True))
    first, first_lse = batch.run(paged_attn.paged_attention, return_lse=True)
    for _ in range(50):
        output.fill_(math.nan)
        graph.replay()
        assert_same_bits(output, first)
        assert_same_bits(lse, first_lse)
    whole, whole_lse = batch.run(paged_attn.paged_attention, return_lse=True, batch_invariant=True)
    assert_close(output, whole)
    assert_close(lse, whole_lse, tolerance=1e-3)


@pytest.mark.parametrize("path", ["auto", "mma"])
def test_batch_invariant_of_long_contexts(path):
    """Pieces of long sequences are larger ones: the same for every row, whatever is beside it."""
    lengths, query_lens = [300_000, 131_073, 90], [1, 3, 1]
    batch = peaky_batch(lengths, query_lens, dtype=torch.bfloat16, num_heads=2, num_kv_heads=1)
    expected, on_gpu = batch.expected(), batch.to("cuda")
    together = on_gpu.run(paged_attn.paged_attention, batch_invariant=True, backend=path)
    assert_close(together, expected)
    first = 0
    for sequence, count in enumerate(query_lens):
        one, rows = slice(sequence, sequence + 1), slice(first, first + count)
        first += count
        starts = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        caches = on_gpu.key_cache, on_gpu.value_cache
        alone = Batch(on_gpu.query[rows], *caches, on_gpu.block_table[one], on_gpu.seq_lens[one], starts)
        assert_same_bits(alone.run(paged_attn.paged_attention, batch_invariant=True, backend=path), together[rows])


LARGE_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": 4096},
    "softcap": {"softcap": 4.0},
    "not_causal": {"causal": False},
    "alibi": {"alibi_slopes": torch.linspace(-0.1, 0.02, 16)},
    "sinks": {"sinks": torch.linspace(-3.0, 3.0, 16)},
}


@pytest.mark.parametrize("options", LARGE_OPTIONS.values(), ids=LARGE_OPTIONS)
@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mma_of_many_rows(dtype, num_kv_heads, options):
    """Enough rows to fill the GPU take larger tiles, which change neither a result nor the bits of a sequence."""
    query_lens, lengths = [2100, 100, 4100], [2101, 700, 6000]
    batch = peaky_batch(lengths, query_lens, dtype=dtype, num_heads=16, num_kv_heads=num_kv_heads, head_dim=128).to(
        "cuda"
    )
    options = {
        "backend": "mma",
        **{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()},
    }
    any_cut, any_cut_lse = batch.run(paged_attn.paged_attention, return_lse=True, **options)
    together, lse = batch.run(paged_attn.paged_attention, return_lse=True, batch_invariant=True, **options)
    assert_close(any_cut, together.cpu())
    assert_close(any_cut_lse, lse.cpu(), tolerance=1e-3)
    first = 0
    for sequence, count in enumerate(query_lens):
        one, rows = slice(sequence, sequence + 1), slice(first, first + count)
        first += count
        starts = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        alone = Batch(
            batch.query[rows],
            batch.key_cache,
            batch.value_cache,
            batch.block_table[one],
            batch.seq_lens[one],
            starts,
        )
        output, alone_lse = alone.run(paged_attn.paged_attention, return_lse=True, batch_invariant=True, **options)
        assert_same_bits(output, together[rows])
        assert_same_bits(alone_lse, lse[rows])


# E-pad-rows


def test_padded_rows_write_nothing():
    """A graph for 8 rows, 3 of them real: each step changes three slots, and real rows equal eager ones."""
    batch = peaky_batch([40] * 8, dtype=torch.bfloat16, poison=0.0).to("cuda")
    key, value = torch.randn(2, 8, 2, 64, device="cuda").bfloat16()
    slots, lengths = torch.full((8,), -1, device="cuda"), torch.zeros(8, dtype=torch.int32, device="cuda")
    live = Batch(batch.query, batch.key_cache, batch.value_cache, batch.block_table, lengths)

    def step():
        paged_attn.write_kv(key, value, live.key_cache, live.value_cache, slots)
        return live.run(paged_attn.paged_attention)

    graph, output = captured(step)
    for number in range(20):
        position = 40 - 20 + number
        blocks = batch.block_table[:3, position // 16].long()
        slots[:3] = 16 * blocks + position % 16
        lengths[:3] = position + 1
        key.normal_()
        before = [bits(cache) for cache in (live.key_cache, live.value_cache)]
        graph.replay()
        for old, cache in zip(before, (live.key_cache, live.value_cache), strict=True):
            changed = (bits(cache) != old).flatten(2).any(-1).nonzero()
            assert {16 * block + offset for block, offset in changed.tolist()} <= set(slots[:3].tolist())
        real = Batch(
            live.query[:3],
            live.key_cache,
            live.value_cache,
            live.block_table[:3].contiguous(),
            lengths[:3].contiguous(),
        )
        assert_close(output[:3], real.to("cpu").expected())
        assert output[3:].count_nonzero() == 0
    assert (bits(live.key_cache) != before[0]).flatten(2).any(-1).sum() == 3


# E-stream


def test_side_stream_behind_a_slow_kernel():
    """The query is made by the kernel before, on a stream that is not the default one."""
    batch = peaky_batch([300, 17], dtype=torch.bfloat16).to("cuda")
    expected = batch.run(paged_attn.paged_attention)
    query = torch.full_like(batch.query, math.nan)
    late = Batch(query, batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(BUSY_CYCLES)
        query.copy_(batch.query)
        output = late.run(paged_attn.paged_attention)
    torch.cuda.synchronize()
    assert_same_bits(output, expected)


def test_lengths_made_by_the_kernel_before():
    """Without ``metadata_ready`` the call may follow at once the kernel that writes lengths and table."""
    batch = peaky_batch([300, 17], dtype=torch.bfloat16).to("cuda")
    expected = batch.run(paged_attn.paged_attention)
    lengths, table = torch.zeros_like(batch.seq_lens), torch.zeros_like(batch.block_table)
    late = Batch(batch.query, batch.key_cache, batch.value_cache, table, lengths)
    for _ in range(20):
        lengths.zero_()
        table.zero_()
        torch.cuda._sleep(100_000)
        table.copy_(batch.block_table)
        lengths.copy_(batch.seq_lens)
        assert_same_bits(late.run(paged_attn.paged_attention), expected)


@pytest.mark.parametrize("path", ["auto", "mma"])
@pytest.mark.parametrize("metadata_ready", [False, True])
def test_query_made_by_the_call_before(path, metadata_ready):
    """With ``metadata_ready`` too, only lengths and table may be read before the kernel ahead has ended."""
    batch = peaky_batch([3000, 17, 900, 1], dtype=torch.bfloat16, head_dim=128).to("cuda")
    attend = partial(paged_attn.paged_attention, backend=path)
    expected = batch.query
    for _ in range(20):
        expected = replace(batch, query=expected).run(attend)
        torch.cuda.synchronize()

    def chain():
        query = batch.query
        for _ in range(20):
            query = replace(batch, query=query).run(attend, metadata_ready=metadata_ready)
        return query

    graph, output = captured(chain)
    for _ in range(5):
        output.fill_(math.nan)
        graph.replay()
        assert_same_bits(output, expected)


def capture_cases():
    """Each op as a function without arguments, and the tensors that it writes."""
    batch = peaky_batch([300, 17], dtype=torch.bfloat16).to("cuda")
    out = torch.empty_like(batch.query)
    key = torch.randn(4, 2, 64, device="cuda").bfloat16()
    caches = make_cache(4, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([5, 17, 33, 63], device="cuda")
    source = torch.randn(2, 8, 16, 2, 64, device="cuda").bfloat16()
    mapping = torch.tensor([[0, 5], [1, 6]], device="cuda")
    lse = torch.randn(2, 8, device="cuda")
    merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
    gathered = [torch.empty(317, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def gather():
        results = paged_attn.gather_kv(
            batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens, total_tokens=317
        )
        for target, result in zip(gathered, results, strict=True):
            target.copy_(result)

    return {
        "attend": (lambda: batch.run(paged_attn.paged_attention, out=out), [out]),
        "write": (lambda: paged_attn.write_kv(key, key, *caches, slots), list(caches)),
        "copy": (lambda: paged_attn.copy_blocks(source, mapping), [source[:, 5:7]]),
        "merge": (
            lambda: paged_attn.merge_attn_states(batch.query, lse, batch.query, lse, out=merged, out_lse=merged_lse),
            [merged, merged_lse],
        ),
        "gather": (gather, gathered),
    }


@pytest.mark.parametrize("case", ["attend", "write", "copy", "merge", "gather"])
def test_capture_holds_the_kernel(case):
    """Clear what the op wrote, replay: it is written again."""
    function, targets = capture_cases()[case]
    graph, _ = captured(function)
    graph.replay()
    expected = [target.clone() for target in targets]
    assert all(target.count_nonzero() > 0 for target in expected)
    for target in targets:
        target.zero_()
    graph.replay()
    for target, right in zip(targets, expected, strict=True):
        assert_same_bits(target, right)


def test_two_streams_two_caches():
    """Interleaved calls on two streams do not share a workspace."""
    batches = [peaky_batch([4097, 17], dtype=torch.bfloat16, seed=seed).to("cuda") for seed in range(2)]
    expected = [batch.run(paged_attn.paged_attention) for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(20):
        for which, (stream, batch) in enumerate(zip(streams, batches, strict=True)):
            with torch.cuda.stream(stream):
                outputs.append((which, batch.run(paged_attn.paged_attention)))
    torch.cuda.synchronize()
    for which, output in outputs:
        assert_same_bits(output, expected[which])


def test_threads_on_one_stream():
    """A call of several kernels is not interrupted by another thread's: they share memory that must be clean."""
    query_lens = ([1, 1, 200, 1, 3], [1, 150, 1, 90], [1] * 8, [300, 100])
    batches = [
        peaky_batch([600] * len(lens), lens, dtype=torch.bfloat16, head_dim=128, seed=seed).to("cuda")
        for seed, lens in enumerate(query_lens)
    ]
    expected = [batch.run(paged_attn.paged_attention) for batch in batches]
    torch.cuda.synchronize()

    def outputs_of(batch):
        return [batch.run(paged_attn.paged_attention) for _ in range(200)]

    with ThreadPoolExecutor(len(batches)) as threads:
        outputs = list(threads.map(outputs_of, batches))
    for of_batch, right in zip(outputs, expected, strict=True):
        for output in of_batch:
            assert_same_bits(output, right)


def test_two_graphs_at_once():
    """Two graphs captured one after the other and replayed on two streams."""
    batches = [peaky_batch([4097, 17], dtype=torch.bfloat16, seed=seed).to("cuda") for seed in range(2)]
    expected = [batch.run(paged_attn.paged_attention) for batch in batches]
    graphs = [captured(lambda batch=batch: batch.run(paged_attn.paged_attention)) for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, output), right in zip(graphs, expected, strict=True):
        assert_same_bits(output, right)


def test_calls_and_graphs_that_share_a_pool():
    """A graph's temporaries, written again by every replay, are never memory that calls keep from one to the next."""
    batch = peaky_batch([6000] * 3, dtype=torch.bfloat16, num_heads=16, num_kv_heads=2, head_dim=128).to("cuda")
    expected = batch.run(paged_attn.paged_attention)
    stream, pool = torch.cuda.Stream(priority=-1), torch.cuda.MemPool()  # a stream that no other test has used
    stream.wait_stream(torch.cuda.current_stream())

    def run_in_pool() -> torch.Tensor:
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            output = batch.run(paged_attn.paged_attention)
        torch.cuda.synchronize()
        return output

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=pool.id):
        for log2_size in range(7, 25):
            torch.ones(1 << log2_size, device="cuda")
    assert_same_bits(run_in_pool(), expected)
    with torch.cuda.stream(stream):
        graph.replay()
    assert_same_bits(run_in_pool(), expected)


def test_long_chunk_where_no_memory_is_left_for_a_copy():
    """A copy of an 8-bit cache in 16 bits is as wide as the table; without it keys are converted as they are read."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("chunks on 8-bit caches are copied on compute capability 9.0")
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    batch = peaky_batch([1100], [1100], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, **shape)
    expected, batch = batch.expected(), batch.to("cuda")
    table = torch.nn.functional.pad(batch.block_table, (0, 2048), value=2**31 - 1)
    batch = replace(batch, block_table=table)
    copy_bytes = 2 * 2 * table.shape[1] * 16 * 8 * 128

    def run() -> tuple[torch.Tensor, int]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = batch.run(paged_attn.paged_attention)
        return output, torch.cuda.max_memory_allocated() - before

    output, peak = run()
    assert peak > copy_bytes
    assert_close(output, expected)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + copy_bytes // 2
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        output, peak = run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert peak < copy_bytes
    assert_close(output, expected)


# E-device


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_the_other_device():
    """Current device 0, tensors on device 1, head dims that need a kernel attribute and ones that do not."""
    torch.cuda.set_device(0)
    for device in ("cuda:0", "cuda:1"):
        for head_dim in (256, 64):
            batch = peaky_batch([300, 17], dtype=torch.bfloat16, head_dim=head_dim)
            output = batch.to(device).run(paged_attn.paged_attention)
            assert output.device == torch.device(device)
            assert_close(output, batch.expected())
    assert torch.cuda.current_device() == 0


# D-host-map


@pytest.mark.parametrize("pinned", [False, True])
def test_host_map_may_change_at_once(pinned):
    """Behind a slow kernel: copy 0 to 9, change the same map in place, copy 0 to 1."""
    (cache, _) = make_cache(10, 16, 2, 64, dtype=torch.float32, device="cuda")
    cache[:] = torch.arange(10.0, device="cuda").view(-1, 1, 1, 1) + 5
    mapping = torch.tensor([[0, 9]])
    mapping = mapping.pin_memory() if pinned else mapping
    torch.cuda._sleep(BUSY_CYCLES)
    paged_attn.copy_blocks([cache], mapping)
    mapping[0, 1] = 1
    paged_attn.copy_blocks([cache], mapping)
    mapping[0, 1] = 3
    torch.cuda.synchronize()
    assert_close(cache, [5.0, 5.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 5.0], tolerance=0)


@pytest.mark.parametrize("pinned", [False, True])
def test_host_map_of_a_swap_may_change_at_once(pinned):
    (cache, _) = make_cache(4, 16, 2, 64, dtype=torch.float32, device="cuda")
    cache[:] = torch.arange(4.0, device="cuda").view(-1, 1, 1, 1) + 5
    host = torch.zeros(4, 16, 2, 64, pin_memory=pinned)
    mapping = torch.tensor([[0, 3]])
    torch.cuda._sleep(BUSY_CYCLES)
    paged_attn.swap_blocks([cache], [host], mapping)
    mapping[0, 1] = 1
    paged_attn.swap_blocks([cache], [host], mapping)
    mapping[0, 1] = 2
    torch.cuda.synchronize()
    assert_close(host, [0.0, 5.0, 0.0, 5.0], tolerance=0)


def test_swap_is_in_stream_order():
    """Blocks that a slow kernel is still to write are moved after it, and may be overwritten after the swap."""
    (cache, _) = make_cache(2, 16, 2, 64, dtype=torch.float32, device="cuda")
    host = torch.zeros(2, 16, 2, 64, pin_memory=True)
    torch.cuda._sleep(BUSY_CYCLES)
    cache.fill_(3)
    paged_attn.swap_blocks([cache], [host], torch.tensor([[0, 1]]))
    cache.fill_(4)
    torch.cuda.synchronize()
    assert_close(host, [0.0, 3.0], tolerance=0)


def test_no_synchronisation():
    """Attention, write, copy with a device map and merge are queued behind a slow kernel without waiting for it."""
    batch = flat_batch([40, 17], device="cuda")
    rows = torch.ones(2, 2, 64, device="cuda")
    slots, mapping = torch.tensor([0, 1], device="cuda"), torch.tensor([[0, 1]], device="cuda")

    def queue():
        output, lse = batch.run(paged_attn.paged_attention, return_lse=True)
        paged_attn.write_kv(rows, rows, batch.key_cache, batch.value_cache, slots)
        paged_attn.copy_blocks([batch.key_cache, batch.value_cache], mapping)
        paged_attn.merge_attn_states(output, lse, output, lse)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        queue()  # the driver loads a kernel at its first launch, which may wait
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        queue()
        assert not stream.query()
    torch.cuda.synchronize()


# Scores that float32 holds only roughly


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_huge_scores_end(dtype):
    """A prefill whose probabilities overflow ends with some result, and the next call is right."""
    batch = peaky_batch([600], [600], dtype=dtype, head_dim=128).to("cuda")
    expected = batch.run(paged_attn.paged_attention)
    for factor in (1e3, 3e4, 1e6, 1e9):
        huge = replace(batch, query=batch.query * factor, key_cache=batch.key_cache * factor)
        huge.run(paged_attn.paged_attention)
        torch.cuda.synchronize()
    assert_same_bits(batch.run(paged_attn.paged_attention), expected)
