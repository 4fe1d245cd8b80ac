"""write_kv: rows land in their slots, bit for bit or quantised within half a step."""

import pytest
import torch

from paged_attn import reference
from paged_attn.testing import (
    FLOAT_DTYPES,
    LAYOUTS,
    QUANTISED_DTYPES,
    SCALE_KINDS,
    assert_close,
    assert_same_bits,
    bits,
    make_cache,
    to_device,
)

# Largest relative distance from a number to its rounding, and half the distance of the smallest two numbers.
HALF_STEP = {torch.float8_e4m3fn: (2**-4, 2**-10), torch.float8_e5m2: (2**-3, 2**-17), torch.int8: (0, 0.5)}


def rows(num_tokens, num_kv_heads, head_dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    key, value = (3 * torch.randn(2, num_tokens, num_kv_heads, head_dim, generator=generator)).to(dtype)
    return key, value


def scattered_slots(num_slots, num_tokens, seed=0):
    """Distinct slots, every fifth one negative."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    slots[::5] = -1 - slots[::5]
    return slots


def scale_tensor(kind, cache, seed=0):
    if kind is None:
        return None
    sizes = {"tensor": (1,), "head": (cache.shape[2],), "token_head": tuple(cache.shape[:3])}
    if kind == "token_head":
        return torch.full(sizes[kind], 9.0)
    return 0.02 + torch.rand(sizes[kind], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
def test_one_element_of_any_shape_is_a_scale(ops, shape):
    """The op and the reference take it for the whole cache."""
    key, value = rows(4, 2, 8, torch.float32)
    slots, table = torch.arange(4), torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.tensor([4], dtype=torch.int32)
    results = []
    for module, device in ((ops, ops.device), (reference, "cpu")):
        cache = make_cache(2, 4, 2, 8, dtype=torch.int8)[0].zero_().to(device)
        scales = {name: torch.full(shape, 0.125, device=device) for name in ("k_scale", "v_scale")}
        module.write_kv(key.to(device), value.to(device), cache, cache.clone(), slots.to(device), **scales)
        arguments = (cache, cache, table.to(device), lengths.to(device))
        gathered, _ = module.gather_kv(*arguments, **scales, out_dtype=torch.float32)
        output = module.paged_attention(torch.ones(1, 4, 8, device=device), *arguments, **scales)
        assert all(scale.item() == 0.125 for scale in scales.values())
        results.append((gathered.cpu(), output.cpu()))
    (gathered, output), (expected, expected_output) = results
    assert_same_bits(gathered, expected)
    assert_close(output, expected_output)


def test_scales_that_share_their_memory_are_not_written(ops):
    key, value = rows(4, 2, 8, torch.float32)
    caches = [to_device(cache, ops.device) for cache in make_cache(2, 4, 2, 8, dtype=torch.int8)]
    scale = torch.ones(2, device=ops.device)
    with pytest.raises(ValueError, match="k_scale: expected an address for every element"):
        ops.write_kv(
            key.to(ops.device),
            value.to(ops.device),
            *caches,
            torch.arange(4, device=ops.device),
            k_scale=scale.expand(2, 4, 2),
            v_scale=scale.expand(2, 4, 2),
        )


def write_both(ops, key, value, slots, *, dtype, block_size=16, layout="NHD", scale_kind=None, num_blocks=None):
    """The caches and scales that the op and the reference leave behind, on the CPU."""
    num_kv_heads, head_dim = key.shape[1:]
    num_blocks = num_blocks or 2 * (-(-key.shape[0] // block_size)) + 1
    results = []
    for write, device in ((ops.write_kv, ops.device), (reference.write_kv, "cpu")):
        caches = make_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, layout=layout)
        caches = [to_device(cache.fill_(3), device) for cache in caches]
        scales = [scale_tensor(scale_kind, cache, seed) for seed, cache in enumerate(caches)]
        scales = [None if scale is None else scale.to(device) for scale in scales]
        named = {} if scale_kind is None else {"k_scale": scales[0], "v_scale": scales[1]}
        write(key.to(device), value.to(device), *caches, slots.to(device), **named)
        results.append(([cache.cpu() for cache in caches], [s if s is None else s.cpu() for s in scales]))
    return results


def check_write(
    ops, dtype=torch.float32, block_size=16, head_dim=64, num_kv_heads=2, layout="NHD", slots_like=torch.int64
):
    key, value = rows(50, num_kv_heads, head_dim, dtype)
    num_blocks = 2 * (-(-50 // block_size)) + 1
    slots = scattered_slots(num_blocks * block_size, 47).to(slots_like)
    (actual, _), (expected, _) = write_both(ops, key, value, slots, dtype=dtype, block_size=block_size, layout=layout)
    for cache, right in zip(actual, expected, strict=True):
        assert_same_bits(cache, right)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_write(ops, dtype, block_size, head_dim):
    check_write(ops, dtype, block_size, head_dim)


@pytest.mark.parametrize("slots_like", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_write_layouts(ops, num_kv_heads, layout, slots_like):
    check_write(ops, torch.bfloat16, num_kv_heads=num_kv_heads, layout=layout, slots_like=slots_like)


def check_strided_slots(ops):
    """Every second entry of a wider mapping."""
    key, value = rows(6, 2, 64, torch.float32)
    wide = torch.tensor([5, 99, 17, 99, -1, 99, 0, 99, 31, 99, 8, 99], device=ops.device)
    key_cache, value_cache = make_cache(2, 16, 2, 64, dtype=torch.float32, device=ops.device)
    ops.write_kv(key.to(ops.device), value.to(ops.device), key_cache, value_cache, wide[::2])
    for row, slot in enumerate([5, 17, None, 0, 31, 8]):
        if slot is not None:
            assert_same_bits(key_cache.view(32, 2, 64)[slot], key[row])
            assert_same_bits(value_cache.view(32, 2, 64)[slot], value[row])


def test_strided_slots(ops):
    check_strided_slots(ops)


def test_many_tokens(ops):
    key, value = rows(5000, 2, 64, torch.bfloat16)
    slots = torch.randperm(6000, generator=torch.Generator().manual_seed(3))[:5000]
    key_cache, value_cache = make_cache(375, 16, 2, 64, dtype=torch.bfloat16, device=ops.device)
    ops.write_kv(key.to(ops.device), value.to(ops.device), key_cache, value_cache, slots.to(ops.device))
    assert_same_bits(key_cache.view(6000, 2, 64)[slots.to(ops.device)], key)
    assert_same_bits(value_cache.view(6000, 2, 64)[slots.to(ops.device)], value)


@pytest.mark.parametrize("scale_kind", SCALE_KINDS)
def test_many_quantised_tokens(ops, scale_kind):
    """As the same tokens a few at a time."""
    rows_of_all = [part.to(ops.device) for part in rows(8000, 5, 128, torch.bfloat16)]
    slots = scattered_slots(9600, 8000).to(ops.device)
    results = []
    for step in (8000, 500):
        caches = make_cache(600, 16, 5, 128, dtype=torch.float8_e4m3fn, device=ops.device)
        caches = [cache.fill_(3) for cache in caches]
        scales = [scale_tensor(scale_kind, cache, seed).to(ops.device) for seed, cache in enumerate(caches)]
        for first in range(0, 8000, step):
            part = slice(first, first + step)
            key, value = (x[part] for x in rows_of_all)
            ops.write_kv(key, value, *caches, slots[part], k_scale=scales[0], v_scale=scales[1])
        results.append([*caches, *scales])
    for at_once, few in zip(*results, strict=True):
        assert_same_bits(at_once, few)


def check_quantised_write(
    ops, dtype, row_dtype=torch.bfloat16, scale_kind=None, layout="NHD", head_dim=64, block_size=16
):
    """stored x scale is within half a step of the row, and neighbours keep their bytes."""
    key, value = rows(50, 3, head_dim, row_dtype)
    num_blocks = 2 * (-(-50 // block_size)) + 1
    slots = scattered_slots(num_blocks * block_size, 47)
    (actual, scales), (expected, expected_scales) = write_both(
        ops, key, value, slots, dtype=dtype, layout=layout, scale_kind=scale_kind, block_size=block_size
    )
    kept = slots >= 0
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
    untouched[slots[kept]] = False
    relative, absolute = HALF_STEP[dtype]
    limit = reference.QUANTISED_MAX[dtype]
    for row, cache, right, scale, right_scale in zip(
        (key, value), actual, expected, scales, expected_scales, strict=True
    ):
        slot_view = cache.reshape(-1, 3, head_dim)
        assert torch.equal(bits(slot_view)[untouched], bits(right.reshape(-1, 3, head_dim))[untouched])
        stored = slot_view[slots[kept]].double()
        factor = torch.ones(1, 1, 1)
        if scale_kind == "token_head":
            assert_close(scale, right_scale, tolerance=1e-6)
            factor = scale.view(-1, 3, 1)[slots[kept]]
        elif scale_kind is not None:
            assert_same_bits(scale, right_scale)
            factor = scale.view(1, -1, 1)
        exact = (row[:47][kept].double() / factor.double()).clamp(-limit, limit)
        error = (stored - exact).abs()
        assert (error <= (1 + 1e-5) * torch.maximum(relative * exact.abs(), torch.tensor(absolute))).all()


@pytest.mark.parametrize("scale_kind", [None, *SCALE_KINDS])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row_dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
def test_quantised_write(ops, dtype, row_dtype, layout, scale_kind):
    check_quantised_write(ops, dtype, row_dtype, scale_kind, layout)


@pytest.mark.parametrize("scale_kind", ["head", "token_head"])
@pytest.mark.parametrize("block_size", [1, 3, 64])
@pytest.mark.parametrize("head_dim", [8, 24, 80, 128, 256])
@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
def test_quantised_write_shapes(ops, dtype, head_dim, block_size, scale_kind):
    check_quantised_write(ops, dtype, scale_kind=scale_kind, head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize("kinds", [("head", "head"), ("token_head", "token_head"), (None, "head")])
@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
def test_keys_unlike_values(ops, dtype, kinds):
    """K and V with strides, layouts and kinds of scales of their own: as where all of these are the same."""
    key, value = (x.to(ops.device) for x in rows(50, 3, 64, torch.bfloat16))
    wide = torch.zeros(50, 3, 80, dtype=torch.bfloat16, device=ops.device)
    wide[..., 16:] = value
    slots = scattered_slots(7 * 16, 47).to(ops.device)
    results = []
    for values, layout in ((value, "NHD"), (wide[..., 16:], "HND")):
        caches = [
            to_device(cache.fill_(3), ops.device)
            for side in ("NHD", layout)
            for cache in make_cache(7, 16, 3, 64, dtype=dtype, layout=side)[:1]
        ]
        scales = [scale_tensor(kind, cache) for kind, cache in zip(kinds, caches, strict=True)]
        scales = [None if scale is None else scale.to(ops.device) for scale in scales]
        ops.write_kv(key, values, *caches, slots, k_scale=scales[0], v_scale=scales[1])
        results.append([*caches, *(scale for scale in scales if scale is not None)])
    for alike, unlike in zip(*results, strict=True):
        assert_same_bits(alike, unlike)


def check_every_rounding(ops, dtype):
    """All float16 numbers, NaN and infinities among them, at scale 1: the reference's bits."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(-1, 2, 64)
    slots = torch.arange(numbers.shape[0])
    (actual, _), (expected, _) = write_both(ops, numbers, -numbers, slots, dtype=dtype)
    for cache, right in zip(actual, expected, strict=True):
        cache, right = cache.float(), right.float()
        assert torch.equal(cache.isnan(), right.isnan())
        assert torch.equal(cache.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
def test_every_rounding(ops, dtype):
    check_every_rounding(ops, dtype)


@pytest.mark.parametrize("scale", [1 - 2**-24, 0.1, 1.3])
@pytest.mark.parametrize("row_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
def test_division(ops, dtype, row_dtype, scale):
    """Every 16-bit number is stored as its quotient, rounded to a float first, rounds."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(row_dtype).view(-1, 2, 64)
    slots = torch.arange(numbers.shape[0])
    results = []
    for write, device in ((ops.write_kv, ops.device), (reference.write_kv, "cpu")):
        caches = [to_device(cache, device) for cache in make_cache(32, 16, 2, 64, dtype=dtype)]
        scales = torch.tensor([scale], device=device)
        write(numbers.to(device), -numbers.to(device), *caches, slots.to(device), k_scale=scales, v_scale=scales)
        results.append([cache.cpu().float() for cache in caches])
    for cache, right in zip(*results, strict=True):
        assert torch.equal(cache.isnan(), right.isnan())
        assert torch.equal(cache.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("scale", [0.1, 1e-15, 1e15, 1e-30, 1e30])
@pytest.mark.parametrize("row_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
def test_extreme_numbers(ops, dtype, row_dtype, scale):
    """What overflows saturates, as infinities do; what is too small becomes zero; NaN stays NaN or becomes 0."""
    inf, nan = torch.inf, torch.nan
    row = torch.tensor(
        [inf, -inf, nan, 3e38, -3e38, 1e-38, 1e-44, 0.0, 1e30, -1e30, 1e-30, 12.7, -12.8, 44.0, 1.0, -1.0]
    )
    key = row.to(row_dtype).repeat(2, 1, 4)
    results = []
    for write, device in ((ops.write_kv, ops.device), (reference.write_kv, "cpu")):
        caches = [to_device(cache, device) for cache in make_cache(1, 16, 1, 64, dtype=dtype)]
        scales = torch.tensor([scale], device=device)
        write(
            key.to(device),
            -key.to(device),
            *caches,
            torch.tensor([3, 7], device=device),
            k_scale=scales,
            v_scale=scales,
        )
        results.append([cache.cpu().float() for cache in caches])
    for cache, right in zip(*results, strict=True):
        assert torch.equal(cache.isnan(), right.isnan())
        assert torch.equal(cache.nan_to_num(), right.nan_to_num())


def test_quotients_at_boundaries():
    """What the division of 16-bit rows in csrc/cuda/kv_row.cuh relies on.

    Let a boundary be where the rounding to 8 bits changes, and a middle what lies halfway between it and the next
    float. A number of 11 significant bits over a float is, relatively, within 2^-45 of a middle in one case alone.
    """
    close = []
    for odd in range(1, 256, 2):  # a boundary's significand
        boundary = odd << (24 - odd.bit_length())
        for middle in (2 * boundary + 1, 2 * boundary - 1 if odd > 1 else 4 * boundary - 1):
            for value in range(1 << 10, 1 << 11):
                for shift in (36, 37, 38):
                    scale = ((value << shift) + middle // 2) // middle
                    if 1 << 23 <= scale < 1 << 24:
                        distance = abs((value << shift) - middle * scale)
                        if distance << 45 < middle * scale:
                            close.append((value, middle, scale))
    assert close == [(1 << 10, (1 << 24) + 1, (1 << 24) - 1)]


def check_token_scales(ops, dtype):
    """A row's largest magnitude maps to the largest number; an all-zero row stores zeros and a finite scale."""
    key = torch.zeros(3, 2, 64, device=ops.device)
    key[0, 0, 5], key[0, 1, 6], key[2] = -100.0, 0.25, 3.0
    key_cache, value_cache = make_cache(1, 16, 2, 64, dtype=dtype, device=ops.device)
    k_scale, v_scale = (torch.full((1, 16, 2), 9.0, device=ops.device) for _ in range(2))
    slots = torch.tensor([4, 0, -1], device=ops.device)
    ops.write_kv(key, 2 * key, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale)
    limit = reference.QUANTISED_MAX[dtype]
    assert_close(k_scale[0, 4], [100 / limit, 0.25 / limit], tolerance=1e-6)
    assert_close(v_scale[0, 4], [200 / limit, 0.5 / limit], tolerance=1e-6)
    assert float(key_cache[0, 4, 0, 5].float()) == -limit
    assert k_scale[0, 0].isfinite().all()
    assert key_cache[0, 0].float().count_nonzero() == 0
    assert (k_scale[0, [1, 2, 3, *range(5, 16)]] == 9).all()


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
def test_token_scales(ops, dtype):
    check_token_scales(ops, dtype)
