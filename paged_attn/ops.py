"""The operations, as thin wrappers of ``torch.ops.paged_attn``.

Contents of tensors on a GPU are never read on the host, except for lengths by ``gather_kv`` without ``total_tokens``.
There are no derivatives: a backward pass through a result, and a tensor with a tangent, raise a ``RuntimeError``.

Words and shapes used throughout: ``num_seqs`` sequences with ``num_tokens`` query tokens in all; a pool of
``num_blocks`` blocks of ``block_size`` token slots; ``slot = block * block_size + offset``. Caches are logically
``[num_blocks, block_size, num_kv_heads, head_dim]`` with a last stride of 1 and any other strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_MIN_TORCH = (2, 11)


def _load_library() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _MIN_TORCH:
        raise ImportError(
            f"paged_attn is built for torch {_MIN_TORCH[0]}.{_MIN_TORCH[1]} or newer, found {torch.__version__}"
        )
    if hasattr(torch.ops.paged_attn, "paged_attention"):  # another copy of the package has registered the ops
        return
    library = Path(__file__).parent / "_C.abi3.so"
    if not library.exists():
        raise ImportError(
            f"{library} is missing: build it with `pip install -e .` or `python setup.py build_ext --inplace`"
        )
    torch.ops.load_library(str(library))


_load_library()

_attention = torch.ops.paged_attn.paged_attention.default
_attention_out = torch.ops.paged_attn.paged_attention.out
_write_kv = torch.ops.paged_attn.write_kv.default
_rope_write_kv = torch.ops.paged_attn.rope_write_kv.default
_gather_kv = torch.ops.paged_attn.gather_kv.default
_merge = torch.ops.paged_attn.merge_attn_states.default
_merge_out = torch.ops.paged_attn.merge_attn_states.out
_copy_blocks = torch.ops.paged_attn.copy_blocks.default
_swap_blocks = torch.ops.paged_attn.swap_blocks.default

_FLAG_METADATA_READY = 1
_BACKEND_FLAGS = {"auto": 0, "mma": 4, "sm90": 8}


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window_size: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    max_seqlen_q: int | None = None,
    metadata_ready: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of query tokens over paged keys and values: decode, verification, chunked prefill, or a mixture.

    Query token ``i`` of a sequence with ``q`` query tokens and length ``L`` stands at position ``L - q + i``. Its score
    with key ``j`` is ``s = scale * dot(query, key)``, then ``softcap * tanh(s / softcap)``, then
    ``+ alibi_slope * (j - position)``, then the masks. A row that sees no key is 0 with a log-sum-exp of -inf (with a
    sink: the sink); so are rows past ``cu_seqlens_q[-1]``.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``, float16, bfloat16 or float32; ``head_dim`` a multiple of 8 up to
            256.
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` of the query's dtype, or
            float8_e4m3fn, float8_e5m2 or int8; ``num_heads`` is a multiple of ``num_kv_heads``. Long chunks on an 8-bit
            cache take up to 512 MiB of temporary memory on Hopper.
        block_table: int32 ``[num_seqs, max_blocks]``. Entries that hold no visible key are never read. Others are
            checked on the CPU alone; on CUDA an id of no block makes the rows of its sequence meaningless, those of no
            other, and nothing outside the cache is read.
        seq_lens: int32 ``[num_seqs]``: tokens in the cache, those of this call included.
        cu_seqlens_q: int32 ``[num_seqs + 1]``, prefix sums of the query lengths; None: one query token a sequence.
        scale: of the scores; default ``head_dim ** -0.5``.
        causal: a token sees keys up to its own position.
        window_size: keys that a token sees, itself included; needs ``causal``.
        softcap: 0 for none; at most 10000.
        alibi_slopes: float32 ``[num_heads]``, any values, Press et al., https://arxiv.org/abs/2108.12409. Scores are
            float32: beside a bias of a thousand they keep four decimals.
        sinks: float32 ``[num_heads]``: a term ``exp(sink)`` in every row's denominator, part of the log-sum-exp. -inf:
            none; inf: it takes all the weight.
        k_scale, v_scale: float32, of one element, ``[num_kv_heads]`` or ``[num_blocks, block_size, num_kv_heads]``, any
            strides; the values of a quantised cache are ``stored * scale``. None: 1. Decode on Hopper is fastest where
            the scales of a head's tokens are adjacent in a block.
        out: written and returned in place of a new tensor; shape and dtype of ``query``. Not where an argument requires
            a gradient.
        return_lse: return ``(output, lse)``, ``lse`` float32 ``[num_tokens, num_heads]``, natural logarithm.
        batch_invariant: a row's bits depend on its own sequence alone, not on the batch, the table's width or padding.
        max_seqlen_q: a bound on the query tokens of a sequence, to choose a kernel by.
        metadata_ready: states that ``block_table``, ``seq_lens`` and ``cu_seqlens_q`` were written before the kernel
            that precedes this call on its stream began, so that they may be read while that kernel still runs. Wrong
            results if it wrote them itself.
        backend: "auto", or "mma" or "sm90" to force a CUDA implementation.

    Raises:
        ValueError: arguments that do not fit together, or that the forced backend cannot serve.
        RuntimeError: in a backward pass through the result; there is none.
    """
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size: expected None or at least 1, got {window_size}")
    if backend not in _BACKEND_FLAGS:
        raise ValueError(f"backend: expected one of {', '.join(_BACKEND_FLAGS)}, got {backend!r}")
    flags = _BACKEND_FLAGS[backend] | (_FLAG_METADATA_READY if metadata_ready else 0)
    tensors = (query, key_cache, value_cache, block_table, seq_lens)
    options: dict[str, Any] = {}  # without the schema's defaults: every argument costs the host its time
    if cu_seqlens_q is not None or max_seqlen_q is not None:
        options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    if scale is not None:
        options["scale"] = scale
    if not causal or window_size is not None or softcap != 0 or batch_invariant:
        options |= {"causal": causal, "window_size": window_size, "softcap": softcap}
        options["batch_invariant"] = batch_invariant
    if alibi_slopes is not None or sinks is not None:
        options |= {"alibi_slopes": alibi_slopes, "sinks": sinks}
    if k_scale is not None or v_scale is not None:
        options |= {"k_scale": k_scale, "v_scale": v_scale}
    if flags:
        options["flags"] = flags
    if forward_ad._current_level >= 0:
        _check_no_tangent((*tensors, *options.values(), out))
    if out is None:
        out, lse = _attention(*tensors, return_lse=return_lse, **options)
        if out.requires_grad:
            out, lse = _without_backward((out, lse), (*tensors, *options.values()))
    else:
        if torch.is_grad_enabled():
            _check_no_gradient((*tensors, *options.values()))
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
        if return_lse:
            options["lse"] = lse
        _attention_out(*tensors, out=out, **options)
    return (out, lse) if return_lse else out


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Scatter new keys and values into their cache slots, in place.

    A quantised cache stores ``value / scale``, rounded to nearest even and saturated, infinities too; NaN stays NaN
    (int8: 0, and int8 saturates at -127 and 127).

    Args:
        key, value: ``[num_tokens, num_kv_heads, head_dim]``, any strides with a contiguous last dimension.
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``; written.
        slot_mapping: int64 or int32 ``[num_slots]`` with ``num_slots <= num_tokens``; negative to skip a row. Rows of
            ``key`` past ``num_slots`` are ignored.
        k_scale, v_scale: for a quantised cache, float32 of one element or ``[num_kv_heads]``, which are read; or
            ``[num_blocks, block_size, num_kv_heads]``, which are written: the row's largest finite magnitude over the
            largest finite value of the cache's dtype, 1 where it has none above zero.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; on the CPU also a slot past the end.
    """
    if forward_ad._current_level >= 0:
        _check_no_tangent((key, value, key_cache, value_cache, k_scale, v_scale))
    _write_kv(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


def rope_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Rotate queries and keys by their positions, in place, and write keys and values as :func:`write_kv` does.

    The pair ``(x, y)`` number ``i`` of a head becomes ``(x cos - y sin, y cos + x sin)`` with entries ``i`` of the
    position's row (Su et al., https://arxiv.org/abs/2104.09864), computed in float32.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``, any strides with a contiguous last dimension; rotated.
        key, value: ``[num_tokens, num_kv_heads, head_dim]`` likewise; ``key`` is rotated.
        positions: int64 or int32 ``[num_tokens]``. One outside ``cos_sin`` turns its token's rotated part into NaN.
        cos_sin: ``[num_positions, rotary_dim]``, float32 or the dtype of ``query``: the cosines of ``rotary_dim / 2``
            angles, then their sines. ``rotary_dim`` is even and at most ``head_dim``; the elements past it stay.
        key_cache, value_cache, slot_mapping, k_scale, v_scale: as in :func:`write_kv`. Rows past the slots are rotated,
            not written.
        interleaved: pairs are elements ``2i`` and ``2i + 1`` (GPT-J); otherwise ``i`` and ``i + rotary_dim / 2``
            (GPT-NeoX, Llama in transformers).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; on the CPU also a slot past the end.
    """
    if forward_ad._current_level >= 0:
        _check_no_tangent((query, key, value, cos_sin, key_cache, value_cache, k_scale, v_scale))
    _rope_write_kv(
        query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping, interleaved, k_scale, v_scale
    )


def copy_blocks(caches: Sequence[Tensor] | Tensor, block_mapping: Tensor) -> None:
    """Copy whole blocks within each cache, in place, as if every source were read before any destination is written.

    Args:
        caches: tensors ``[num_blocks, ...]`` on one device, or one stacked ``[num_layers, num_blocks, block_size,
            num_kv_heads, head_dim]``. One that stands in the list twice is copied once.
        block_mapping: int64 ``[num_pairs, 2]``, source and destination, on the host or on the caches' device. On the
            device, pairs with an id out of range are skipped.

    Raises:
        ValueError: a destination named twice or an id out of range (mapping on the host), or caches that do not fit.
    """
    caches = _as_list("caches", caches)
    if forward_ad._current_level >= 0:
        _check_no_tangent(caches)
    _copy_blocks(caches, block_mapping)


def swap_blocks(src: Sequence[Tensor] | Tensor, dst: Sequence[Tensor] | Tensor, block_mapping: Tensor) -> None:
    """Copy whole blocks from ``src`` to ``dst``, between a device and the host or between devices, in stream order.

    Args:
        src, dst: caches as in :func:`copy_blocks`, pairwise of one dtype and block shape. They may
            overlap, as one pool or otherwise: every source is read before any destination is written.
            Host tensors may be pinned, which is faster; pinned ones must live until the device has done the copy.
        block_mapping: int64 ``[num_pairs, 2]`` on the host: block of ``src``, block of ``dst``. It may be changed as
            soon as the call returns.

    Raises:
        ValueError: a destination named twice, an id out of range, or caches that do not fit; nothing has moved then.
    """
    src, dst = _as_list("src", src), _as_list("dst", dst)
    if forward_ad._current_level >= 0:
        _check_no_tangent((*src, *dst))
    pinned = all(t.is_pinned() for t in (*src, *dst) if t.device.type == "cpu") if torch.cuda.is_available() else False
    _swap_blocks(src, dst, block_mapping, pinned)


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    total_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Contiguous keys and values of tokens ``seq_starts[i] .. seq_starts[i] + seq_lens[i] - 1`` of each sequence.

    Args:
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        block_table: int32 ``[num_seqs, max_blocks]``.
        seq_lens: int32 ``[num_seqs]``: tokens to gather.
        seq_starts: int32 ``[num_seqs]``, default 0.
        k_scale, v_scale: scales of a quantised cache, as in :func:`paged_attention`.
        out_dtype: default the cache's dtype, for a quantised cache bfloat16.
        total_tokens: the sum of ``seq_lens``, or more, where the caller knows it: the call then does not synchronise.
            Rows past the real sum are 0, and so are tokens past the row of the table.

    Returns:
        Two contiguous ``[total_tokens, num_kv_heads, head_dim]``.

    Raises:
        ValueError: arguments that do not fit together; without ``total_tokens``, and on the CPU, tokens past the row of
            the table; on the CPU also a ``total_tokens`` below the sum.
    """
    tensors = (key_cache, value_cache, block_table, seq_lens, seq_starts, k_scale, v_scale)
    if forward_ad._current_level >= 0:
        _check_no_tangent(tensors)
    key, value = _gather_kv(*tensors, out_dtype, total_tokens)
    if key.requires_grad or value.requires_grad:
        key, value = _without_backward((key, value), tensors)
    return key, value


def merge_attn_states(
    output_a: Tensor,
    lse_a: Tensor,
    output_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    out_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys: the result over their union, and its log-sum-exp.

    ``(0, -inf)`` is the identity, whatever the values on the empty side. A log-sum-exp of NaN makes its row NaN.

    Args:
        output_a, output_b: ``[num_tokens, num_heads, head_dim]``.
        lse_a, lse_b: float32 ``[num_tokens, num_heads]``, natural logarithm.
        out, out_lse: written and returned in place of new tensors; they may be operands.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    operands = (output_a, lse_a, output_b, lse_b)
    if forward_ad._current_level >= 0:
        _check_no_tangent((*operands, out, out_lse))
    if out is None and out_lse is None:
        out, out_lse = _merge(*operands)
        if out.requires_grad or out_lse.requires_grad:
            out, out_lse = _without_backward((out, out_lse), operands)
        return out, out_lse
    if torch.is_grad_enabled():
        _check_no_gradient(operands)
    out = torch.empty_like(output_a) if out is None else out
    out_lse = torch.empty_like(lse_a) if out_lse is None else out_lse
    _merge_out(*operands, out, out_lse)
    return out, out_lse


@torch.library.custom_op(
    "paged_attn::_refuse_backward", mutates_args=(), schema="(Tensor gradient, SymInt[] size) -> Tensor"
)
def _refuse_backward(gradient: Tensor, size: Sequence[int]) -> Tensor:
    raise RuntimeError("paged_attn has no backward pass: call it under torch.no_grad() or torch.inference_mode()")


@_refuse_backward.register_fake
def _(gradient: Tensor, size: Sequence[int]) -> Tensor:
    return gradient.new_empty(size)


class _WithoutBackward(torch.autograd.Function):
    """``result`` unchanged, as a function of ``inputs`` whose gradients cannot be had.

    An op takes the place of the gradients: a compiled graph, which traces the backward pass ahead, raises when it runs.
    """

    @staticmethod
    def forward(result: Tensor, *inputs: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.sizes = [tensor.shape for tensor in inputs[1:]]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_refuse_backward(gradient, size) for size in ctx.sizes)


def _without_backward(results: Sequence[Tensor], arguments: Sequence[object]) -> list[Tensor]:
    """Let a backward pass through ``results`` fail, where torch would only warn and leave gradients out."""
    inputs = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]
    return [_WithoutBackward.apply(result.detach(), *inputs) for result in results]


def _check_no_tangent(arguments: Sequence[object]) -> None:
    if any(isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in arguments):
        raise RuntimeError("paged_attn has no forward-mode derivative: call it on tensors without tangents")


def _check_no_gradient(arguments: Sequence[object]) -> None:
    if any(isinstance(value, Tensor) and value.requires_grad for value in arguments):
        raise ValueError("out: expected None where an argument requires a gradient: there is no backward pass")


def _as_list(name: str, caches: Sequence[Tensor] | Tensor) -> list[Tensor]:
    if not isinstance(caches, Tensor):
        return list(caches)
    if caches.dim() != 5:
        shape = "[num_layers, num_blocks, block_size, num_kv_heads, head_dim]"
        raise ValueError(f"{name}: expected a list of tensors, or one {shape}, got {list(caches.shape)}")
    return list(caches.unbind(0))


# On tensors without data no kernel runs, nor its checks: devices that do not fit are refused here.
def _check_devices(arguments: dict[str, Any]) -> None:
    tensors = [
        (name, tensor)
        for name, value in arguments.items()
        for tensor in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, Tensor)
    ]
    for name, tensor in tensors:
        like_name, like = tensors[0]
        device = tensor.device
        on_host = name == "block_mapping" and device.type == "cpu"
        other_side = name == "dst" and "meta" not in (device.type, like.device.type)
        if device != like.device and not on_host and not other_side:
            raise ValueError(f"{name}: expected device {like.device} like {like_name}, got {device}")


def _fake(name: str) -> Callable[[Callable], Callable]:
    """Register a function of an op's arguments by name; those at their defaults may be missing."""
    packet, overload = f"{name}.default".split(".")[:2]
    parameters = [
        argument.name for argument in getattr(getattr(torch.ops.paged_attn, packet), overload)._schema.arguments
    ]

    def register(shapes: Callable) -> Callable:
        def fake(*args: Any, **options: Any) -> Any:
            arguments = dict(zip(parameters, args)) | options
            _check_devices(arguments)
            return shapes(**arguments)

        torch.library.register_fake(f"paged_attn::{name}", fake, allow_override=True)
        return shapes

    return register


@_fake("paged_attention")
def _(query, return_lse=False, **_):
    lse_tokens = query.shape[0] if return_lse else 0
    return query.new_empty(query.shape), query.new_empty((lse_tokens, query.shape[1]), dtype=torch.float32)


@_fake("gather_kv")
def _(key_cache, value_cache, out_dtype=None, total_tokens=None, **_):
    tokens = torch.library.get_ctx().new_dynamic_size() if total_tokens is None else total_tokens
    if out_dtype is None:
        out_dtype = torch.bfloat16 if key_cache.dtype.itemsize == 1 else key_cache.dtype
    shape = (tokens, key_cache.shape[2], key_cache.shape[3])
    return key_cache.new_empty(shape, dtype=out_dtype), value_cache.new_empty(shape, dtype=out_dtype)


@_fake("merge_attn_states")
def _(output_a, lse_a, **_):
    return output_a.new_empty(output_a.shape), lse_a.new_empty(lse_a.shape)


@_fake("paged_attention.out")
@_fake("write_kv")
@_fake("rope_write_kv")
@_fake("merge_attn_states.out")
@_fake("copy_blocks")
@_fake("swap_blocks")
def _(**_):
    return None
