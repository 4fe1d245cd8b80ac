"""rope_write_kv: rotations against the reference, and the cache as write_kv leaves it."""

import pytest
import torch

import paged_attn
from paged_attn import reference
from paged_attn.testing import FLOAT_DTYPES, LAYOUTS, QUANTISED_DTYPES, assert_same_bits, make_cache, to_device

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def cos_sin_table(num_positions: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(num_positions).unsqueeze(1) * 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def qkv_slices(num_tokens, num_heads, num_kv_heads, head_dim, dtype):
    """Query, key and value as slices of one projection, as models make them."""
    heads = num_heads + 2 * num_kv_heads
    qkv = torch.randn(num_tokens, heads, head_dim, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    return qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)


def rotate_and_write(ops, cos_sin, *, dtype, head_dim, cache_dtype=None, layout="NHD", interleaved=False, **scales):
    """What the op leaves of query, key and caches, and how they were: all on the CPU."""
    query, key, value = qkv_slices(21, 6, 2, head_dim, dtype)
    positions = torch.arange(21).flip(0) * 3
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:19]
    slots[4] = -1
    caches = [c.fill_(3) for c in make_cache(3, 16, 2, head_dim, dtype=cache_dtype or dtype, layout=layout)]
    moved = [to_device(t, ops.device) for t in (query, key, value, *caches)]
    ops.rope_write_kv(
        *moved[:3],
        positions.to(ops.device),
        cos_sin.to(ops.device),
        *moved[3:],
        slots.to(ops.device),
        interleaved=interleaved,
        **scales,
    )
    return [t.cpu() for t in moved], (query, key, value, positions, caches, slots)


@pytest.mark.parametrize("table_dtype", ["float32", "own"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(8, 8), (64, 64), (80, 20), (128, 128), (128, 64), (200, 2), (256, 256)]
)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_rotation(ops, dtype, head_dim, rotary_dim, interleaved, table_dtype):
    cos_sin = cos_sin_table(64, rotary_dim).to(torch.float32 if table_dtype == "float32" else dtype)
    got, (query, key, value, positions, caches, slots) = rotate_and_write(
        ops, cos_sin, dtype=dtype, head_dim=head_dim, interleaved=interleaved
    )
    query, key = query.clone(), key.clone()
    before = query.clone()
    reference.rope_write_kv(query, key, value, positions, cos_sin, *caches, slots, interleaved=interleaved)
    for result, expected in zip(got[:2], (query, key)):
        torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert_same_bits(got[0][..., rotary_dim:], before[..., rotary_dim:])
    assert_same_bits(got[2], value)


@pytest.mark.parametrize("scale_shape", [None, (1,), (2,), (3, 16, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [None, *QUANTISED_DTYPES], ids=str)
def test_cache_is_that_of_write_kv(ops, cache_dtype, layout, scale_shape):
    """The cache holds the rotated key that the caller sees, written as by the separate op; rows past the slots are
    rotated all the same."""
    if cache_dtype is None and scale_shape is not None:
        pytest.skip("an unquantised cache has no scales")
    names = ("k_scale", "v_scale") if scale_shape else ()
    scales = {name: torch.full(scale_shape, 0.25, device=ops.device) for name in names}
    (_, key, value, *caches), (_, _, _, _, expected, slots) = rotate_and_write(
        ops, cos_sin_table(64, 64), dtype=torch.bfloat16, head_dim=64, cache_dtype=cache_dtype, layout=layout, **scales
    )
    same_scales = {name: torch.full(scale_shape, 0.25) for name in names}
    paged_attn.write_kv(key, value, *expected, slots, **same_scales)
    for result, cache in zip(caches, expected):
        assert_same_bits(result, cache)
    for name in names:
        assert_same_bits(scales[name].cpu(), same_scales[name])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_many_tokens(ops, cache_dtype):
    """As the same tokens a few at a time."""
    cos_sin = cos_sin_table(1000, 64).to(ops.device)
    positions, slots = (torch.arange(12000, device=ops.device) % 1000), torch.arange(12000, device=ops.device)
    scale = {} if cache_dtype == torch.bfloat16 else {"k_scale": torch.ones(750, 16, 2, device=ops.device)}
    results = []
    for step in (12000, 500):
        qkv = [part.to(ops.device) for part in qkv_slices(12000, 6, 2, 64, torch.bfloat16)]
        caches = [c.fill_(3) for c in make_cache(750, 16, 2, 64, dtype=cache_dtype, device=ops.device)]
        scales = {name: tensor.clone() for name, tensor in scale.items()}
        for first in range(0, 12000, step):
            part = slice(first, first + step)
            query, key, value = (x[part] for x in qkv)
            ops.rope_write_kv(query, key, value, positions[part], cos_sin, *caches, slots[part], **scales)
        results.append([*qkv, *caches, *scales.values()])
    for at_once, few in zip(*results, strict=True):
        assert_same_bits(at_once, few)


@pytest.mark.parametrize(("interleaved", "expected"), [(False, [-3, -4, 1, 2]), (True, [-2, 1, -4, 3])])
def test_a_quarter_turn(ops, interleaved, expected):
    """By 90 degrees (x, y) becomes (-y, x): the pairs of 1, 2, 3, 4 are (1, 3), (2, 4) or (1, 2), (3, 4)."""
    row = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], device=ops.device)
    query, key, value = (row.repeat(1, 1, 1) for _ in range(3))
    caches = torch.zeros(2, 1, 1, 1, 8, device=ops.device)
    cos_sin = torch.tensor([[0.0, 0, 1, 1]], device=ops.device)
    zero = torch.zeros(1, dtype=torch.int64, device=ops.device)
    ops.rope_write_kv(query, key, value, zero, cos_sin, *caches, zero, interleaved=interleaved)
    for rotated in (query, key, caches[0]):
        assert rotated.flatten().tolist() == [*expected, 5, 6, 7, 8]
    assert caches[1].flatten().tolist() == row.tolist()


def test_the_reference_holds_positions_to_the_table():
    """Outside of it NaN, as by the op, never a row counted from the end; no tokens are no error."""
    query, key, value = qkv_slices(3, 6, 2, 64, torch.float32)
    query, key = query.clone(), key.clone()
    caches, table = make_cache(1, 4, 2, 64, dtype=torch.float32), cos_sin_table(8, 32)
    reference.rope_write_kv(query, key, value, torch.tensor([0, -1, 8]), table, *caches, torch.arange(3))
    assert query[..., :32].isnan().all(dim=-1).all(dim=-1).tolist() == [False, True, True]
    assert not query[..., 32:].isnan().any()
    none = torch.arange(0)
    reference.rope_write_kv(query[:0], key[:0], value[:0], none, table, *caches, none)


def test_position_outside_the_table(ops):
    cos_sin = cos_sin_table(40, 32)  # positions run to 60
    (query, *_), _ = rotate_and_write(ops, cos_sin, dtype=torch.float32, head_dim=64)
    outside = torch.arange(21).flip(0) * 3 >= 40
    assert torch.equal(query.isnan().any(dim=-1).all(dim=-1), outside)
    assert not query[..., 32:].isnan().any()


@pytest.mark.parametrize("rotary_dim", [3, 0, 66])
def test_refused_rotary_dims(ops, rotary_dim):
    with pytest.raises(ValueError, match="cos_sin"):
        rotate_and_write(ops, torch.ones(64, rotary_dim), dtype=torch.float32, head_dim=64)


def test_refused_arguments(ops):
    tensors = [t.contiguous() for t in qkv_slices(4, 6, 2, 64, torch.float32)]
    tensors += [torch.arange(4), cos_sin_table(8, 64), *make_cache(1, 16, 2, 64, dtype=torch.float32), torch.arange(4)]
    tensors = [to_device(t, ops.device) for t in tensors]
    wrong = {
        "query": tensors[0][:3],
        "positions": tensors[3][:3],
        "cos_sin": tensors[4].to(torch.float16),
        "slot_mapping": torch.arange(5, device=ops.device),
    }
    for name, at in (("query", 0), ("positions", 3), ("cos_sin", 4), ("slot_mapping", 7)):
        arguments = [wrong[name] if i == at else t for i, t in enumerate(tensors)]
        with pytest.raises(ValueError, match=name):
            ops.rope_write_kv(*arguments)


def test_opcheck(ops):
    query, key, value = (t.contiguous() for t in qkv_slices(5, 6, 2, 64, torch.float32))
    caches = make_cache(1, 16, 2, 64, dtype=torch.float32)
    tensors = [query, key, value, torch.arange(5), cos_sin_table(8, 64), *caches, torch.arange(5)]
    arguments = [to_device(t, ops.device) for t in tensors]
    torch.library.opcheck(torch.ops.paged_attn.rope_write_kv.default, (*arguments, False, None, None))


def test_compiled(ops):
    query, key, value = qkv_slices(5, 6, 2, 64, torch.float32)
    tensors = [
        query,
        key,
        value,
        torch.arange(5),
        cos_sin_table(8, 64),
        *make_cache(1, 16, 2, 64, dtype=torch.float32),
        torch.arange(5),
    ]
    eager = [to_device(t.clone(), ops.device) for t in tensors]
    compiled = [t.clone() for t in eager]
    ops.rope_write_kv(*eager)
    torch.compile(lambda *t: paged_attn.rope_write_kv(*t), fullgraph=True, backend="aot_eager")(*compiled)
    for a, b in zip(eager, compiled):
        assert_same_bits(a.cpu(), b.cpu())
