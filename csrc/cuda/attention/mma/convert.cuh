// Elements of a quantised cache as fp16 or bf16, exactly, in a few integer operations: conversion instructions are
// slow, and compute capability 8.0 has none for fp8.
#pragma once

#include <type_traits>

#include "../../../params.h"
#include "../ptx.cuh"

namespace paged_attn::mma {

__device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b, __half) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));  // + (-0)
  return d;
}

// Two finite fp8 elements, each in the upper byte of a half of `two`, lower bytes 0.  Sign, exponent and mantissa go to
// their places in T, which leaves the exponent short by the difference of the biases: a multiplication makes up for it
// and makes subnormals normal.
template <class T, DType kType>
__device__ __forceinline__ uint32_t convert_fp8_pair(uint32_t two) {
  constexpr bool kHalf = std::is_same_v<T, __half>, kE4M3 = kType == DType::kFloat8E4M3;
  if constexpr (kHalf && !kE4M3) {
    return two;  // e5m2 is the upper byte of fp16
  } else {
    constexpr int kShift = kHalf ? 1 : kE4M3 ? 4 : 3;
    constexpr uint32_t kBias = kHalf ? 0x5c005c00u : kE4M3 ? 0x7b807b80u : 0x77807780u;  // 2^8, 2^120, 2^112
    const uint32_t moved = (two >> kShift & 0x7f007f00u >> kShift) | (two & 0x80008000u);
    return multiply2(moved, kBias, T());
  }
}

// Four elements.
template <class T, DType kType>
__device__ __forceinline__ uint2 convert4(uint32_t x) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kType == DType::kInt8) {
    const uint32_t u = x ^ 0x80808080u;  // + 128
    if constexpr (kHalf) {
      // 0x6400 | u is 1024 + u.
      uint32_t low = __byte_perm(u, 0x64646464u, 0x4140), high = __byte_perm(u, 0x64646464u, 0x4342);
      asm("add.rn.f16x2 %0, %0, %1;" : "+r"(low) : "r"(0xe480e480u));  // - 1152
      asm("add.rn.f16x2 %0, %0, %1;" : "+r"(high) : "r"(0xe480e480u));
      return make_uint2(low, high);
    } else {
      float f[4];  // 0x4b000000 | u is 2^23 + u
#pragma unroll
      for (int i = 0; i < 4; ++i) f[i] = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7440 + i)) - 8388736.f;
      return make_uint2(ptx::pack<T>(f[0], f[1]), ptx::pack<T>(f[2], f[3]));
    }
  } else {
    uint2 y = make_uint2(convert_fp8_pair<T, kType>(__byte_perm(x, 0, 0x1404)),
                         convert_fp8_pair<T, kType>(__byte_perm(x, 0, 0x3424)));
    if constexpr (!(kHalf && kType == DType::kFloat8E5M2)) {
      // NaN, and infinity of e5m2, are the largest magnitudes: this carries into bit 7 of their bytes.
      constexpr bool kE4M3 = kType == DType::kFloat8E4M3;
      const uint32_t special = (x & 0x7f7f7f7fu) + (kE4M3 ? 0x01010101u : 0x04040404u);
      if (special & 0x80808080u) {
        constexpr uint32_t kFill = kE4M3 ? 0x7fffu : 0x7f80u;  // of e5m2 the mantissa stays
        y.x |= (__byte_perm(special, 0, 0x1404) >> 15 & 0x00010001u) * kFill;
        y.y |= (__byte_perm(special, 0, 0x3424) >> 15 & 0x00010001u) * kFill;
      }
    }
    return y;
  }
}

}  // namespace paged_attn::mma
