// rope_write_kv: rotary embedding of query and key in place, and the new keys and values into their slots, in one
// launch.
#include <algorithm>

#include "kv_row.cuh"
#include "launch.cuh"
#include "launchers.h"

namespace paged_attn {
namespace {

constexpr int kThreads = 128;

struct Alignment {
  bool query, key, value, key_cache, value_cache, cos_sin;
};

// A lane holds sixteen elements of a row in two pieces: eight pairs that rotate together, or elements past the rotary
// dimension.
struct LaneShare {
  LanePieces part;
  bool rotates;
  int pair;  // the first of its eight pairs
};

// `kWhole`: pieces are whole or empty.
template <bool kWhole>
__device__ __forceinline__ LaneShare share_of_lane(const RopeWriteParams& p, int lane) {
  const int half = p.rotary_dim / 2, rotary_lanes = (half + 7) / 8;
  LaneShare share;
  share.rotates = lane < rotary_lanes;
  share.pair = 8 * lane;
  int end[2];
  if (share.rotates && !p.interleaved) {
    share.part.first[0] = 8 * lane, share.part.first[1] = half + 8 * lane;
    end[0] = half, end[1] = p.rotary_dim;
  } else {
    share.part.first[0] = share.rotates ? 16 * lane : p.rotary_dim + 16 * (lane - rotary_lanes);
    share.part.first[1] = share.part.first[0] + 8;
    end[0] = end[1] = share.rotates ? p.rotary_dim : p.write.head_dim;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int left = end[i] - share.part.first[i];
    share.part.count[i] = kWhole ? (left > 0 ? 8 : 0) : min(max(left, 0), 8);
  }
  return share;
}

// The cosines and sines of a lane's pairs; NaN where the position lies outside the table.
struct Rotation {
  float cosine[8], sine[8];
};

template <class T>
__device__ __forceinline__ Rotation load_rotation(const RopeWriteParams& p, int token, int pair, bool aligned) {
  const int half = p.rotary_dim / 2, count = aligned ? 8 : min(half - pair, 8);
  const int64_t at = token * p.positions_stride;
  const int64_t position = p.positions_are_int64 ? static_cast<const int64_t*>(p.positions)[at]
                                                 : static_cast<const int32_t*>(p.positions)[at];
  Rotation r;
  if (position < 0 || position >= p.num_positions) {
#pragma unroll
    for (int i = 0; i < 8; ++i) r.cosine[i] = r.sine[i] = NAN;
    return r;
  }
  const int64_t first = position * p.cos_sin_stride + pair;
  if (p.cos_sin_is_float32) {
    const float* table = static_cast<const float*>(p.cos_sin) + first;
    to_float(load_piece<4>(table, aligned, count), float{}, r.cosine);
    to_float(load_piece<4>(table + half, aligned, count), float{}, r.sine);
  } else {
    const T* table = static_cast<const T*>(p.cos_sin) + first;
    to_float(load_piece<sizeof(T)>(table, aligned, count), T{}, r.cosine);
    to_float(load_piece<sizeof(T)>(table + half, aligned, count), T{}, r.sine);
  }
  return r;
}

__device__ __forceinline__ void rotate_pair(float& x, float& y, float cosine, float sine) {
  const float rotated = x * cosine - y * sine;
  y = y * cosine + x * sine;
  x = rotated;
}

template <class T>
__device__ __forceinline__ void rotate(const Rotation& r, bool interleaved, Piece<sizeof(T)> (&pieces)[2]) {
  float a[8], b[8];
  to_float(pieces[0], T{}, a);
  to_float(pieces[1], T{}, b);
  if (interleaved) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rotate_pair(a[2 * i], a[2 * i + 1], r.cosine[i], r.sine[i]);
      rotate_pair(b[2 * i], b[2 * i + 1], r.cosine[4 + i], r.sine[4 + i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) rotate_pair(a[i], b[i], r.cosine[i], r.sine[i]);
  }
  pieces[0] = from_float(a, T{});
  pieces[1] = from_float(b, T{});
}

// A row of a token: query heads come before key heads before value heads.
template <class T>
struct TokenRow {
  bool is_query, is_value;
  int head;
  T* data;

  __device__ __forceinline__ TokenRow(const RopeWriteParams& p, int token, int row) {
    const KvWriteParams& w = p.write;
    is_query = row < p.num_heads, is_value = row >= p.num_heads + w.num_kv_heads;
    head = row - (is_query ? 0 : p.num_heads) - (is_value ? w.num_kv_heads : 0);
    const TokenStrides& strides = is_query ? p.query_strides : is_value ? w.value_strides : w.key_strides;
    void* rows = is_query ? p.query : is_value ? const_cast<void*>(w.value) : p.key;
    data = static_cast<T*>(rows) + token * strides.token + head * strides.head;
  }
};

// A group of lanes (threadIdx.x) does the rows first, first + parts, ... of one token: cosines, sines and the slot
// are found once for them all.
template <class T, class Cache, bool kAligned>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 6
                                            : kAligned     ? 8
                                                           : 7)
    rope_write_kernel(const __grid_constant__ RopeWriteParams p, const Alignment aligned, const Divisor parts,
                      const Divisor block_size) {
  ptx::pdl_launch_dependents();
  const KvWriteParams& w = p.write;
  const int lanes = blockDim.x, lane = threadIdx.x, index = blockIdx.x * blockDim.y + threadIdx.y;
  const int token = parts.quotient(index), num_rows = p.num_heads + 2 * w.num_kv_heads;
  const bool in_range = token < p.num_tokens;
  const LaneShare share = share_of_lane<kAligned>(p, lane);
  const LanePieces& part = share.part;
  int row = index - token * parts.value;
  if (in_range) {
    const T* data = TokenRow<T>(p, token, row).data;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (part.count[i] > 0) prefetch_sector(data + part.first[i]);
  }
  ptx::pdl_wait();

  Rotation rotation = {};
  if (in_range && share.rotates) rotation = load_rotation<T>(p, token, share.pair, kAligned || aligned.cos_sin);
  const SlotPosition at = in_range && token < w.num_tokens ? locate_slot(w, block_size, token) : SlotPosition{-1, 0};
  // One body for all rows: kernels this short are bound by the code that they fetch.  As many turns for every group: a
  // warp quantises together.
#pragma unroll 1
  for (int turns = parts.quotient(num_rows + parts.value - 1); turns > 0; --turns, row += parts.value) {
    const auto [is_query, is_value, head, data] = TokenRow<T>(p, token, row);
    const bool row_aligned = kAligned || (is_query ? aligned.query : is_value ? aligned.value : aligned.key);
    const bool exists = in_range && row < num_rows, rotates = exists && share.rotates && !is_value;
    const SlotPosition to = exists && !is_query ? at : SlotPosition{-1, 0};

    Piece<sizeof(T)> pieces[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (part.count[i] > 0 && (rotates || to.block >= 0))
        pieces[i] = load_piece<sizeof(T)>(data + part.first[i], row_aligned, part.count[i]);
    const ScaleView& scales = is_value ? w.v_scale : w.k_scale;
    float scale = 1.0f;
    if constexpr (sizeof(Cache) == 1) scale = to.block >= 0 ? fixed_scale(scales, head) : 1.0f;

    if (rotates) {
      rotate<T>(rotation, p.interleaved, pieces);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (part.count[i] > 0) store_piece(data + part.first[i], pieces[i], row_aligned, part.count[i]);
    }
    void* cache = is_value ? w.value_cache : w.key_cache;
    const BlockStrides& strides = is_value ? w.value_cache_strides : w.key_cache_strides;
    const bool cache_aligned = kAligned || (is_value ? aligned.value_cache : aligned.key_cache);
    if constexpr (sizeof(Cache) == 1) {
      if (!__any_sync(0xffffffffu, to.block >= 0)) continue;
      if (w.k_scale.per_token() || w.v_scale.per_token()) {  // the same for the whole warp, which may hold both
        float own;
        scales_of_rows<T, Cache, 1>(&pieces, lanes, &own);
        if (scales.per_token()) scale = own;
        if (scales.per_token() && to.block >= 0 && lane == 0) scales.data[row_offset(scales.strides, to, head)] = own;
      }
      if (to.block < 0) continue;
      Piece<1> stored[2];
      quantize_row<T, Cache>(pieces, scale, stored);
      uint8_t* out = static_cast<uint8_t*>(cache) + row_offset(strides, to, head);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (part.count[i] > 0) store_piece(out + part.first[i], stored[i], cache_aligned, part.count[i]);
    } else if (to.block >= 0) {
      T* out = static_cast<T*>(cache) + row_offset(strides, to, head);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (part.count[i] > 0) store_piece(out + part.first[i], pieces[i], cache_aligned, part.count[i]);
    }
  }
}

// How many rows of a token a group of lanes takes one after the other, where one row each would be `threads` threads:
// as many as leave work for every multiprocessor, up to where more gain nothing.
int rows_of_group(int64_t threads) {
  constexpr int kThreadsAnSm = 1024, kMostRows = 12;
  return static_cast<int>(
      std::clamp<int64_t>(threads / (kThreadsAnSm * int64_t{current_device().sm_count}), 1, kMostRows));
}

}  // namespace

void launch_rope_write_kv(const RopeWriteParams& p, cudaStream_t stream) {
  const KvWriteParams& w = p.write;
  if (p.num_tokens == 0) return;
  const DType table_dtype = p.cos_sin_is_float32 ? DType::kFloat32 : w.dtype;
  // Halves of a rotary dimension that is no multiple of 16 begin between pieces.
  const bool whole = p.rotary_dim % 16 == 0;
  const Alignment aligned = {whole && rows_aligned(p.query, p.query_strides, w.dtype),
                             whole && rows_aligned(p.key, w.key_strides, w.dtype),
                             whole && rows_aligned(w.value, w.value_strides, w.dtype),
                             whole && rows_aligned(w.key_cache, w.key_cache_strides, w.cache_dtype),
                             whole && rows_aligned(w.value_cache, w.value_cache_strides, w.cache_dtype),
                             whole && rows_aligned(p.cos_sin, TokenStrides{p.cos_sin_stride, 0}, table_dtype)};
  const int rotary_lanes = (p.rotary_dim / 2 + 7) / 8;
  const int lanes = lanes_for(rotary_lanes * 16 + w.head_dim - p.rotary_dim, 16);
  const dim3 block(lanes, kThreads / lanes);
  const int rows = p.num_heads + 2 * w.num_kv_heads;
  const int parts = ceil_div(rows, rows_of_group(int64_t{p.num_tokens} * rows * lanes));
  const bool all =
      aligned.query && aligned.key && aligned.value && aligned.key_cache && aligned.value_cache && aligned.cos_sin;
  const auto launch = [&](auto kernel) {
    launch_pdl(kernel, dim3(ceil_div(int64_t{p.num_tokens} * parts, block.y)), block, stream, p, aligned,
               Divisor(parts), Divisor(w.block_size));
  };
  dispatch_float(w.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto choose = [&](auto cache_tag) {
      using Cache = decltype(cache_tag);
      all ? launch(rope_write_kernel<T, Cache, true>) : launch(rope_write_kernel<T, Cache, false>);
    };
    if (is_quantized(w.cache_dtype))
      dispatch_quantized(w.cache_dtype, choose);
    else
      choose(tag);
  });
}

}  // namespace paged_attn
