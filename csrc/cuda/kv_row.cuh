// Where a token's row lies in a cache, and how one group of lanes stores it: shared by write_kv and rope_write_kv.
#pragma once

#include <type_traits>

#include "convert.cuh"
#include "divisor.cuh"

namespace paged_attn {

struct SlotPosition {
  int block, offset;  // block -1: no slot, nothing is stored
};

__device__ __forceinline__ SlotPosition locate_slot(const KvWriteParams& p, const Divisor& block_size, int token) {
  const int64_t index = token * p.slot_stride;
  const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[index]
                                         : static_cast<const int32_t*>(p.slot_mapping)[index];
  if (slot < 0 || slot >= p.num_blocks * p.block_size) return {-1, 0};
  if (slot <= INT32_MAX) {
    const int block = block_size.quotient(static_cast<int>(slot));
    return {block, static_cast<int>(slot) - block * block_size.value};
  }
  return {static_cast<int>(slot / p.block_size), static_cast<int>(slot % p.block_size)};
}

__device__ __forceinline__ int64_t row_offset(const BlockStrides& s, const SlotPosition& at, int head) {
  return at.block * s.block + at.offset * s.slot + head * s.head;
}

// Lanes (a power of two up to 32, inside one warp) that hold a row of `elements` elements, `per_lane` each.
inline int lanes_for(int elements, int per_lane) {
  int lanes = 1;
  while (lanes * per_lane < elements) lanes *= 2;
  return lanes;
}

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// ---- Quantising: a lane holds two pieces of a row.

// Magnitudes are the bits of a float32 |x|: as unsigned integers they order like the numbers, infinity above them, NaN
// above that.
constexpr uint32_t kInfiniteMagnitude = 0x7f800000;

__device__ __forceinline__ uint32_t largest_magnitude(const Piece<4>& piece, float) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, piece.words[i] & 0x7fffffffu);
  return largest;
}
__device__ __forceinline__ uint32_t largest_magnitude(const Piece<2>& piece, __nv_bfloat16) {
  __nv_bfloat162 largest = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162_raw raw;
    raw.x = static_cast<unsigned short>(piece.words[i]);
    raw.y = static_cast<unsigned short>(piece.words[i] >> 16);
    largest = __hmax2_nan(largest, __habs2(__nv_bfloat162(raw)));
  }
  return __float_as_uint(__bfloat162float(__hmax_nan(largest.x, largest.y)));
}
__device__ __forceinline__ uint32_t largest_magnitude(const Piece<2>& piece, __half) {
  __half2 largest = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __half2_raw raw;
    raw.x = static_cast<unsigned short>(piece.words[i]);
    raw.y = static_cast<unsigned short>(piece.words[i] >> 16);
    largest = __hmax2_nan(largest, __habs2(__half2(raw)));
  }
  return __float_as_uint(__half2float(__hmax_nan(largest.x, largest.y)));
}

// Rarely needed, so out of line: kernels this short are bound by the code that they fetch.
template <class T>
__device__ __noinline__ uint32_t largest_finite_magnitude(Piece<sizeof(T)> piece) {
  float v[8];
  to_float(piece, T{}, v);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t magnitude = __float_as_uint(v[i]) & 0x7fffffffu;
    largest = max(largest, magnitude < kInfiniteMagnitude ? magnitude : 0);
  }
  return largest;
}

// The largest over a group of lanes.  All lanes of the warp call it together.
__device__ __forceinline__ uint32_t largest_of_group(uint32_t magnitude, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2)
    magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, step));
  return magnitude;
}

// stored = value / scale, whatever the value and the scale.
template <class T, class Cache>
__device__ __noinline__ Piece<1> quantize_any(Piece<sizeof(T)> piece, float scale) {
  float v[8];
  to_float(piece, T{}, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = v[i] / scale;
  return quantize(v, Cache{});
}

// The same where value and scale are of moderate size.  One reciprocal serves all divisions: the remainder corrects
// the quotient to the nearest (Markstein 1990, doi:10.1147/rd.341.0111).  A quotient small enough to lose bits of its
// remainder is stored as zero either way.
template <class Cache>
__device__ __forceinline__ bool moderate(float scale, uint32_t largest) {
  const float magnitude = fabsf(scale);
  const float limit = std::is_same_v<Cache, int8_t> ? fminf(127.25f * magnitude, 0x1p60f) : 0x1p60f;
  return magnitude > 0x1p-60f && magnitude < 0x1p60f && largest < __float_as_uint(limit);
}
template <class T, class Cache>
__device__ __forceinline__ Piece<1> quantize_moderate(const Piece<sizeof(T)>& piece, float scale, float reciprocal) {
  float v[8];
  to_float(piece, T{}, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float q = v[i] * reciprocal;
    v[i] = fmaf(fmaf(-q, scale, v[i]), reciprocal, q);
  }
  return quantize_in_range(v, Cache{});
}

// A lane's share of a row: two pieces that begin at element `first` and hold `count` elements, zeros after them.
struct LanePieces {
  int first[2], count[2];
};

// The scale of a row that does not depend on its content.
__device__ __forceinline__ float fixed_scale(const ScaleView& scales, int head) {
  return scales.data != nullptr && !scales.per_token() ? scales.data[head * scales.strides.head] : 1.0f;
}

// The scale that makes a row's largest finite magnitude the largest number of the cache.
template <class T, class Cache>
__device__ __forceinline__ float scale_of_row(const Piece<sizeof(T)> (&pieces)[2], uint32_t largest, int lanes) {
  largest = largest_of_group(largest, lanes);
  if (__any_sync(0xffffffffu, largest >= kInfiniteMagnitude))
    largest =
        largest_of_group(max(largest_finite_magnitude<T>(pieces[0]), largest_finite_magnitude<T>(pieces[1])), lanes);
  const float ratio = __uint_as_float(largest) / largest_finite(Cache{});
  return ratio > 0.0f ? ratio : 1.0f;
}

// Quantises a row and stores it at `at`, its scale too where every row has its own; else `scale` is the row's.  All
// lanes of the warp call it together, with equal `row_scales`: whether K or V have a scale a row.
template <class T, class Cache>
__device__ __forceinline__ void store_quantized(void* cache, const BlockStrides& strides, const ScaleView& scales,
                                                bool aligned, const Piece<sizeof(T)> (&pieces)[2],
                                                const LanePieces& part, int lanes, int lane, const SlotPosition& at,
                                                int head, float scale, bool row_scales) {
  const uint32_t largest = max(largest_magnitude(pieces[0], T{}), largest_magnitude(pieces[1], T{}));
  if (row_scales) {
    const float own = scale_of_row<T, Cache>(pieces, largest, lanes);
    if (scales.per_token()) scale = own;
    if (scales.per_token() && at.block >= 0 && lane == 0) scales.data[row_offset(scales.strides, at, head)] = scale;
  }
  if (at.block < 0) return;
  Piece<1> stored[2];
  if (moderate<Cache>(scale, largest)) {
    const float reciprocal = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) stored[i] = quantize_moderate<T, Cache>(pieces[i], scale, reciprocal);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) stored[i] = quantize_any<T, Cache>(pieces[i], scale);
  }
  uint8_t* row = static_cast<uint8_t*>(cache) + row_offset(strides, at, head);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (part.count[i] > 0) store_piece(row + part.first[i], stored[i], aligned, part.count[i]);
}

}  // namespace paged_attn
