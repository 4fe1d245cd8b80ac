// What the tensor cores multiply with an 8-bit cache: its elements as fp16, exactly, and 16-bit queries as fp16; the
// scale of a KV head.
#pragma once

#include <type_traits>

#include "../../params.h"
#include "ptx.cuh"

namespace paged_attn {

// Four e4m3 elements.
__device__ __forceinline__ uint2 widen4_e4m3(uint32_t x) {
#if __CUDA_ARCH__ >= 890
  uint2 y;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, "
      "high;\n}"
      : "=r"(y.x), "=r"(y.y)
      : "r"(x));
  return y;
#else
  // Sign, exponent and mantissa go to their places in fp16, which leaves the exponent short by 8, the difference of the
  // biases: a multiplication by 2^8 makes up for it and makes subnormals normal.
  auto convert = [](uint32_t two) {  // each in the upper byte of a half
    uint32_t y = (two >> 1 & 0x3f803f80u) | (two & 0x80008000u);
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(y) : "r"(0x5c005c00u));
    return y;
  };
  uint2 y = make_uint2(convert(__byte_perm(x, 0, 0x1404)), convert(__byte_perm(x, 0, 0x3424)));
  const uint32_t carried = (x & 0x7f7f7f7fu) + 0x01010101u;  // bit 7 of a byte: the element is NaN
  if (carried & 0x80808080u) {
    y.x |= (__byte_perm(carried, 0, 0x1404) >> 15 & 0x00010001u) * 0x7fffu;
    y.y |= (__byte_perm(carried, 0, 0x3424) >> 15 & 0x00010001u) * 0x7fffu;
  }
  return y;
#endif
}

// Four elements of type kType.
template <DType kType>
__device__ __forceinline__ uint2 widen4(uint32_t x) {
  if constexpr (kType == DType::kFloat8E4M3) {
    return widen4_e4m3(x);
  } else if constexpr (kType == DType::kFloat8E5M2) {
    return make_uint2(__byte_perm(x, 0, 0x1404), __byte_perm(x, 0, 0x3424));  // the upper byte of fp16
  } else {
    const uint32_t u = x ^ 0x80808080u;  // + 128; and 0x6400 | u is 1024 + u
    uint2 y = make_uint2(__byte_perm(u, 0x64646464u, 0x4140), __byte_perm(u, 0x64646464u, 0x4342));
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(y.x) : "r"(0xe480e480u));  // - 1152
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(y.y) : "r"(0xe480e480u));
    return y;
  }
}

// Two bf16 (or already fp16) to two fp16.
__device__ __forceinline__ uint32_t to_half2(uint32_t x, bool is_bfloat) {
  return is_bfloat ? ptx::pack<__half>(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)) : x;
}

// Calls f with the type of a quantised cache as a constant.
template <class F>
__device__ __forceinline__ void for_cache_type(DType type, F f) {
  if (type == DType::kFloat8E4M3)
    f(std::integral_constant<DType, DType::kFloat8E4M3>());
  else if (type == DType::kFloat8E5M2)
    f(std::integral_constant<DType, DType::kFloat8E5M2>());
  else
    f(std::integral_constant<DType, DType::kInt8>());
}

// Of a KV head, where it does not vary from token to token; else 1.
__device__ __forceinline__ float head_scale(const ScaleView& scale, int kv_head) {
  return scale.data && !scale.per_token() ? __ldg(scale.data + kv_head * scale.strides.head) : 1.f;
}

}  // namespace paged_attn
