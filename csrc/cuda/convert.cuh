// Pieces of eight elements to float and back: float types rounded to nearest even, quantised types also saturated.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "vector.cuh"

namespace paged_attn {

__device__ __forceinline__ void to_float(const Piece<4>& piece, float, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(piece.words[i]);
}

__device__ __forceinline__ void to_float(const Piece<2>& piece, __half, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __half2_raw raw;
    raw.x = static_cast<unsigned short>(piece.words[i]);
    raw.y = static_cast<unsigned short>(piece.words[i] >> 16);
    const float2 pair = __half22float2(__half2(raw));
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ void to_float(const Piece<2>& piece, __nv_bfloat16, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(piece.words[i] << 16);
    v[2 * i + 1] = __uint_as_float(piece.words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ Piece<4> from_float(const float (&v)[8], float) {
  Piece<4> piece;
#pragma unroll
  for (int i = 0; i < 8; ++i) piece.words[i] = __float_as_uint(v[i]);
  return piece;
}

__device__ __forceinline__ Piece<2> from_float(const float (&v)[8], __half) {
  Piece<2> piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2_raw raw = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    piece.words[i] = raw.x | static_cast<uint32_t>(raw.y) << 16;
  }
  return piece;
}

__device__ __forceinline__ Piece<2> from_float(const float (&v)[8], __nv_bfloat16) {
  Piece<2> piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162_raw raw = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    piece.words[i] = raw.x | static_cast<uint32_t>(raw.y) << 16;
  }
  return piece;
}

template <__nv_fp8_interpretation_t kKind>
__device__ __forceinline__ void dequantize_fp8(const Piece<1>& piece, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(piece.words[i / 2] >> (i % 2 * 16));
    const float2 pair = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, kKind)));
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

// The values of a quantised piece, without its scale.
__device__ __forceinline__ void dequantize(const Piece<1>& piece, __nv_fp8_e4m3, float (&v)[8]) {
  dequantize_fp8<__NV_E4M3>(piece, v);
}
__device__ __forceinline__ void dequantize(const Piece<1>& piece, __nv_fp8_e5m2, float (&v)[8]) {
  dequantize_fp8<__NV_E5M2>(piece, v);
}
__device__ __forceinline__ void dequantize(const Piece<1>& piece, int8_t, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = static_cast<int8_t>(piece.words[i / 4] >> (i % 4 * 8));
}

template <__nv_fp8_interpretation_t kKind>
__device__ __forceinline__ Piece<1> quantize_fp8(const float (&v)[8]) {
  Piece<1> piece = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t two = __nv_cvt_float2_to_fp8x2(make_float2(v[2 * i], v[2 * i + 1]), __NV_SATFINITE, kKind);
    piece.words[i / 2] |= two << (i % 2 * 16);
  }
  return piece;
}

// v rounded and saturated, infinities too; NaN stays NaN, and becomes 0 as int8.
__device__ __forceinline__ Piece<1> quantize(const float (&v)[8], __nv_fp8_e4m3) { return quantize_fp8<__NV_E4M3>(v); }
__device__ __forceinline__ Piece<1> quantize(const float (&v)[8], __nv_fp8_e5m2) { return quantize_fp8<__NV_E5M2>(v); }
__device__ __forceinline__ Piece<1> quantize(const float (&v)[8], int8_t) {
  int rounded[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float limited;  // from below, as -128 is not used; packing limits the rest
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(limited) : "f"(v[i]), "f"(-127.0f));
    rounded[i] = __float2int_rn(limited);
  }
  Piece<1> piece;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int* of = rounded + 4 * i;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(piece.words[i]) : "r"(of[3]), "r"(of[2]), "r"(0));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %0;" : "+r"(piece.words[i]) : "r"(of[1]), "r"(of[0]));
  }
  return piece;
}

template <class Cache>
constexpr float kLargestFinite = std::is_same_v<Cache, int8_t>          ? 127.0f
                                 : std::is_same_v<Cache, __nv_fp8_e5m2> ? 57344.0f
                                                                        : 448.0f;

// Calls f with a value of the C++ type behind a float dtype.
template <class F>
void dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(__half{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    default:
      return f(float{});
  }
}

// The same for a quantised dtype.
template <class F>
void dispatch_quantized(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return f(__nv_fp8_e4m3{});
    case DType::kFloat8E5M2:
      return f(__nv_fp8_e5m2{});
    default:
      return f(int8_t{});
  }
}

}  // namespace paged_attn
