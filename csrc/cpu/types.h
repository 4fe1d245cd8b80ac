// Element types of the tensors, their conversion to and from float, and the step from a runtime dtype to a type.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../params.h"

namespace paged_attn::cpu {

inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

// The largest finite value of a quantised type.
template <class T>
constexpr float kMaxFinite = std::numeric_limits<float>::max();
template <>
inline constexpr float kMaxFinite<Float8E4M3> = 448.f;
template <>
inline constexpr float kMaxFinite<Float8E5M2> = 57344.f;
template <>
inline constexpr float kMaxFinite<int8_t> = 127.f;

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return bits_float(uint32_t{x.bits} << 16); }
inline float to_float(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  const float scaled = magnitude < 0x400 ? float(magnitude) * 0x1p-24f : bits_float((magnitude << 13) + (112u << 23));
  return bits_float(sign | float_bits(scaled));
}
// fp8 values are halves with fewer bits: e5m2 is the upper byte of one, e4m3 has a bias that is smaller by 8.
inline float to_float(Float8E5M2 x) { return to_float(Half{uint16_t(x.bits << 8)}); }
inline float to_float(Float8E4M3 x) {
  if ((x.bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  return 256.f * to_float(Half{uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}
inline float to_float(int8_t x) { return float(x); }

// The magnitude bits of |x| in a format of kMantissa mantissa bits and exponent bias kBias, to nearest even.  x is
// finite and below the format's overflow.
template <int kMantissa, int kBias>
inline uint32_t round_magnitude(float x) {
  constexpr int kShift = 23 - kMantissa;
  const float magnitude = std::fabs(x);
  // Below the smallest normal number the spacing is constant: adding a float with that spacing rounds.
  const float spacing_anchor = bits_float(uint32_t(127 + 24 - kBias - kMantissa) << 23);
  const uint32_t subnormal = float_bits(magnitude + spacing_anchor) - float_bits(spacing_anchor);
  const uint32_t u = float_bits(magnitude);
  const uint32_t normal =
      ((u + (1u << (kShift - 1)) - 1 + (u >> kShift & 1)) >> kShift) - (uint32_t(127 - kBias) << kMantissa);
  return u < uint32_t(128 - kBias) << 23 ? subnormal : normal;
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return {uint16_t(x != x ? (u >> 16 | 0x40) : rounded)};
}
template <>
inline Half from_float<Half>(float x) {
  const uint32_t u = float_bits(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
  return {uint16_t(sign | round_magnitude<10, 15>(x))};
}
// The quantised types saturate, infinities too.
template <>
inline Float8E4M3 from_float<Float8E4M3>(float x) {
  const uint32_t sign = float_bits(x) >> 24 & 0x80;
  const float limited = std::fabs(x) < kMaxFinite<Float8E4M3> ? x : kMaxFinite<Float8E4M3>;
  return {uint8_t(sign | (x != x ? 0x7f : round_magnitude<3, 7>(limited)))};
}
template <>
inline Float8E5M2 from_float<Float8E5M2>(float x) {
  const uint32_t sign = float_bits(x) >> 24 & 0x80;
  const float limited = std::fabs(x) < kMaxFinite<Float8E5M2> ? x : kMaxFinite<Float8E5M2>;
  return {uint8_t(sign | (x != x ? 0x7f : round_magnitude<2, 15>(limited)))};
}
template <>
inline int8_t from_float<int8_t>(float x) {
  const float limited = x > 127.f ? 127.f : x < -127.f ? -127.f : x != x ? 0.f : x;
  constexpr float kAnchor = 0x1.8p23f;  // floats of this size are a whole number apart
  return int8_t(int32_t(float_bits(limited + kAnchor)) - int32_t(float_bits(kAnchor)));
}

template <class T>
struct TypeTag {
  using type = T;
};

template <class F>
void visit_float_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(TypeTag<Half>{});
    case DType::kBFloat16:
      return f(TypeTag<BFloat16>{});
    default:
      return f(TypeTag<float>{});
  }
}

template <class F>
void visit_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return f(TypeTag<Float8E4M3>{});
    case DType::kFloat8E5M2:
      return f(TypeTag<Float8E5M2>{});
    case DType::kInt8:
      return f(TypeTag<int8_t>{});
    default:
      return visit_float_type(dtype, f);
  }
}

inline float scale_at(const ScaleView& scale, int64_t block, int64_t slot, int64_t head) {
  if (scale.data == nullptr) return 1.f;
  return scale.data[block * scale.strides.block + slot * scale.strides.slot + head * scale.strides.head];
}

}  // namespace paged_attn::cpu
