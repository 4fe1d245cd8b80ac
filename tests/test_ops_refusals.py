"""Bad arguments: an error that names the argument, before anything is launched or changed."""

import math

import pytest
import torch

import paged_attn
from paged_attn.testing import assert_same_bits, bits, make_cache, peaky_batch, to_device

REFUSED = (TypeError, ValueError)


def wider(tensor):
    """The same shape with a last stride of 2."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


# What to put in place of an argument that is right, and the names one of which the error must hold.
TENSOR_MISTAKES = {
    "query_2d": ("query", lambda t: t[:, 0]),
    "query_4d": ("query", lambda t: t[None]),
    "query_float64": ("query", lambda t: t.double()),
    "query_bfloat16": ("key_cache|query", lambda t: t.bfloat16()),
    "query_int": ("query", lambda t: t.int()),
    "query_heads": ("query", lambda t: t[:, :7]),
    "query_no_heads": ("query", lambda t: t[:, :0]),
    "query_head_dim": ("query", lambda t: t[..., :56]),
    "query_last_stride": ("query", wider),
    "query_tokens": ("query|seq_lens", lambda t: torch.cat([t, t])),
    "key_cache_3d": ("key_cache", lambda t: t[:, 0]),
    "key_cache_dtype": ("key_cache|value_cache", lambda t: t.half()),
    "key_cache_shape": ("key_cache|value_cache", lambda t: t[1:]),
    "key_cache_last_stride": ("key_cache", wider),
    "value_cache_3d": ("value_cache", lambda t: t[0]),
    "value_cache_dtype": ("value_cache", lambda t: t.bfloat16()),
    "value_cache_heads": ("value_cache", lambda t: t[:, :, :1]),
    "value_cache_head_dim": ("value_cache", lambda t: t[..., :56]),
    "value_cache_last_stride": ("value_cache", wider),
    "block_table_1d": ("block_table", lambda t: t[0]),
    "block_table_rows": ("block_table|seq_lens", lambda t: t[:1]),
    "block_table_float": ("block_table", lambda t: t.float()),
    "block_table_int16": ("block_table", lambda t: t.short()),
    "block_table_last_stride": ("block_table", wider),
    "seq_lens_2d": ("seq_lens", lambda t: t[None]),
    "seq_lens_size": ("seq_lens", lambda t: t[:1]),
    "seq_lens_float": ("seq_lens", lambda t: t.float()),
}

OPTION_MISTAKES = {
    "window_0": ("window_size", {"window_size": 0}),
    "window_negative": ("window_size", {"window_size": -1}),
    "window_not_causal": ("window_size", {"window_size": 4, "causal": False}),
    "softcap_negative": ("softcap", {"softcap": -1.0}),
    "softcap_nan": ("softcap", {"softcap": math.nan}),
    "softcap_huge": ("softcap", {"softcap": 1e6}),
    "softcap_tiny": ("softcap", {"softcap": 1e-46}),
    "scale_nan": ("scale", {"scale": math.nan}),
    "scale_above_float32": ("scale", {"scale": -1e39}),
    "backend": ("backend", {"backend": "fast"}),
    "max_seqlen_q": ("max_seqlen_q", {"max_seqlen_q": -1}),
    "slopes_size": ("alibi_slopes", {"alibi_slopes": torch.zeros(2)}),
    "slopes_2d": ("alibi_slopes", {"alibi_slopes": torch.zeros(1, 8)}),
    "slopes_dtype": ("alibi_slopes", {"alibi_slopes": torch.zeros(8).half()}),
    "sinks_size": ("sinks", {"sinks": torch.zeros(9)}),
    "sinks_dtype": ("sinks", {"sinks": torch.zeros(8).double()}),
    "k_scale_unquantised": ("k_scale", {"k_scale": torch.ones(1)}),
    "v_scale_unquantised": ("v_scale", {"v_scale": torch.ones(2)}),
    "starts_size": ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32)}),
    "starts_dtype": ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0.0, 1.0, 2.0])}),
    "out_shape": ("out", {"out": torch.zeros(2, 8, 32)}),
    "out_dtype": ("out", {"out": torch.zeros(2, 8, 64).half()}),
    "out_last_stride": ("out", {"out": torch.zeros(2, 8, 64, 2)[..., 0]}),
}

POSITION = {"query": 0, "key_cache": 1, "value_cache": 2, "block_table": 3, "seq_lens": 4}


def changed_argument(case):
    """The argument that a case named ``<argument>_<mistake>`` changes."""
    return next(name for name in POSITION if case.startswith(name))


def attention_arguments(device):
    return list(vars(peaky_batch([20, 5]).to(device)).values())[:5]


@pytest.mark.parametrize("case", TENSOR_MISTAKES)
def test_attention_refuses_tensors(ops, case):
    names, mistake = TENSOR_MISTAKES[case]
    arguments = attention_arguments(ops.device)
    index = POSITION[changed_argument(case)]
    arguments[index] = mistake(arguments[index])
    with pytest.raises(REFUSED, match=names):
        ops.paged_attention(*arguments)


@pytest.mark.parametrize("case", OPTION_MISTAKES)
def test_attention_refuses_options(ops, case):
    names, options = OPTION_MISTAKES[case]
    options = {
        name: to_device(value, ops.device) if torch.is_tensor(value) else value for name, value in options.items()
    }
    before = {name: bits(value) for name, value in options.items() if torch.is_tensor(value) and value.dim() == 3}
    with pytest.raises(REFUSED, match=names):
        ops.paged_attention(*attention_arguments(ops.device), **options)
    for name, value in before.items():
        assert torch.equal(bits(options[name]), value)


def test_attention_refuses_an_expanded_result(ops):
    one = torch.zeros(1, 8, 64, device=ops.device)
    with pytest.raises(REFUSED, match="out"):
        ops.paged_attention(*attention_arguments(ops.device), out=one.expand(2, -1, -1))
    assert one.count_nonzero() == 0


@pytest.mark.parametrize("name", POSITION)
def test_attention_refuses_tensors_elsewhere(cuda, name):
    arguments = attention_arguments(cuda)
    arguments[POSITION[name]] = arguments[POSITION[name]].cpu()
    with pytest.raises(REFUSED, match="device"):
        paged_attn.paged_attention(*arguments)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "out", "cu_seqlens_q"])
def test_attention_refuses_options_elsewhere(cuda, name):
    tensors = {
        "alibi_slopes": torch.zeros(8),
        "sinks": torch.zeros(8),
        "out": torch.zeros(2, 8, 64),
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
    }
    with pytest.raises(REFUSED, match=name):
        paged_attn.paged_attention(*attention_arguments(cuda), **{name: tensors[name]})


@pytest.mark.parametrize("index", range(5))
def test_write_refuses_tensors_elsewhere(cuda, index):
    arguments = write_arguments(cuda)
    arguments[index] = arguments[index].cpu()
    with pytest.raises(REFUSED, match="device"):
        paged_attn.write_kv(*arguments)


@pytest.mark.parametrize("head_dim", [4, 12, 46, 264])
def test_attention_refuses_head_dims(ops, head_dim):
    batch = peaky_batch([20, 5], head_dim=head_dim, device=ops.device)
    with pytest.raises(REFUSED, match=r"head|query|key_cache"):
        batch.run(ops.paged_attention)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (4, 16, 2), (1, 1, 1, 2)])
def test_attention_refuses_scale_shapes(ops, shape):
    batch = peaky_batch([20, 5], cache_dtype=torch.float8_e4m3fn, device=ops.device)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(REFUSED, match=name):
            batch.run(ops.paged_attention, **{name: torch.ones(shape, device=ops.device)})


def test_attention_refuses_scale_dtypes(ops):
    batch = peaky_batch([20, 5], cache_dtype=torch.int8, device=ops.device)
    with pytest.raises(REFUSED, match="v_scale"):
        batch.run(ops.paged_attention, v_scale=torch.ones(1, device=ops.device).half())


def write_arguments(device):
    key = torch.ones(5, 2, 64, device=device)
    caches = make_cache(3, 16, 2, 64, dtype=torch.float32, device=device)
    return [key, key + 1, *caches, torch.arange(5, device=device)]


WRITE_MISTAKES = {
    "key_2d": ("key", 0, lambda t: t[0]),
    "key_dtype": ("key|value", 0, lambda t: t.bfloat16()),
    "key_heads": ("key", 0, lambda t: t[:, :1]),
    "key_head_dim": ("key", 0, lambda t: t[..., :56]),
    "key_last_stride": ("key", 0, wider),
    "value_rows": ("value", 1, lambda t: t[:4]),
    "value_dtype": ("value", 1, lambda t: t.half()),
    "value_head_dim": ("value", 1, lambda t: t[..., :56]),
    "key_cache_3d": ("key_cache", 2, lambda t: t[0]),
    "key_cache_int32": ("key_cache", 2, lambda t: t.int()),
    "value_cache_shape": ("value_cache", 3, lambda t: t[:2]),
    "value_cache_last_stride": ("value_cache", 3, wider),
    "value_cache_expanded": ("value_cache", 3, lambda t: t[:1].expand_as(t)),
    "slot_mapping_2d": ("slot_mapping", 4, lambda t: t[None]),
    "slot_mapping_long": ("slot_mapping", 4, lambda t: torch.cat([t, t])),
    "slot_mapping_float": ("slot_mapping", 4, lambda t: t.float()),
    "slot_mapping_int16": ("slot_mapping", 4, lambda t: t.short()),
}


@pytest.mark.parametrize("case", WRITE_MISTAKES)
def test_write_refuses(ops, case):
    names, index, mistake = WRITE_MISTAKES[case]
    arguments = write_arguments(ops.device)
    caches = arguments[2:4]
    arguments[index] = mistake(arguments[index])
    with pytest.raises(REFUSED, match=names):
        ops.write_kv(*arguments)
    assert all(cache.count_nonzero() == 0 for cache in caches)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_write_refuses_a_scale_without_quantisation(ops, name):
    arguments = write_arguments(ops.device)
    with pytest.raises(REFUSED, match=name):
        ops.write_kv(*arguments, **{name: torch.ones(1, device=ops.device)})
    assert arguments[2].count_nonzero() == 0


GATHER_MISTAKES = {
    "seq_lens_size": ("seq_lens", {"seq_lens": torch.tensor([1, 2, 3], dtype=torch.int32)}),
    "seq_lens_float": ("seq_lens", {"seq_lens": torch.tensor([1.0, 2.0])}),
    "starts_size": ("seq_starts", {"seq_starts": torch.tensor([1], dtype=torch.int32)}),
    "starts_negative": ("seq_starts", {"seq_starts": torch.tensor([-1, 0], dtype=torch.int32)}),
    "past_the_row": ("seq_lens|block_table", {"seq_lens": torch.tensor([1, 1000], dtype=torch.int32)}),
    "out_dtype": ("out_dtype", {"out_dtype": torch.int32}),
    "k_scale": ("k_scale", {"k_scale": torch.ones(1)}),
    "total_tokens": ("total_tokens", {"total_tokens": -1}),
}


@pytest.mark.parametrize("case", GATHER_MISTAKES)
def test_gather_refuses(ops, case):
    names, options = GATHER_MISTAKES[case]
    batch = peaky_batch([20, 5], device=ops.device)
    options = {name: value.to(ops.device) if torch.is_tensor(value) else value for name, value in options.items()}
    lengths = options.pop("seq_lens", batch.seq_lens)
    with pytest.raises(REFUSED, match=names):
        ops.gather_kv(batch.key_cache, batch.value_cache, batch.block_table, lengths, **options)


MAPPING_MISTAKES = {
    "one_column": torch.zeros(2, 1, dtype=torch.int64),
    "flat": torch.zeros(2, dtype=torch.int64),
    "int32": torch.zeros(1, 2, dtype=torch.int32),
    "float": torch.zeros(1, 2),
}


@pytest.mark.parametrize("case", MAPPING_MISTAKES)
def test_copy_and_swap_refuse_mappings(ops, case):
    caches = list(make_cache(3, 16, 2, 64, dtype=torch.float32, device=ops.device))
    host = list(make_cache(3, 16, 2, 64, dtype=torch.float32))
    with pytest.raises(REFUSED, match="block_mapping"):
        ops.copy_blocks(caches, MAPPING_MISTAKES[case])
    with pytest.raises(REFUSED, match="block_mapping"):
        ops.swap_blocks(caches, host, MAPPING_MISTAKES[case])


@pytest.mark.parametrize("shape", [(6, 16, 2, 64), (2, 2, 6, 16, 2, 64)])
@pytest.mark.parametrize("module", [paged_attn, paged_attn.reference])
def test_only_whole_stacks_are_copied(module, shape):
    """One cache is no stack of layers: its blocks would be taken for layers. Nor is a stack of [2, NB, ...]."""
    caches, whole = torch.zeros(shape), torch.zeros(2, 6, 16, 2, 64)
    mapping = torch.tensor([[0, 1]])
    for call in (
        lambda: module.copy_blocks(caches, mapping),
        lambda: module.swap_blocks(caches, whole, mapping),
        lambda: module.swap_blocks(whole, caches, mapping),
    ):
        with pytest.raises(ValueError, match="expected a list of tensors, or one"):
            call()


def test_copy_and_swap_refuse_expanded_pools(ops):
    one, host = torch.zeros(1, 16, 2, 64, device=ops.device), torch.ones(3, 16, 2, 64)
    mapping = torch.tensor([[0, 1]])
    with pytest.raises(REFUSED, match="caches"):
        ops.copy_blocks([one.expand(3, -1, -1, -1)], mapping)
    with pytest.raises(REFUSED, match="dst"):
        ops.swap_blocks([host], [one.expand(3, -1, -1, -1)], mapping)
    assert one.count_nonzero() == 0


def test_swap_refuses_pools_that_differ(ops):
    caches = list(make_cache(3, 16, 2, 64, dtype=torch.float32, device=ops.device))
    mapping = torch.tensor([[0, 1]])
    for host in (
        caches[:1],
        [cache.half() for cache in caches],
        [cache[:, :8] for cache in caches],
        [cache[..., :32] for cache in caches],
    ):
        with pytest.raises(REFUSED, match=r"src|dst"):
            ops.swap_blocks(caches, [cache.cpu() + 1 for cache in host], mapping)
    assert all(cache.count_nonzero() == 0 for cache in caches)


MERGE_MISTAKES = {
    "output_a_2d": ("output_a", 0, lambda t: t[0]),
    "output_a_dtype": ("output", 0, lambda t: t.double()),
    "lse_a_shape": ("lse_a", 1, lambda t: t[:, :2]),
    "lse_a_dtype": ("lse_a", 1, lambda t: t.half()),
    "output_b_shape": ("output_b", 2, lambda t: t[:4]),
    "output_b_dtype": ("output_b", 2, lambda t: t.half()),
    "lse_b_3d": ("lse_b", 3, lambda t: t[..., None]),
}


@pytest.mark.parametrize("case", MERGE_MISTAKES)
def test_merge_refuses(ops, case):
    names, index, mistake = MERGE_MISTAKES[case]
    output, lse = torch.ones(5, 3, 64, device=ops.device), torch.ones(5, 3, device=ops.device)
    arguments = [output, lse, output + 1, lse + 1]
    arguments[index] = mistake(arguments[index])
    with pytest.raises(REFUSED, match=names):
        ops.merge_attn_states(*arguments)


@pytest.mark.parametrize("name", ["out", "out_lse"])
def test_merge_refuses_results_that_do_not_fit(ops, name):
    output, lse = torch.ones(5, 3, 64, device=ops.device), torch.ones(5, 3, device=ops.device)
    wrong = torch.full((5, 2, 64) if name == "out" else (5, 2), 7.0, device=ops.device)
    before = wrong.clone()
    for result in (wrong, output[:1].expand_as(output) if name == "out" else lse[:1].expand_as(lse)):
        with pytest.raises(REFUSED, match=name):
            ops.merge_attn_states(output, lse, output, lse, **{name: result})
    assert_same_bits(wrong, before)
    assert (output == 1).all()
    assert (lse == 1).all()


CONTENT_MISTAKES = {
    "length_negative": ("seq_lens", {"seq_lens": [20, -1]}),
    "length_past_the_table": ("seq_lens", {"seq_lens": [20, 2**31 - 1]}),
    "block_negative": ("block_table", {"block_table": [[0, 1], [-1, 0]]}),
    "block_past_the_cache": ("block_table", {"block_table": [[0, 1], [10**6, 0]]}),
    "starts_not_from_0": ("cu_seqlens_q", {"cu_seqlens_q": [1, 1, 2]}),
    "starts_descend": ("cu_seqlens_q", {"cu_seqlens_q": [0, 2, 1]}),
    "starts_past_the_query": ("cu_seqlens_q", {"cu_seqlens_q": [0, 1, 3]}),
}


@pytest.mark.parametrize("module", [paged_attn, paged_attn.reference])
@pytest.mark.parametrize("case", CONTENT_MISTAKES)
def test_contents_are_checked_on_the_host(module, case):
    """By the CPU's kernels and by the reference."""
    name, mistake = CONTENT_MISTAKES[case]
    changed = {name: torch.tensor(value, dtype=torch.int32) for name, value in mistake.items()}
    options = {name: value for name, value in changed.items() if name not in POSITION}
    arguments = [changed.get(name, argument) for name, argument in zip(POSITION, attention_arguments("cpu"))]
    with pytest.raises(ValueError, match=name):
        module.paged_attention(*arguments, **options)


@pytest.mark.parametrize("options", [{"scale": math.inf}, {"softcap": math.nan}, {"softcap": math.inf}], ids=str)
def test_the_reference_refuses_numbers_that_the_ops_refuse(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        paged_attn.reference.paged_attention(*attention_arguments("cpu"), **options)
