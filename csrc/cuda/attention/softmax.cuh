// Scores, softmax state and row ends.  A state is (maximum, sum): the sum is that of exp2(score - maximum), scores in
// log2 units; (-inf, 0) where no key was seen.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"

namespace paged_attn {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMaxFloat = 3.402823466e38f;

// tanh with an absolute error of 1e-7 (tanh.approx has 5e-4, too much once multiplied by the cap).
__device__ __forceinline__ float tanh_exp2(float x) { return 1.f - __fdividef(2.f, 1.f + ptx::exp2(2.f * kLog2e * x)); }
// The same for |x| <= kSmallTanh, without special functions: relative error 6e-7 (minimax in x^2).
constexpr float kSmallTanh = 0.75f;
__device__ __forceinline__ float tanh_small(float x) {
  const float t = x * x;
  float p = 0.01292963f;
  p = p * t - 0.0500563f, p = p * t + 0.13258983f, p = p * t - 0.33328253f, p = p * t + 0.99999946f;
  return x * p;
}
__device__ __forceinline__ float soft_cap(float score, float cap) { return cap * tanh_exp2(__fdividef(score, cap)); }

// What exponents are taken against: the maximum, or 0 where every score so far is -inf.
__device__ __forceinline__ float exp2_reference(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// The least power of two at or above x: value scales are taken in units of it.  0 stays 0.
__device__ __forceinline__ float power_of_two_above(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0x7f800000u);
}

struct RowEnd {
  float output_scale;  // of the unnormalised output
  float lse;           // natural logarithm
};
// `sink` is one more score without a value; null: none.
__device__ __forceinline__ RowEnd finish_row(float maximum, float sum, const float* sink) {
  if (sum == 0.f) return {0.f, sink ? *sink : -INFINITY};
  float weight = 1.f;
  if (sink) {
    const float sink_score = *sink * kLog2e;
    const float larger = fminf(fmaxf(maximum, sink_score), kMaxFloat);  // a sink of inf: sum and LSE become inf
    weight = ptx::exp2(maximum - larger);
    sum = sum * weight + ptx::exp2(sink_score - larger);
    maximum = larger;
  }
  return {__fdividef(weight, sum), (maximum + log2f(sum)) * kLn2};
}

}  // namespace paged_attn
