// Where a token's row lies in a cache, and how one group of lanes stores it: shared by write_kv and rope_write_kv.
#pragma once

#include <type_traits>

#include "convert.cuh"
#include "divisor.cuh"

namespace paged_attn {

__device__ __forceinline__ int64_t row_offset(const TokenStrides& s, int token, int head) {
  return token * s.token + head * s.head;
}

struct SlotPosition {
  int block, offset;  // block -1: no slot, nothing is stored
};

__device__ __forceinline__ int64_t row_offset(const BlockStrides& s, const SlotPosition& at, int head) {
  return at.block * s.block + at.offset * s.slot + head * s.head;
}

__device__ __forceinline__ SlotPosition locate_slot(const KvWriteParams& p, const Divisor& block_size, int token) {
  // Its first and its last 32 bits, the same where slots are int32: no branch between this load and others.
  const auto* words = static_cast<const int32_t*>(p.slot_mapping) + (token * p.slot_stride << p.slots_are_int64);
  const auto first = static_cast<uint32_t>(words[0]);
  const int32_t last = words[p.slots_are_int64];
  if (last < 0) return {-1, 0};
  const uint64_t slot = first | (p.slots_are_int64 ? uint64_t{static_cast<uint32_t>(last)} << 32 : 0);
  if (slot >= static_cast<uint64_t>(p.block_size * p.num_blocks)) return {-1, 0};
  if (slot <= INT32_MAX) {
    const int block = block_size.quotient(static_cast<int>(slot));
    return {block, static_cast<int>(slot) - block * block_size.value};
  }
  return {static_cast<int>(slot / p.block_size), static_cast<int>(slot % p.block_size)};
}

// Lanes (a power of two up to 32, inside one warp) that hold a row of `elements` elements, `per_lane` each.
inline int lanes_for(int elements, int per_lane) {
  int lanes = 1;
  while (lanes * per_lane < elements) lanes *= 2;
  return lanes;
}

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// ---- Quantising: a lane holds two pieces of a row.

// Magnitudes are the bits of |x| in its own type: as unsigned integers they order like the numbers, infinity above
// them, NaN above that.
template <class T>
constexpr uint32_t kInfiniteMagnitude = sizeof(T) == 4              ? 0x7f800000
                                        : std::is_same_v<T, __half> ? 0x7c00
                                                                    : 0x7f80;

__device__ __forceinline__ float magnitude_as_float(uint32_t bits, float) { return __uint_as_float(bits); }
template <class T>
__device__ __forceinline__ float magnitude_as_float(uint32_t bits, T) {
  float v[8];
  to_float(Piece<2>{{bits}}, T{}, v);
  return v[0];
}

__device__ __forceinline__ uint32_t largest_magnitude(const Piece<4> (&pieces)[2]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) largest = max(largest, pieces[i / 8].words[i % 8] & 0x7fffffffu);
  return largest;
}
__device__ __forceinline__ uint32_t largest_magnitude(const Piece<2> (&pieces)[2]) {
  uint32_t largest = 0;  // of the even and of the odd elements
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = __vmaxu2(largest, pieces[i / 4].words[i % 4] & 0x7fff7fffu);
  return max(largest & 0xffffu, largest >> 16);
}

// Rarely needed, so out of line: kernels this short are bound by the code that they fetch.
template <class T>
__device__ __noinline__ uint32_t largest_finite_magnitude(Piece<sizeof(T)> piece) {
  constexpr int kPerWord = 4 / sizeof(T);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t element = piece.words[i / kPerWord] >> (i % kPerWord * 16);
    const uint32_t magnitude = element & (sizeof(T) == 4 ? 0x7fffffffu : 0x7fffu);
    largest = max(largest, magnitude < kInfiniteMagnitude<T> ? magnitude : 0);
  }
  return largest;
}

// The largest of each of kRows rows over a group of lanes.  All lanes of the warp call it together.
template <class T, int kRows>
__device__ __forceinline__ void spread_largest(uint32_t* largest, int lanes) {
  if constexpr (kRows == 2 && sizeof(T) == 2) {  // both in one word
    uint32_t both = largest[0] | largest[1] << 16;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      if (step >= lanes) break;
      both = __vmaxu2(both, __shfl_xor_sync(0xffffffffu, both, step));
    }
    largest[0] = both & 0xffffu, largest[1] = both >> 16;
  } else {
    for (int step = lanes / 2; step > 0; step /= 2)
#pragma unroll
      for (int i = 0; i < kRows; ++i) largest[i] = max(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], step));
  }
}

// value / scale as the cache holds it, whatever the value and the scale.
template <class T, class Cache>
__device__ __noinline__ Piece<1> quantize_any(Piece<sizeof(T)> piece, float scale) {
  float v[8];
  to_float(piece, T{}, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = v[i] / scale;
  return quantize(v, Cache{});
}

// v at most `limit` in magnitude; NaN stays NaN.
__device__ __forceinline__ float limited(float v, float limit) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(limit));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(-limit));
  return v;
}

// Divides numbers of type T by a scale of moderate size.  16-bit ones: 1 / scale is `high`, rounded towards zero, plus
// `low`, which is positive: infinities and what overflows stay infinite.  v / scale is exact to within 2^-45 before it
// is rounded.  That is the quotient to the nearest wherever it matters: next to a rounding boundary of the cache's
// type, no quotient of a 16-bit number and a float lies that close to the middle between two floats
// (tests/test_write.py), but for one, a power of two over 1 - 2^-24, for which `low` is rounded up.
template <class T>
struct Divider {
  float high, low;

  __device__ __forceinline__ explicit Divider(float scale) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(high) : "f"(scale));
    high = __fmaf_rz(fmaf(-high, scale, 1.0f), high, high);
    const float error = fmaf(-high, scale, 1.0f) + 0x1.8p-48f;
    low = error * high;
    low = fmaf(error, low, low);
  }
  __device__ __forceinline__ float quotient(float v) const { return fmaf(v, high, v * low); }
};

// float32: the remainder corrects the quotient to the nearest (Markstein 1990, doi:10.1147/rd.341.0111).  One small
// enough to lose bits of its remainder is stored as zero either way.
template <>
struct Divider<float> {
  float scale, reciprocal;

  __device__ __forceinline__ explicit Divider(float scale) : scale(scale) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(scale));
    reciprocal = fmaf(fmaf(-reciprocal, scale, 1.0f), reciprocal, reciprocal);
  }
  __device__ __forceinline__ float quotient(float v) const {
    const float q = v * reciprocal;
    return fmaf(fmaf(-q, scale, v), reciprocal, q);
  }
};

// A lane's share of a row: two pieces that begin at element `first` and hold `count` elements, zeros after them.
struct LanePieces {
  int first[2], count[2];
};

// The scale of a row that does not depend on its content.
__device__ __forceinline__ float fixed_scale(const ScaleView& scales, int head) {
  return scales.data != nullptr && !scales.per_token() ? scales.data[head * scales.strides.head] : 1.0f;
}

// v / kLargestFinite, which is 7 or 127 times a power of two: two multiplications round what is left of a 16-bit number
// to the nearest, unless it is subnormal.
template <class Cache, class T>
__device__ __forceinline__ float over_largest_finite(float v, T) {
  constexpr double exact = 1.0 / kLargestFinite<Cache>;
  constexpr float high = static_cast<float>(exact), low = static_cast<float>(exact - high);
  if constexpr (sizeof(T) == 4) return v / kLargestFinite<Cache>;
  return fmaf(v, high, v * low);
}

// For each of kRows rows the scale that makes its largest finite magnitude the largest number of the cache.  All lanes
// of the warp call it together.
template <class T, class Cache, int kRows>
__device__ __forceinline__ void scales_of_rows(const Piece<sizeof(T)> (*pieces)[2], int lanes, float* scales) {
  uint32_t largest[kRows];
  bool infinite = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    largest[i] = largest_magnitude(pieces[i]);
    infinite |= largest[i] >= kInfiniteMagnitude<T>;
  }
  if (__any_sync(0xffffffffu, infinite))
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      largest[i] = max(largest_finite_magnitude<T>(pieces[i][0]), largest_finite_magnitude<T>(pieces[i][1]));
  spread_largest<T, kRows>(largest, lanes);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float ratio = over_largest_finite<Cache>(magnitude_as_float(largest[i], T{}), T{});
    scales[i] = ratio > 0.0f ? ratio : 1.0f;
  }
}

// A lane's pieces as the cache holds them.
template <class T, class Cache>
__device__ __forceinline__ void quantize_row(const Piece<sizeof(T)> (&pieces)[2], float scale, Piece<1> (&stored)[2]) {
  if (scale > 0x1p-60f && scale < 0x1p60f) {
    const Divider<T> divider(scale);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float v[8];
      to_float(pieces[i], T{}, v);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if constexpr (sizeof(T) == 4) v[k] = limited(v[k], kLargestFinite<Cache> * scale);
        v[k] = divider.quotient(v[k]);
      }
      stored[i] = quantize(v, Cache{});
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) stored[i] = quantize_any<T, Cache>(pieces[i], scale);
  }
}

}  // namespace paged_attn
