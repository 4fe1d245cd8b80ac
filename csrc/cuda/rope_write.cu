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

// Cosines or sines first .. first + 7 of a row of the table.
template <class T>
__device__ __forceinline__ void load_coefficients(const RopeWriteParams& p, int64_t first, bool aligned,
                                                  float (&v)[8]) {
  if (p.cos_sin_is_float32)
    to_float(load_piece<4>(static_cast<const float*>(p.cos_sin) + first, aligned), float{}, v);
  else
    to_float(load_piece<sizeof(T)>(static_cast<const T*>(p.cos_sin) + first, aligned), T{}, v);
}

template <class T>
__device__ __forceinline__ float coefficient(const RopeWriteParams& p, int64_t i) {
  return p.cos_sin_is_float32 ? element<float>(p.cos_sin, i) : element<T>(p.cos_sin, i);
}

// Rotates a lane's eight elements of a row in memory; `piece` is what was loaded of them.  All lanes of the warp call
// it together.  A position outside the table gives NaN.
template <class T>
__device__ __forceinline__ void rotate(const RopeWriteParams& p, RowGroup group, bool active, const T* row,
                                       const Piece<sizeof(T)>& piece, int token, bool aligned, float (&v)[8]) {
  const int first = group.lane * 8, half = p.rotary_dim / 2;
  int64_t position = -1;
  if (active) {
    const int64_t i = token * p.positions_stride;
    position = p.positions_are_int64 ? static_cast<const int64_t*>(p.positions)[i]
                                     : static_cast<const int32_t*>(p.positions)[i];
  }
  const bool known = position >= 0 && position < p.num_positions;
  const int64_t cosines = position * p.cos_sin_stride, sines = cosines + half;

  if (!p.interleaved && half % 8 == 0) {  // the partners of a lane's elements are all of another lane's
    Piece<sizeof(T)> other;
    const int partner = (first < half ? first + half : first - half) / 8;
#pragma unroll
    for (int i = 0; i < static_cast<int>(2 * sizeof(T)); ++i)
      other.words[i] = __shfl_sync(0xffffffffu, piece.words[i], partner, group.lanes);
    if (!active || first >= p.rotary_dim) return;
    float partners[8], cosine[8], sine[8];
    to_float(other, T{}, partners);
    const int index = first < half ? first : first - half;
#pragma unroll
    for (int i = 0; i < 8; ++i) cosine[i] = sine[i] = NAN;
    if (known) {
      load_coefficients<T>(p, cosines + index, aligned, cosine);
      load_coefficients<T>(p, sines + index, aligned, sine);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = v[i] * cosine[i] + (first < half ? -partners[i] : partners[i]) * sine[i];
    return;
  }
  if (!active) return;
  float rotated[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int e = first + i;
    rotated[i] = v[i];
    if (e >= p.rotary_dim) continue;
    const bool is_first = p.interleaved ? i % 2 == 0 : e < half;
    const int index = p.interleaved ? e / 2 : is_first ? e : e - half;
    const float partner = p.interleaved ? v[i ^ 1] : element<T>(row, is_first ? e + half : e - half);
    const float cosine = known ? coefficient<T>(p, cosines + index) : NAN;
    const float sine = known ? coefficient<T>(p, sines + index) : NAN;
    rotated[i] = v[i] * cosine + (is_first ? -partner : partner) * sine;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = rotated[i];
}

// A group of lanes (threadIdx.x) does one row of a token: a query head, a key head, or a value head.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rope_write_kernel(const __grid_constant__ RopeWriteParams p, const Alignment aligned) {
  ptx::pdl_launch_dependents();
  const KvWriteParams& w = p.write;
  const RowGroup group = {static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x)};
  const int rows = p.num_heads + 2 * w.num_kv_heads;
  const int64_t index = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int token = static_cast<int>(index / rows), row = static_cast<int>(index % rows);
  const bool is_query = row < p.num_heads, is_value = row >= p.num_heads + w.num_kv_heads;
  const int head = is_query ? row : is_value ? row - p.num_heads - w.num_kv_heads : row - p.num_heads;
  const bool active = token < p.num_tokens && group.lane * 8 < w.head_dim;

  const TokenStrides& strides = is_query ? p.query_strides : is_value ? w.value_strides : w.key_strides;
  const bool in_aligned = is_query ? aligned.query : is_value ? aligned.value : aligned.key;
  const void* data = is_query ? p.query : is_value ? w.value : p.key;
  const T* in = static_cast<const T*>(data) + token * strides.token + head * strides.head;
  ptx::pdl_wait();

  Piece<sizeof(T)> piece = {};
  SlotPosition at = {-1, 0};
  if (active) {
    piece = load_piece<sizeof(T)>(in + group.lane * 8, in_aligned);
    if (!is_query && token < w.num_tokens) at = locate_slot(w, token);
  }
  float v[8];
  to_float(piece, T{}, v);
  rotate(p, group, active && !is_value, in, piece, token, aligned.cos_sin, v);
  if (!is_value) piece = from_float(v, T{});
  __syncwarp();  // every lane has read the row
  if (active && !is_value) store_piece(const_cast<T*>(in) + group.lane * 8, piece, in_aligned);

  const BlockStrides& cache_strides = is_value ? w.value_cache_strides : w.key_cache_strides;
  const bool cache_aligned = is_value ? aligned.value_cache : aligned.key_cache;
  void* cache = is_value ? w.value_cache : w.key_cache;
  if (is_quantized(w.cache_dtype)) {
    to_float(piece, T{}, v);  // as write_kv would read it
    store_quantized(v, group, active, static_cast<uint8_t*>(cache), cache_strides, cache_aligned,
                    is_value ? w.v_scale : w.k_scale, at, head, w.cache_dtype);
  } else if (at.block >= 0 && active) {
    store_piece(static_cast<T*>(cache) + row_offset(cache_strides, at, head) + group.lane * 8, piece, cache_aligned);
  }
}

}  // namespace

void launch_rope_write_kv(const RopeWriteParams& p, cudaStream_t stream) {
  const KvWriteParams& w = p.write;
  const int64_t rows = int64_t{p.num_tokens} * (p.num_heads + 2 * w.num_kv_heads);
  if (rows == 0) return;
  const DType table_dtype = p.cos_sin_is_float32 ? DType::kFloat32 : w.dtype;
  const Alignment aligned = {rows_aligned(p.query, p.query_strides, w.dtype),
                             rows_aligned(p.key, w.key_strides, w.dtype),
                             rows_aligned(w.value, w.value_strides, w.dtype),
                             rows_aligned(w.key_cache, w.key_cache_strides, w.cache_dtype),
                             rows_aligned(w.value_cache, w.value_cache_strides, w.cache_dtype),
                             rows_aligned(p.cos_sin, TokenStrides{p.cos_sin_stride, p.rotary_dim / 2}, table_dtype)};
  const dim3 block(lanes_for(w.head_dim), kThreads / lanes_for(w.head_dim));
  dispatch_float(w.dtype, [&](auto tag) {
    launch_pdl(rope_write_kernel<decltype(tag)>, dim3(static_cast<unsigned>((rows + block.y - 1) / block.y)), block,
               stream, p, aligned);
  });
}

}  // namespace paged_attn
