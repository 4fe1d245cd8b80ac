// rope_write_kv: rotary embedding of query and key in place, and the new keys and values into their slots, in one
// launch.
#include "kv_row.cuh"
#include "launch.cuh"
#include "launchers.h"

namespace paged_attn {
namespace {

constexpr int kThreads = 256;

struct Alignment {
  bool query, key, value, key_cache, value_cache, cos_sin;
};

template <class T>
__device__ __forceinline__ float element(const void* data, int64_t i) {
  return static_cast<float>(static_cast<const T*>(data)[i]);
}

// What a lane needs to rotate its eight elements of any row of a token: out = in * cosine + partner * sine.
struct Rotation {
  float cosine[8], sine[8];  // 1 and 0 past the rotary dimension; the sine of a pair's first element is negative
};

// Whether the partners of a lane's elements are all of another lane's.
__device__ __forceinline__ bool partners_in_one_lane(const RopeWriteParams& p) {
  return !p.interleaved && p.rotary_dim % 16 == 0;
}

// A position outside the table gives NaN.
template <class T>
__device__ __forceinline__ Rotation load_rotation(const RopeWriteParams& p, int token, int first, bool aligned) {
  const int half = p.rotary_dim / 2;
  const int64_t at = token * p.positions_stride;
  const int64_t position = p.positions_are_int64 ? static_cast<const int64_t*>(p.positions)[at]
                                                 : static_cast<const int32_t*>(p.positions)[at];
  const bool known = position >= 0 && position < p.num_positions;
  const int64_t row = position * p.cos_sin_stride;
  Rotation r;
  if (partners_in_one_lane(p) && first < p.rotary_dim && known) {
    const int64_t i = row + (first < half ? first : first - half);
    if (p.cos_sin_is_float32) {
      to_float(load_piece<4>(static_cast<const float*>(p.cos_sin) + i, aligned), float{}, r.cosine);
      to_float(load_piece<4>(static_cast<const float*>(p.cos_sin) + i + half, aligned), float{}, r.sine);
    } else {
      to_float(load_piece<sizeof(T)>(static_cast<const T*>(p.cos_sin) + i, aligned), T{}, r.cosine);
      to_float(load_piece<sizeof(T)>(static_cast<const T*>(p.cos_sin) + i + half, aligned), T{}, r.sine);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) r.sine[k] = first < half ? -r.sine[k] : r.sine[k];
    return r;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int e = first + k;
    r.cosine[k] = 1.0f;
    r.sine[k] = 0.0f;
    if (e >= p.rotary_dim) continue;
    const bool is_first = p.interleaved ? k % 2 == 0 : e < half;
    const int64_t i = row + (p.interleaved ? e / 2 : is_first ? e : e - half);
    const auto coefficient = [&](int64_t c) {
      return !known ? NAN : p.cos_sin_is_float32 ? element<float>(p.cos_sin, c) : element<T>(p.cos_sin, c);
    };
    r.cosine[k] = coefficient(i);
    r.sine[k] = is_first ? -coefficient(i + half) : coefficient(i + half);
  }
  return r;
}

// Rotates a lane's eight elements, read as `piece` from `row` in memory.  All lanes of the warp call it together.
template <class T>
__device__ __forceinline__ Piece<sizeof(T)> rotate(const RopeWriteParams& p, const Rotation& r, RowGroup group,
                                                   const T* row, const Piece<sizeof(T)>& piece, bool active) {
  const int first = group.lane * 8, half = p.rotary_dim / 2;
  float v[8], partners[8];
  to_float(piece, T{}, v);
  if (partners_in_one_lane(p)) {
    Piece<sizeof(T)> other;
    const int partner = (first < half ? first + half : first - half) / 8;
#pragma unroll
    for (int i = 0; i < static_cast<int>(2 * sizeof(T)); ++i)
      other.words[i] = __shfl_sync(0xffffffffu, piece.words[i], partner, group.lanes);
    to_float(other, T{}, partners);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int e = first + i;
      partners[i] = v[i ^ 1];
      if (!p.interleaved && active && e < p.rotary_dim) partners[i] = element<T>(row, e < half ? e + half : e - half);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (first + i < p.rotary_dim) v[i] = v[i] * r.cosine[i] + partners[i] * r.sine[i];
  return from_float(v, T{});
}

// A group of lanes (threadIdx.x) does kRows of the rows of one token: query heads, then key heads, then value heads.
template <class T, int kRows>
__global__ void __launch_bounds__(kThreads)
    rope_write_kernel(const __grid_constant__ RopeWriteParams p, const Alignment aligned) {
  ptx::pdl_launch_dependents();
  const KvWriteParams& w = p.write;
  const RowGroup group = {static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x)};
  const int first = group.lane * 8, num_rows = p.num_heads + 2 * w.num_kv_heads, parts = (num_rows + kRows - 1) / kRows;
  const int index = blockIdx.x * blockDim.y + threadIdx.y;
  const int token = index / parts, first_row = (index - token * parts) * kRows;
  const bool in_range = token < p.num_tokens, active = in_range && first < w.head_dim;

  struct Row {
    bool is_query, is_value, active, aligned;
    int head;
    T* data;
  };
  const auto row_at = [&](int i) {
    const int row = first_row + i;
    Row r;
    r.is_query = row < p.num_heads;
    r.is_value = row >= p.num_heads + w.num_kv_heads;
    r.head = row - (r.is_query ? 0 : p.num_heads) - (r.is_value ? w.num_kv_heads : 0);
    r.active = active && row < num_rows;
    r.aligned = r.is_query ? aligned.query : r.is_value ? aligned.value : aligned.key;
    const TokenStrides& s = r.is_query ? p.query_strides : r.is_value ? w.value_strides : w.key_strides;
    void* data = r.is_query ? p.query : r.is_value ? const_cast<void*>(w.value) : p.key;
    r.data = static_cast<T*>(data) + token * s.token + r.head * s.head;
    return r;
  };
  ptx::pdl_wait();

  Piece<sizeof(T)> pieces[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Row row = row_at(i);
    pieces[i] = {};
    if (row.active) pieces[i] = load_piece<sizeof(T)>(row.data + first, row.aligned);
  }
  Rotation rotation = {};
  SlotPosition at = {-1, 0};
  if (active && first_row < p.num_heads + w.num_kv_heads) rotation = load_rotation<T>(p, token, first, aligned.cos_sin);
  if (in_range && token < w.num_tokens && first_row + kRows > p.num_heads) at = locate_slot(w, token);

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Row row = row_at(i);
    const Piece<sizeof(T)> rotated = rotate(p, rotation, group, row.data, pieces[i], row.active && !row.is_value);
    __syncwarp();  // every lane has read the row
    if (!row.is_value) {
      pieces[i] = rotated;
      if (row.active) store_piece(row.data + first, rotated, row.aligned);
    }
    const BlockStrides& strides = row.is_value ? w.value_cache_strides : w.key_cache_strides;
    const bool cache_aligned = row.is_value ? aligned.value_cache : aligned.key_cache;
    void* cache = row.is_value ? w.value_cache : w.key_cache;
    const SlotPosition to = row.is_query || first_row + i >= num_rows ? SlotPosition{-1, 0} : at;
    if (is_quantized(w.cache_dtype)) {
      float v[8];  // as write_kv would read them
      to_float(pieces[i], T{}, v);
      store_quantized(v, group, row.active, static_cast<uint8_t*>(cache), strides, cache_aligned,
                      row.is_value ? w.v_scale : w.k_scale, to, row.head, w.cache_dtype);
    } else if (to.block >= 0 && row.active) {
      store_piece(static_cast<T*>(cache) + row_offset(strides, to, row.head) + first, pieces[i], cache_aligned);
    }
  }
}

}  // namespace

void launch_rope_write_kv(const RopeWriteParams& p, cudaStream_t stream) {
  const KvWriteParams& w = p.write;
  if (p.num_tokens == 0) return;
  const DType table_dtype = p.cos_sin_is_float32 ? DType::kFloat32 : w.dtype;
  const Alignment aligned = {rows_aligned(p.query, p.query_strides, w.dtype),
                             rows_aligned(p.key, w.key_strides, w.dtype),
                             rows_aligned(w.value, w.value_strides, w.dtype),
                             rows_aligned(w.key_cache, w.key_cache_strides, w.cache_dtype),
                             rows_aligned(w.value_cache, w.value_cache_strides, w.cache_dtype),
                             rows_aligned(p.cos_sin, TokenStrides{p.cos_sin_stride, p.rotary_dim / 2}, table_dtype)};
  const dim3 block(lanes_for(w.head_dim), kThreads / lanes_for(w.head_dim));
  const auto grid = [&](int rows) {
    const int64_t parts = (p.num_heads + 2 * w.num_kv_heads + rows - 1) / rows;
    return dim3(static_cast<unsigned>((p.num_tokens * parts + block.y - 1) / block.y));
  };
  dispatch_float(w.dtype, [&](auto tag) {
    using T = decltype(tag);
    // Few tokens: one row a group, so that the work reaches every multiprocessor.
    if (grid(4).x >= 2u * current_device().sm_count)
      launch_pdl(rope_write_kernel<T, 4>, grid(4), block, stream, p, aligned);
    else
      launch_pdl(rope_write_kernel<T, 1>, grid(1), block, stream, p, aligned);
  });
}

}  // namespace paged_attn
