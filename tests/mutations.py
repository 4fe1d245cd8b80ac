"""Deliberately wrong implementations, each of which the suite's checks must catch: ``python -m tests.mutations``."""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from tabulate import tabulate

from paged_attn import reference
from paged_attn.testing import LAYOUTS, SCALE_KINDS

from . import test_attention as attention
from . import test_attention_inputs as inputs
from . import test_cases_cache as cache
from . import test_cases_decode as decode
from . import test_cases_masks as masks
from . import test_copy as copy
from . import test_gather as gather
from . import test_merge as merge
from . import test_swap as swap
from . import test_write as write
from .conftest import Ops

BS = 16  # the block size of most checks
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Mutation:
    """Replace one function of the reference by ``wrong(original)``."""

    name: str
    function: str
    wrong: Callable[[Callable], Callable]


def masked(scores, keep):
    return scores.masked_fill(~keep, -math.inf)


def without_middle(softmax):
    def wrong(scores, sinks):
        length = scores.shape[1]
        return softmax(masked(scores, torch.arange(length) != length // 2) if length > 2 else scores, sinks)

    return wrong


def swapped_blocks(tokens):
    """The first two blocks change places."""
    if len(tokens) < 2 * BS:
        return tokens
    return torch.cat([tokens[BS : 2 * BS], tokens[:BS], tokens[2 * BS :]])


def without_last_block(visible):
    def wrong(position, length, causal, window_size):
        first, last = visible(position, length, causal, window_size)
        return first, (last - 1) // BS * BS if last > BS else last

    return wrong


def wrong_scores(order: Callable) -> Callable:
    """``order(scores, scale, cap)`` replaces scale and cap; ALiBi stays right."""

    def mutate(modify):
        def wrong(products, scale, softcap, slopes, distance):
            return order(products, scale, softcap) + modify(0 * products, scale, 0.0, slopes, distance)

        return wrong

    return mutate


def cap_first(products, scale, cap):
    return scale * (cap * torch.tanh(products / cap) if cap else products)


def cap_in_base_two(products, scale, cap):
    return cap * torch.tanh(scale * products / math.log(2) / cap) * math.log(2) if cap else scale * products


def wrong_distance(change: Callable) -> Callable:
    return lambda f: lambda products, scale, cap, slopes, distance: f(products, scale, cap, slopes, change(distance))


def wrong_sinks(change: Callable) -> Callable:
    return lambda f: lambda scores, sinks: f(scores, None if sinks is None else change(sinks))


def lse_without_sink(softmax):
    return lambda scores, sinks: (softmax(scores, sinks)[0], torch.logsumexp(scores, -1))


def lse_changed(change: Callable) -> Callable:
    def mutate(softmax):
        def wrong(scores, sinks):
            weights, lse = softmax(scores, sinks)
            return weights, change(lse)

        return wrong

    return mutate


def contiguous_strides(read):
    def wrong(cache, *rest):
        shape = cache.shape
        strides = [math.prod(shape[i + 1 :]) for i in range(4)]
        return read(cache.as_strided(shape, strides), *rest)

    return wrong


def unit_stride(index: int) -> Callable:
    """Positional argument ``index`` of paged_attention is read as if it were contiguous."""

    def mutate(op):
        def wrong(*tensors, **options):
            tensors = list(tensors)
            shape = tensors[index].shape
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            tensors[index] = tensors[index].as_strided(shape, strides)
            return op(*tensors, **options)

        return wrong

    return mutate


def poisoned_sum(op):
    """Zero times each unused slot joins the sum."""

    def wrong(query, key_cache, value_cache, *rest, return_lse=False, **options):
        output, lse = op(query, key_cache, value_cache, *rest, return_lse=True, **options)
        output += (0 * value_cache.float().sum()).to(output.dtype)
        return (output, lse) if return_lse else output

    return wrong


def empty_rows(change: Callable) -> Callable:
    """``change(output)`` where the LSE says that nothing was seen."""

    def mutate(op):
        def wrong(*tensors, return_lse=False, **options):
            output, lse = op(*tensors, return_lse=True, **options)
            empty = lse == -math.inf
            output[empty] = change(output)[empty]
            return (output, lse) if return_lse else output

        return wrong

    return mutate


def without(option: str) -> Callable:
    return lambda op: lambda *tensors, **options: op(*tensors, **(options | {option: None}))


def swapped_scales(op):
    def wrong(*tensors, k_scale=None, v_scale=None, **options):
        return op(*tensors, k_scale=v_scale, v_scale=k_scale, **options)

    return wrong


def first_scale(scale_of):
    return lambda scale, *_: scale.flatten()[:1].view(1, 1)


def heads_interleaved(products):
    """Query head h reads KV head h % Hkv."""

    def wrong(query, keys):
        num_heads, num_kv_heads = query.shape[0], keys.shape[1]
        order = torch.arange(num_heads).view(-1, num_kv_heads).T.flatten()
        result = torch.empty(num_heads, len(keys), dtype=keys.dtype)
        result[order] = products(query[order], keys)
        return result

    return wrong


ATTENTION = [
    Mutation("ignore q", "_products", lambda f: lambda q, k: f(torch.ones_like(q), k)),
    Mutation("drop the last block", "_visible_keys", without_last_block),
    Mutation("drop a middle token", "_softmax", without_middle),
    Mutation("swap two V blocks", "_weighted_sum", lambda f: lambda w, v: f(w, swapped_blocks(v))),
    Mutation("swap two K blocks", "_products", lambda f: lambda q, k: f(q, swapped_blocks(k))),
    Mutation("scale x 1.02", "_products", lambda f: lambda q, k: 1.02 * f(q, k)),
    Mutation("scale option ignored", "paged_attention", without("scale")),
    Mutation("scale without its sign", "_modify_scores", lambda f: lambda s, a, *rest: f(s, abs(a), *rest)),
    Mutation("window one too wide", "_visible_keys", lambda f: lambda p, n, c, w: f(p, n, c, w and w + 1)),
    Mutation("window one too narrow", "_visible_keys", lambda f: lambda p, n, c, w: f(p, n, c, w and max(w - 1, 1))),
    Mutation("window ignored", "paged_attention", without("window_size")),
    Mutation("causal mask at the top left", "_query_position", lambda f: lambda i, q, n: i),
    Mutation("causal mask off by one", "_visible_keys", lambda f: lambda p, n, c, w: f(p + 1, n, c, w)),
    Mutation("every row as the last", "_query_position", lambda f: lambda i, q, n: n - 1),
    Mutation("causal mask ignored", "_visible_keys", lambda f: lambda p, n, c, w: f(p, n, c and w is not None, w)),
    Mutation("causal=False ignored", "_visible_keys", lambda f: lambda p, n, c, w: f(p, n, True, w)),
    Mutation("sink counted twice", "_softmax", wrong_sinks(lambda sinks: sinks + math.log(2))),
    Mutation("sink counted once a block", "_softmax", wrong_sinks(lambda sinks: sinks + math.log(3))),
    Mutation("sinks ignored", "paged_attention", without("sinks")),
    Mutation("sink missing in the LSE", "_softmax", lse_without_sink),
    Mutation("sinks in reverse order", "_softmax", wrong_sinks(lambda sinks: sinks.flip(0))),
    Mutation("LSE in base 2", "_softmax", lse_changed(lambda lse: lse / math.log(2))),
    Mutation("LSE in half precision", "_softmax", lse_changed(lambda lse: lse.bfloat16().double())),
    Mutation("ALiBi off by one", "_modify_scores", wrong_distance(lambda distance: distance - 1)),
    Mutation("ALiBi from the first key", "_modify_scores", wrong_distance(lambda distance: distance - distance[0])),
    Mutation("ALiBi by |distance|", "_modify_scores", wrong_distance(lambda distance: -distance.abs())),
    Mutation("ALiBi with the wrong sign", "_modify_scores", wrong_distance(lambda distance: -distance)),
    Mutation("ALiBi ignored", "paged_attention", without("alibi_slopes")),
    Mutation(
        "ALiBi before the soft cap",
        "_modify_scores",
        lambda f: lambda s, a, c, m, d: f(f(s, a, 0.0, m, d), 1, c, None, d),
    ),
    Mutation("soft cap before scale", "_modify_scores", wrong_scores(cap_first)),
    Mutation("soft cap in base 2", "_modify_scores", wrong_scores(cap_in_base_two)),
    Mutation("soft cap ignored", "_modify_scores", wrong_scores(lambda products, scale, cap: scale * products)),
    Mutation("cache strides rebuilt", "_read_tokens", contiguous_strides),
    Mutation("query strides rebuilt", "paged_attention", unit_stride(0)),
    Mutation("table row stride rebuilt", "paged_attention", unit_stride(3)),
    Mutation("stride of seq_lens rebuilt", "paged_attention", unit_stride(4)),
    Mutation("block id cut to 16 bits", "_locate", lambda f: lambda *a: (f(*a)[0] & 0xFFFF, f(*a)[1])),
    Mutation("unused slots times zero", "paged_attention", poisoned_sum),
    Mutation("empty rows divide 0 by 0", "paged_attention", empty_rows(lambda output: output * math.nan)),
    Mutation("query head reads KV head h % Hkv", "_products", heads_interleaved),
    Mutation("k_scale and v_scale swapped", "paged_attention", swapped_scales),
    Mutation("v_scale ignored", "paged_attention", without("v_scale")),
    Mutation("one scale for all heads", "_scale_of", first_scale),
    Mutation(
        "newest token not seen",
        "_visible_keys",
        lambda f: lambda p, n, c, w: f(p, n - 1, c, w) if n > 1 else f(p, n, c, w),
    ),
]


def negative_as_index(op):
    def wrong(key, value, key_cache, value_cache, slots, **scales):
        return op(key, value, key_cache, value_cache, slots % (key_cache.shape[0] * key_cache.shape[1]), **scales)

    return wrong


def contiguous_rows(op):
    def wrong(key, value, *rest, **scales):
        strides = [math.prod(key.shape[i + 1 :]) for i in range(3)]
        return op(key.as_strided(key.shape, strides), value.as_strided(value.shape, strides), *rest, **scales)

    return wrong


def short_row(write_row):
    """The last eight elements of a row are not written."""
    return lambda row, cache, *rest: write_row(row[:, :-8], cache[..., :-8], *rest)


def wide_row(write_row):
    """The next slot is written as well."""

    def wrong(row, cache, block, offset, scale):
        write_row(row, cache, block, min(offset + 1, cache.shape[1] - 1), scale)
        write_row(row, cache, block, offset, scale)

    return wrong


def truncated(quantise):
    return lambda values, dtype: quantise(values * (1 - 2**-5), dtype)


WRITE = [
    Mutation("slot -1 as a Python index", "write_kv", negative_as_index),
    Mutation("slots one too far", "write_kv", lambda f: lambda k, v, kc, vc, s, **o: f(k, v, kc, vc, s + 1, **o)),
    Mutation("row strides rebuilt", "write_kv", contiguous_rows),
    Mutation("value written as key", "write_kv", lambda f: lambda k, v, *rest, **o: f(v, k, *rest, **o)),
    Mutation("tail of the row missing", "_write_row", short_row),
    Mutation("neighbour overwritten", "_write_row", wide_row),
    Mutation("scale multiplied", "_scale_of", lambda f: lambda *a: 1 / f(*a)),
    Mutation("one scale for all heads", "_scale_of", first_scale),
    Mutation("no saturation", "_quantise", lambda f: lambda v, t: v.round().to(t) if t == torch.int8 else v.to(t)),
    Mutation("NaN becomes the largest", "_quantise", lambda f: lambda v, t: f(v.nan_to_num(nan=1e9), t)),
    Mutation("rounded towards zero", "_quantise", truncated),
    Mutation("row scale without abs", "_row_scale", lambda f: lambda row, t: f(row.clamp(min=0), t)),
    Mutation("row scale over all heads", "_row_scale", lambda f: lambda row, t: f(row, t).amax().expand(row.shape[0])),
]


def one_after_another(op):
    def wrong(caches, destinations, pairs):
        for i in range(len(pairs)):
            op(caches, destinations, pairs[i : i + 1])

    return wrong


def part_of_block(op):
    """Only the first half of each block's slots."""

    def wrong(src, dst, pairs):
        def half(caches):
            return [cache[:, : -(-cache.shape[1] // 2)] for cache in caches]

        op(half(src), half(dst), pairs)

    return wrong


BLOCKS = [
    Mutation("pairs one after another", "swap_blocks", one_after_another),
    Mutation("half of each block", "swap_blocks", part_of_block),
    Mutation("last cache forgotten", "swap_blocks", lambda f: lambda s, d, p: f(s[:-1], d[:-1], p)),
    Mutation("source and destination exchanged", "swap_blocks", lambda f: lambda s, d, p: f(s, d, p.flip(1))),
    Mutation("last pair forgotten", "swap_blocks", lambda f: lambda s, d, p: f(s, d, p[:-1])),
]

GATHER = [
    Mutation("start ignored", "gather_kv", without("seq_starts")),
    Mutation(
        "token off by one",
        "_locate",
        lambda f: lambda row, a, b, bs: f(row, max(a - 1, 0), max(b - 1, 0), bs) if a else f(row, a, b, bs),
    ),
    Mutation("cache strides rebuilt", "_read_tokens", contiguous_strides),
    Mutation("k_scale and v_scale swapped", "gather_kv", swapped_scales),
    Mutation("scale ignored", "_scale_of", lambda f: lambda *a: torch.ones(1, 1)),
    Mutation("one scale for all heads", "_scale_of", first_scale),
    Mutation("out_dtype ignored", "gather_kv", without("out_dtype")),
    Mutation("values gathered from keys", "gather_kv", lambda f: lambda k, v, *rest, **o: f(k, k, *rest, **o)),
]


def merge_in_base_two(op):
    def wrong(output_a, lse_a, output_b, lse_b, **out):
        output, lse = op(output_a, lse_a * math.log(2), output_b, lse_b * math.log(2), **out)
        return output, lse / math.log(2)

    return wrong


def merge_without_guard(op):
    def wrong(output_a, lse_a, output_b, lse_b, **out):
        output, lse = op(output_a, lse_a, output_b, lse_b, **out)
        return output + 0 * (output_a + output_b), lse

    return wrong


MERGE = [
    Mutation("LSE in base 2", "merge_attn_states", merge_in_base_two),
    Mutation("0 x NaN of the empty side", "merge_attn_states", merge_without_guard),
    Mutation("outputs exchanged", "merge_attn_states", lambda f: lambda a, x, b, y, **o: f(b, x, a, y, **o)),
    Mutation(
        "LSE is the larger one",
        "merge_attn_states",
        lambda f: lambda a, x, b, y, **o: (f(a, x, b, y)[0], torch.maximum(x, y)),
    ),
    Mutation(
        "equal weights",
        "merge_attn_states",
        lambda f: lambda a, x, b, y, **o: (f(a, 0 * x, b, 0 * y)[0], f(a, x, b, y)[1]),
    ),
]


def attention_checks() -> Iterator[Callable[[Ops], None]]:
    yield decode.check_tail_poison
    yield decode.check_table_padding
    yield decode.check_zero_rows
    yield partial(decode.check_group, group=3)
    yield decode.check_lse_base
    yield decode.check_window_in_the_last_split
    yield from (partial(decode.check_strided_cache, kind=kind) for kind in ("interleaved", "gap", "packed"))
    yield decode.check_ids_past_16_bits
    yield masks.check_causal_tail
    yield masks.check_queries_before_the_first_key
    yield masks.check_not_causal
    yield masks.check_window_edge
    yield masks.check_blocks_before_the_window
    yield masks.check_softcap
    yield masks.check_alibi
    yield masks.check_sinks
    yield masks.check_sink_of_an_empty_row
    yield masks.check_extreme_sinks
    yield masks.check_padding_rows
    yield cache.check_fp8_attention
    yield inputs.check_fused_query
    for option in attention.OPTIONS:
        yield from (partial(attention.check_options, step=step, option=option) for step in ("decode", "mixed"))
    for kind in SCALE_KINDS:
        yield partial(attention.check_attention, seq_lens=[40, 17], cache_dtype=E4M3, scale_kind=kind)


def write_checks() -> Iterator[Callable[[Ops], None]]:
    yield cache.check_negative_slots
    yield partial(cache.check_strided_write, rows=cache.fused_qkv, caches=cache.packed)
    yield cache.check_fp8_write
    yield cache.check_int8_write
    yield cache.check_scale_divides
    yield from (partial(write.check_write, layout=layout) for layout in LAYOUTS)
    yield from (partial(write.check_quantised_write, dtype=E4M3, scale_kind=kind) for kind in SCALE_KINDS)
    yield partial(write.check_every_rounding, dtype=E4M3)
    yield partial(write.check_token_scales, dtype=E4M3)


def block_checks() -> Iterator[Callable[[Ops], None]]:
    yield cache.check_copy_extent
    yield cache.check_swap_extent
    yield from (partial(cache.check_copy_extent, pairs=pairs) for pairs in copy.MAPPINGS.values())
    yield copy.check_random_permutation
    yield swap.check_many_blocks


def gather_checks() -> Iterator[Callable[[Ops], None]]:
    yield cache.check_gather_with_starts
    yield cache.check_gather_batch
    yield from (partial(gather.check_gather, layout=layout) for layout in LAYOUTS)
    yield from (partial(gather.check_gather, cache_dtype=E4M3, scale_kind=kind) for kind in SCALE_KINDS)
    yield partial(gather.check_gather, cache_dtype=E4M3, out_dtype=torch.float32)


def merge_checks() -> Iterator[Callable[[Ops], None]]:
    yield merge.check_identity
    yield merge.check_three_parts
    yield merge.check_weights
    yield merge.check_large_lse
    yield merge.check_merge


SUITES = {
    "paged_attention": (ATTENTION, attention_checks),
    "write_kv": (WRITE, write_checks),
    "copy_blocks, swap_blocks": (BLOCKS, block_checks),
    "gather_kv": (GATHER, gather_checks),
    "merge_attn_states": (MERGE, merge_checks),
}


def mutant(mutation: Mutation | None = None) -> ModuleType:
    """A second copy of the reference, one function of it replaced."""
    spec = importlib.util.spec_from_file_location("mutant", reference.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if mutation is not None:
        setattr(module, mutation.function, mutation.wrong(getattr(module, mutation.function)))
    return module


def first_failure(module: ModuleType, checks: Iterator[Callable[[Ops], None]]) -> str | None:
    """The first check that ``module`` fails, with its message."""
    for check in checks:
        try:
            check(Ops(module, "cpu"))
        except (AssertionError, IndexError, ValueError) as error:
            function = getattr(check, "func", check)
            return f"{function.__name__}: {str(error).splitlines()[0][:70] if str(error) else type(error).__name__}"
    return None


def main() -> int:
    torch.set_num_threads(1)
    rows, survivors = [], 0
    for op, (mutations, checks) in SUITES.items():
        failure = first_failure(mutant(), checks())
        if failure is not None:
            print(f"the unchanged reference fails: {failure}")
            return 1
        for mutation in mutations:
            failure = first_failure(mutant(mutation), checks())
            survivors += failure is None
            rows.append((op, mutation.name, failure or "SURVIVED"))
    print(tabulate(rows, headers=("operation", "mutation", "caught by")))
    print(f"\n{len(rows) - survivors} of {len(rows)} mutations caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
