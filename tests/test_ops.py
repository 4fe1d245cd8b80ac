"""What PyTorch asks of ops (group G): schemas, fake implementations and compilation of every registered op."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

import paged_attn
from paged_attn.testing import QUANTISED_DTYPES, assert_same_bits, make_cache, peaky_batch

OPS = torch.ops.paged_attn

# The schema test compares tensors by arithmetic that float8 lacks.
FLOAT8_TESTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ALL_TESTS = ("test_schema", *FLOAT8_TESTS)


def attention_arguments(device, query_lens=None, **batch_arguments):
    """Positional arguments of the op: the tensors, then every option at its default."""
    batch = peaky_batch([20, 5, 33], query_lens, device=device, **batch_arguments)
    options = (batch.query.shape[-1] ** -0.5, True, None, 0.0, None, None, batch.k_scale, batch.v_scale, False, 0, 0)
    return (*list(vars(batch).values())[:6], *options)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("query_lens", [None, [3, 5, 33]])
def test_opcheck_attention(device, query_lens, return_lse):
    opcheck(OPS.paged_attention.default, (*attention_arguments(device, query_lens), return_lse))


@pytest.mark.parametrize("cache_dtype", QUANTISED_DTYPES, ids=str)
def test_opcheck_quantised_attention(device, cache_dtype):
    arguments = attention_arguments(device, dtype=torch.bfloat16, cache_dtype=cache_dtype, scale_kind="head")
    tests = ALL_TESTS if cache_dtype == torch.int8 else FLOAT8_TESTS
    opcheck(OPS.paged_attention.default, (*arguments, True), test_utils=tests)


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_attention_out(device, with_lse):
    arguments = attention_arguments(device)
    out = torch.empty_like(arguments[0])
    lse = out.new_empty(out.shape[:2]) if with_lse else None
    opcheck(OPS.paged_attention.out, arguments, {"out": out, "lse": lse})


@pytest.mark.parametrize("scale_kind", [None, "head", "token_head"])
def test_opcheck_write(device, scale_kind):
    key = torch.randn(5, 2, 64, device=device)
    dtype = torch.float32 if scale_kind is None else torch.int8
    caches = make_cache(3, 16, 2, 64, dtype=dtype, device=device)
    shape = {"head": (2,), "token_head": (3, 16, 2)}.get(scale_kind)
    scales = [None if shape is None else torch.ones(shape, device=device) for _ in range(2)]
    opcheck(OPS.write_kv.default, (key, key, *caches, torch.arange(5, device=device), *scales))


@pytest.mark.parametrize("total_tokens", [None, 64])
def test_opcheck_gather(device, total_tokens):
    batch = peaky_batch([20, 5, 33], device=device)
    arguments = batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens
    opcheck(OPS.gather_kv.default, (*arguments, None, None, None, None, total_tokens))


def test_opcheck_merge(device):
    output, lse = torch.randn(5, 3, 64, device=device), torch.randn(5, 3, device=device)
    opcheck(OPS.merge_attn_states.default, (output, lse, output + 1, lse + 1))
    opcheck(
        OPS.merge_attn_states.out,
        (output, lse, output + 1, lse + 1, torch.empty_like(output), torch.empty_like(lse)),
    )


def test_opcheck_copy_and_swap(device):
    caches = list(make_cache(4, 16, 2, 64, dtype=torch.float32, device=device))
    host = list(make_cache(4, 16, 2, 64, dtype=torch.float32))
    mapping = torch.tensor([[0, 2], [1, 3]])
    opcheck(OPS.copy_blocks.default, (caches, mapping.to(device)))
    opcheck(OPS.swap_blocks.default, (caches, host, mapping, False))


def test_ops_have_the_defaults_of_the_functions(device):
    """Each op by its arguments alone, and by name."""
    batch = peaky_batch([20, 5, 33], device=device)
    arguments = [batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens]
    expected = paged_attn.paged_attention(*arguments)
    out = torch.empty_like(expected)
    assert OPS.paged_attention.out(*arguments, out=out) is None
    assert_same_bits(out, expected)
    assert_same_bits(OPS.paged_attention(*arguments)[0], expected)
    windowed = paged_attn.paged_attention(*arguments, window_size=4, softcap=2.0)
    assert_same_bits(OPS.paged_attention(*arguments, window_size=4, softcap=2.0)[0], windowed)
    opcheck(OPS.paged_attention.default, arguments, {"return_lse": True})
    with pytest.raises(ValueError, match="window_size"):
        OPS.paged_attention(*arguments, window_size=0)

    row = torch.randn(1, 2, 64, device=device)
    OPS.write_kv(row, row, *arguments[1:3], batch.block_table[0, :1].long() * 16)
    keys, _ = OPS.gather_kv(*arguments[1:])
    assert_same_bits(keys[:1], row)
    opcheck(OPS.gather_kv.default, arguments[1:], {"total_tokens": 58})
    host = [torch.zeros(batch.key_cache.shape)]
    OPS.swap_blocks([batch.key_cache], host, torch.tensor([[0, 1]]))
    assert_same_bits(host[0][1], batch.key_cache[0])


def on_meta(name, tensors):
    return [tensor.to("meta") if key == name else tensor for key, tensor in tensors.items()]


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "block_table", "seq_lens"])
def test_attention_refuses_one_tensor_without_data(name):
    """No kernel runs, and so no check in it, where one tensor is on the meta device."""
    tensors = dict(list(vars(peaky_batch([20, 5])).items())[:5])
    with pytest.raises(ValueError, match="expected device"):
        paged_attn.paged_attention(*on_meta(name, tensors))
    with pytest.raises(ValueError, match="out: expected device"):
        paged_attn.paged_attention(*tensors.values(), out=torch.empty_like(tensors["query"], device="meta"))
    if name != "query":
        with pytest.raises(ValueError, match="expected device"):
            paged_attn.gather_kv(*on_meta(name, tensors)[1:])


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache", "slot_mapping"])
def test_write_refuses_one_tensor_without_data(name):
    key_cache, value_cache = make_cache(3, 16, 2, 64, dtype=torch.float32)
    tensors = {
        "key": torch.ones(2, 2, 64),
        "value": torch.ones(2, 2, 64),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.arange(2),
    }
    with pytest.raises(ValueError, match="expected device"):
        paged_attn.write_kv(*on_meta(name, tensors))


def test_moves_and_merge_refuse_one_tensor_without_data():
    caches = list(make_cache(4, 16, 2, 64, dtype=torch.float32))
    mapping = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="block_mapping: expected device"):
        paged_attn.copy_blocks(caches, mapping.to("meta"))
    with pytest.raises(ValueError, match="caches: expected device"):
        paged_attn.copy_blocks([caches[0], caches[1].to("meta")], mapping)
    with pytest.raises(ValueError, match="dst: expected device"):
        paged_attn.swap_blocks(caches, [cache.to("meta") for cache in caches], mapping)
    with pytest.raises(ValueError, match="block_mapping: expected device"):
        paged_attn.swap_blocks(caches, caches, mapping.to("meta"))
    output, lse = torch.zeros(3, 2, 64), torch.zeros(3, 2)
    with pytest.raises(ValueError, match="lse_b: expected device"):
        paged_attn.merge_attn_states(output, lse, output, lse.to("meta"))


@pytest.mark.parametrize("num_seqs", [0, 3])
@pytest.mark.parametrize("return_lse", [False, True])
def test_fake_shapes(num_seqs, return_lse):
    """Meta shapes are right, also without a sequence."""
    with torch.device("meta"):
        query = torch.empty(num_seqs, 8, 64, dtype=torch.bfloat16)
        caches = [torch.empty(4, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
        table, lengths = torch.empty(num_seqs, 4, dtype=torch.int32), torch.empty(num_seqs, dtype=torch.int32)
    result = paged_attn.paged_attention(query, *caches, table, lengths, return_lse=return_lse)
    output, lse = result if return_lse else (result, None)
    assert output.shape == (num_seqs, 8, 64)
    assert output.dtype == torch.bfloat16
    if return_lse:
        assert lse.shape == (num_seqs, 8)
        assert lse.dtype == torch.float32


def step_twice(ops, query, key, value, key_cache, value_cache, table, lengths, slots):
    """Write, attend, write another value to the same slot, attend."""
    ops.write_kv(key, value, key_cache, value_cache, slots)
    first = ops.paged_attention(query, key_cache, value_cache, table, lengths)
    ops.write_kv(key, value + 1, key_cache, value_cache, slots)
    second, lse = ops.paged_attention(query, key_cache, value_cache, table, lengths, return_lse=True)
    return first, second, lse


def step_arguments(device, cache_dtype=None):
    batch = peaky_batch([20, 5], dtype=torch.float32, cache_dtype=cache_dtype)
    slots = [int(row[(length - 1) // 16]) * 16 + (length - 1) % 16 for row, length in zip(batch.block_table, [20, 5])]
    key, value = torch.randn(2, 2, 2, 64, generator=torch.Generator().manual_seed(9))
    batch = batch.to(device)
    caches = batch.key_cache, batch.value_cache
    rows = key.to(device), value.to(device), *caches
    return batch.query, *rows, batch.block_table, batch.seq_lens, torch.tensor(slots, device=device)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_sees_both_writes(ops, compiler):
    eager = step_arguments(ops.device)
    expected = step_twice(ops, *eager)
    compiled = step_arguments(ops.device)
    actual = torch.compile(partial(step_twice, paged_attn), fullgraph=True, backend=compiler)(*compiled)
    assert (expected[0] != expected[1]).any()
    for result, right in zip(actual, expected, strict=True):
        assert_same_bits(result, right)
    assert_same_bits(compiled[4], eager[4])


def test_compile_the_cache_operations(ops):
    """Copy, gather and merge in one graph."""

    def run(key_cache, value_cache, table, lengths, mapping, output, lse):
        paged_attn.copy_blocks([key_cache, value_cache], mapping)
        keys, values = paged_attn.gather_kv(key_cache, value_cache, table, lengths, total_tokens=25)
        return keys, values, *paged_attn.merge_attn_states(output, lse, 2 * output, lse)

    def arguments():
        batch = peaky_batch([20, 5]).to(ops.device)
        mapping = torch.stack([batch.block_table[0, :1], batch.block_table[1, :1]], dim=1).long()
        output = torch.ones(3, 2, 64, device=ops.device)
        return batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens, mapping, output, output[..., 0]

    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(*arguments())
    for result, right in zip(actual, run(*arguments()), strict=True):
        assert_same_bits(result, right)


def test_compile_with_another_batch_size(ops):
    """A second batch size recompiles or generalises, and is right."""
    compiled = torch.compile(paged_attn.paged_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([20, 5], [7, 33, 12]):
        batch = peaky_batch(lengths, device=ops.device)
        assert_same_bits(batch.run(compiled), batch.run(ops.paged_attention))


@pytest.mark.slow
def test_compile_with_graphs(cuda):
    """torch.compile's own graphs: the functions, warmed up in turn, share a pool, in which no op may keep memory."""
    few = peaky_batch([6000] * 3, dtype=torch.bfloat16, num_heads=2, head_dim=128, device=cuda)
    many = peaky_batch([6000] * 3, [8] * 3, dtype=torch.bfloat16, num_heads=16, head_dim=128, device=cuda)

    def attend_few(query: torch.Tensor) -> torch.Tensor:
        zeros = [torch.ones(1 << size, device=cuda).cumsum(0)[-1:].to(query.dtype) * 0 for size in (18, 20, 22)]
        return replace(few, query=query + sum(zeros)).run(paged_attn.paged_attention)

    def attend_many(query: torch.Tensor) -> torch.Tensor:
        return replace(many, query=query * 1).run(paged_attn.paged_attention)

    calls = []
    for function, batch in ((attend_few, few), (attend_many, many)):
        expected = batch.run(paged_attn.paged_attention)
        calls.append((torch.compile(function, mode="reduce-overhead"), batch.query, expected))
    with torch.no_grad():
        for turn in (0, 0, 0, 1, 0, 1, 0, 1, 0, 1):
            compiled, query, expected = calls[turn]
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_bits(compiled(query).clone(), expected)


@pytest.mark.slow
def test_no_hidden_clone_of_the_cache(cuda):
    """Peak memory of write and attend, compiled, stays far below one cache. (aot_eager clones whatever is mutated.)"""
    caches = make_cache(4096, 16, 8, 128, dtype=torch.bfloat16, device=cuda)
    rows = torch.ones(4, 8, 128, dtype=torch.bfloat16, device=cuda)
    query = torch.ones(4, 32, 128, dtype=torch.bfloat16, device=cuda)
    table = torch.arange(4, dtype=torch.int32, device=cuda).view(4, 1)
    lengths, slots = torch.ones(4, dtype=torch.int32, device=cuda), 16 * torch.arange(4, device=cuda)
    compiled = torch.compile(partial(step_twice, paged_attn), fullgraph=True)
    compiled(query, rows, rows, *caches, table, lengths, slots)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compiled(query, rows, rows, *caches, table, lengths, slots)
    cache_bytes = caches[0].numel() * caches[0].element_size()
    assert torch.cuda.max_memory_allocated() - before < cache_bytes / 4


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("through", ["output", "lse", "merged", "cache", "gathered"])
def test_a_backward_pass_is_refused(ops, through, compiled):
    """Gradients that are not there would be taken for zeros."""
    batch = peaky_batch([20, 5, 33], device=ops.device)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        if through == "gathered":
            gathered, _ = ops.gather_kv(
                batch.key_cache * weight, batch.value_cache, batch.block_table, batch.seq_lens, total_tokens=58
            )
            return gathered.sum() + weight.sum()
        if through == "cache":
            output = ops.paged_attention(
                batch.query, batch.key_cache * weight, batch.value_cache, batch.block_table, batch.seq_lens
            )
            return output.sum() + weight.sum()
        output, lse = ops.paged_attention(
            batch.query * weight,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            return_lse=True,
        )
        if through == "merged":
            output, _ = ops.merge_attn_states(output.detach() * weight, lse.detach(), output.detach(), lse.detach())
        return (lse if through == "lse" else output).sum() + weight.sum()

    weight = torch.ones(1, device=ops.device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*backward.*")
        result = (torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss)(weight)
    with pytest.raises(RuntimeError, match="no backward pass"):
        result.backward()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("op", ["paged_attention", "merge_attn_states", "gather_kv", "write_kv", "copy_blocks"])
def test_a_tangent_is_refused(ops, op, compiled):
    """A derivative that is not there would be taken for zero."""
    batch = peaky_batch([20, 5, 33], device=ops.device)
    lse = torch.zeros(batch.query.shape[:2], device=ops.device)
    slots = torch.tensor([3], device=ops.device)
    table, lengths = batch.block_table, batch.seq_lens
    functions = {
        "paged_attention": lambda x: ops.paged_attention(x, batch.key_cache, batch.value_cache, table, lengths),
        "merge_attn_states": lambda x: ops.merge_attn_states(x, lse, batch.query, lse)[0],
        "gather_kv": lambda x: ops.gather_kv(x, batch.value_cache, table, lengths, total_tokens=58)[0],
        "write_kv": lambda x: ops.write_kv(x[0, :1], x[0, :1], batch.key_cache, batch.value_cache, slots),
        "copy_blocks": lambda x: ops.copy_blocks([x], torch.tensor([[0, 1]])),
    }
    function = functions[op]
    primal = batch.query if op in ("paged_attention", "merge_attn_states") else batch.key_cache
    differentiate = partial(torch.func.jvp, function, (primal,))
    if compiled:
        differentiate = torch.compile(differentiate, backend="aot_eager")
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        differentiate((torch.ones_like(primal),))
    with forward_ad.dual_level():  # others may have tangents
        function(primal)


def test_out_with_a_tangent_is_refused(ops):
    """It would keep the tangent of what it held before."""
    batch = peaky_batch([20, 5, 33], device=ops.device)
    lse = torch.zeros(batch.query.shape[:2], device=ops.device)
    merge = partial(ops.merge_attn_states, batch.query, lse, batch.query, lse)
    with forward_ad.dual_level():
        out = forward_ad.make_dual(torch.zeros_like(batch.query), torch.ones_like(batch.query))
        for call in (partial(batch.run, ops.paged_attention), merge):
            with pytest.raises(RuntimeError, match="no forward-mode derivative"):
                call(out=out)


def test_out_takes_no_gradient(ops):
    """As in torch: what is written in place would look like a constant."""
    batch = peaky_batch([20, 5, 33], device=ops.device)
    out = torch.empty_like(batch.query)
    batch.query.requires_grad_()
    with pytest.raises(ValueError, match="out: expected None where an argument requires a gradient"):
        batch.run(ops.paged_attention, out=out)
    lse = torch.zeros(batch.query.shape[:2], device=ops.device)
    with pytest.raises(ValueError, match="out: expected None where an argument requires a gradient"):
        ops.merge_attn_states(batch.query, lse, out, lse, out=out)
    with torch.no_grad():
        assert_same_bits(batch.run(ops.paged_attention, out=out), batch.run(ops.paged_attention))
