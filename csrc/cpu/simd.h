// Vectors of floats: loads from every cache type, exp, tanh, reductions, a transpose.
// Included once for each instruction set, see attention_isa.h; PAGED_ATTN_ISA is its namespace and PAGED_ATTN_LANES
// the floats in a vector.
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "types.h"

namespace paged_attn::cpu::PAGED_ATTN_ISA {

constexpr int kLanes = PAGED_ATTN_LANES;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(4 * PAGED_ATTN_LANES)));
typedef int32_t VecI32 __attribute__((vector_size(4 * PAGED_ATTN_LANES)));
typedef uint32_t VecU32 __attribute__((vector_size(4 * PAGED_ATTN_LANES)));
typedef uint16_t VecU16 __attribute__((vector_size(2 * PAGED_ATTN_LANES)));
typedef uint8_t VecU8 __attribute__((vector_size(PAGED_ATTN_LANES)));
typedef int8_t VecI8 __attribute__((vector_size(PAGED_ATTN_LANES)));

#define PAGED_ATTN_INLINE inline __attribute__((always_inline))

template <class V, class T>
PAGED_ATTN_INLINE V load_raw(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
PAGED_ATTN_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
PAGED_ATTN_INLINE Vec splat(float x) { return x - Vec{}; }

// Widening loads of kLanes integers, and halves to floats: what compilers do not make one instruction of.
#if PAGED_ATTN_LANES == 16
PAGED_ATTN_INLINE VecU16 widen(const uint8_t* p) { return (VecU16)_mm256_cvtepu8_epi16(load_raw<__m128i>(p)); }
PAGED_ATTN_INLINE VecI32 widen(const int8_t* p) {
  return (VecI32)_mm512_maskz_cvtepi8_epi32(0xffff, load_raw<__m128i>(p));
}
PAGED_ATTN_INLINE VecU32 widen(const uint16_t* p) {
  return (VecU32)_mm512_maskz_cvtepu16_epi32(0xffff, load_raw<__m256i>(p));
}
PAGED_ATTN_INLINE Vec half_to_float(VecU16 h) { return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h); }
#elif PAGED_ATTN_LANES == 8
PAGED_ATTN_INLINE VecU16 widen(const uint8_t* p) {
  return (VecU16)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
}
PAGED_ATTN_INLINE VecI32 widen(const int8_t* p) {
  return (VecI32)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
PAGED_ATTN_INLINE VecU32 widen(const uint16_t* p) { return (VecU32)_mm256_cvtepu16_epi32(load_raw<__m128i>(p)); }
PAGED_ATTN_INLINE Vec half_to_float(VecU16 h) { return (Vec)_mm256_cvtph_ps((__m128i)h); }
#else
PAGED_ATTN_INLINE VecU16 widen(const uint8_t* p) { return __builtin_convertvector(load_raw<VecU8>(p), VecU16); }
PAGED_ATTN_INLINE VecI32 widen(const int8_t* p) { return __builtin_convertvector(load_raw<VecI8>(p), VecI32); }
PAGED_ATTN_INLINE VecU32 widen(const uint16_t* p) { return __builtin_convertvector(load_raw<VecU16>(p), VecU32); }
PAGED_ATTN_INLINE Vec half_to_float(VecU16 h) {
  const VecU32 x = __builtin_convertvector(h, VecU32), magnitude = x & 0x7fff;
  const Vec subnormal = __builtin_convertvector((VecI32)magnitude, Vec) * 0x1p-24f;
  const VecU32 normal = (magnitude << 13) + (112u << 23), special = (magnitude << 13) | 0x7f800000u;
  const VecU32 value = magnitude < 0x400 ? (VecU32)subnormal : magnitude < 0x7c00 ? normal : special;
  return (Vec)(value | (x & 0x8000) << 16);
}
#endif

// kLanes elements as floats.
PAGED_ATTN_INLINE Vec load(const float* p) { return load_raw<Vec>(p); }
PAGED_ATTN_INLINE Vec load(const BFloat16* p) { return (Vec)(widen(&p->bits) << 16); }
PAGED_ATTN_INLINE Vec load(const Half* p) { return half_to_float(load_raw<VecU16>(p)); }
PAGED_ATTN_INLINE Vec load(const Float8E5M2* p) { return half_to_float(widen(&p->bits) << 8); }
// The bits of e4m3 moved into a half give 2^-8 of the value; its only special value is NaN.
PAGED_ATTN_INLINE Vec load(const Float8E4M3* p) {
  const VecU16 x = widen(&p->bits), magnitude = x & 0x7f;
  const VecU16 nan = (VecU16)(magnitude == 0x7f) & 0x7c00;
  return half_to_float((x & 0x80) << 8 | magnitude << 7 | nan) * 256.f;
}
PAGED_ATTN_INLINE Vec load(const int8_t* p) { return __builtin_convertvector(widen(p), Vec); }
// The first n <= kLanes elements, then zeros; reads nothing past them.
template <class T>
PAGED_ATTN_INLINE Vec load_part(const T* p, int n) {
  T part[kLanes] = {};
  std::memcpy(static_cast<void*>(part), p, sizeof(T) * n);
  return load(part);
}

PAGED_ATTN_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

template <int kWidth>
PAGED_ATTN_INLINE float reduce_max(const float* x) {
  if constexpr (kWidth == 1) {
    return x[0];
  } else {
    float half[kWidth / 2];
    for (int i = 0; i < kWidth / 2; ++i) half[i] = x[i] > x[i + kWidth / 2] ? x[i] : x[i + kWidth / 2];
    return reduce_max<kWidth / 2>(half);
  }
}
template <int kWidth>
PAGED_ATTN_INLINE float reduce_sum(const float* x) {
  if constexpr (kWidth == 1) {
    return x[0];
  } else {
    float half[kWidth / 2];
    for (int i = 0; i < kWidth / 2; ++i) half[i] = x[i] + x[i + kWidth / 2];
    return reduce_sum<kWidth / 2>(half);
  }
}
PAGED_ATTN_INLINE float reduce_max(Vec v) { return reduce_max<kLanes>(reinterpret_cast<const float*>(&v)); }
PAGED_ATTN_INLINE float reduce_sum(Vec v) { return reduce_sum<kLanes>(reinterpret_cast<const float*>(&v)); }

// exp with x = n ln 2 + r and a polynomial in r (Cephes' expf), within 2 ulp; 0 below -87; x must not exceed 88.
PAGED_ATTN_INLINE Vec exp(Vec x) {
  constexpr float kAnchor = 0x1.8p23f;
  const Vec in_range = x < -87.f ? splat(-87.f) : x;
  const Vec anchored = in_range * 1.44269504f + kAnchor, n = anchored - kAnchor;
  const Vec r = in_range - n * 0.693359375f + n * 2.12194440e-4f;
  Vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.f;
  const VecU32 exponent = ((VecU32)anchored - 0x4b400000u) << 23;
  const Vec result = (Vec)((VecU32)y + exponent);
  return x < -87.f ? Vec{} : result;
}

// Cephes' tanhf.
PAGED_ATTN_INLINE Vec tanh(Vec x) {
  const Vec magnitude = (Vec)((VecU32)x & 0x7fffffffu), z = x * x;
  Vec y = splat(-5.70498872745e-3f);
  y = y * z + 2.06390887954e-2f;
  y = y * z - 5.37397155531e-2f;
  y = y * z + 1.33314422036e-1f;
  y = y * z - 3.33332819422e-1f;
  const Vec small = y * z * x + x;
  const Vec limited = magnitude > 40.f ? splat(40.f) : magnitude;
  const Vec large = 1.f - 2.f / (exp(2.f * limited) + 1.f);
  const Vec signed_large = (Vec)((VecU32)large | ((VecU32)x & 0x80000000u));
  return magnitude < 0.625f ? small : signed_large;
}

// Stage s of a transpose exchanges bit s of an element's row and lane.
template <int kStage, int... kI>
PAGED_ATTN_INLINE void exchange(Vec& a, Vec& b, std::integer_sequence<int, kI...>) {
  const Vec low = __builtin_shufflevector(a, b, ((kI & kStage) ? kLanes + kI - kStage : kI)...);
  const Vec high = __builtin_shufflevector(a, b, ((kI & kStage) ? kLanes + kI : kI + kStage)...);
  a = low;
  b = high;
}
template <int kStage = 1>
PAGED_ATTN_INLINE void transpose(Vec (&rows)[kLanes]) {
  if constexpr (kStage < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if ((i & kStage) == 0) exchange<kStage>(rows[i], rows[i + kStage], std::make_integer_sequence<int, kLanes>{});
    transpose<kStage * 2>(rows);
  }
}

}  // namespace paged_attn::cpu::PAGED_ATTN_ISA
